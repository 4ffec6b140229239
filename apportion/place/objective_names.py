"""objective_names: what the objectives are called. Nothing heavy is imported here, since the help of
the command line names them."""

STEP, THROUGHPUT, LATENCY = "step", "throughput", "latency"
OBJECTIVES = (STEP, THROUGHPUT, LATENCY)
