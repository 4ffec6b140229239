"""objective_names: what the objectives are called. Nothing heavy is imported here, since the
command line's help names them."""

STEP, THROUGHPUT, LATENCY = "step", "throughput", "latency"
OBJECTIVES = (STEP, THROUGHPUT, LATENCY)
