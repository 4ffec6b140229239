"""run: a Plan trains on real processes, and this machine is measured for predictions.

In: a Program and a Plan. Out: losses, new state, and what was measured beside what was predicted.
Read runner.py first (inside a rank), then process.py and pool.py (ranks that we start), run.py
(the command), plan_here.py (planning for this machine), calibrate.py, calibrate_cuda.py,
rehearse.py and trial.py (measurements).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.run import (
        calibrate_cuda as calibrate_cuda,
    )
    from apportion.run.calibrate import (
        Calibrator as Calibrator,
    )
    from apportion.run.calibrate import (
        lower_strategy as lower_strategy,
    )
    from apportion.run.calibrate_host import (
        host_lines as host_lines,
    )
    from apportion.run.calibrate_hosts import (
        HostNetwork as HostNetwork,
    )
    from apportion.run.calibrate_hosts import (
        cluster_text as cluster_text,
    )
    from apportion.run.calibrate_hosts import (
        measure_hosts as measure_hosts,
    )
    from apportion.run.calibrate_hosts import (
        network_rows as network_rows,
    )
    from apportion.run.check import (
        Check as Check,
    )
    from apportion.run.check import (
        check as check,
    )
    from apportion.run.cost_cache import (
        cached_costs as cached_costs,
    )
    from apportion.run.cost_cache import (
        condition_of as condition_of,
    )
    from apportion.run.cost_cache import (
        keep_costs as keep_costs,
    )
    from apportion.run.cost_cache import (
        machine_name as machine_name,
    )
    from apportion.run.plan_here import (
        compare as compare,
    )
    from apportion.run.plan_here import (
        plan as plan,
    )
    from apportion.run.plan_here import (
        planning_costs as planning_costs,
    )
    from apportion.run.pool import (
        ProcessPool as ProcessPool,
    )
    from apportion.run.pool import (
        SharedPool as SharedPool,
    )
    from apportion.run.renewal import (
        count_missing as count_missing,
    )
    from apportion.run.run import (
        FREEDOM as FREEDOM,
    )
    from apportion.run.run import (
        Run as Run,
    )
    from apportion.run.run import (
        RunOptions as RunOptions,
    )
    from apportion.run.run import (
        check_shared_gpu as check_shared_gpu,
    )
    from apportion.run.run import (
        resumed_program as resumed_program,
    )
    from apportion.run.run import (
        run as run,
    )
    from apportion.run.run_tables import (
        run_tables as run_tables,
    )
    from apportion.run.runner import (
        Runner as Runner,
    )
    from apportion.run.runner import (
        distribute as distribute,
    )
    from apportion.run.runner import (
        join_job as join_job,
    )
    from apportion.run.step_meter import (
        DriftWarning as DriftWarning,
    )
    from apportion.run.step_metrics import (
        StepMetrics as StepMetrics,
    )
    from apportion.run.step_metrics import (
        open_sink as open_sink,
    )
    from apportion.run.step_source import (
        source_of_model as source_of_model,
    )
    from apportion.run.training import (
        SavingOrder as SavingOrder,
    )
    from apportion.run.vary_batch import (
        FREE as FREE,
    )
    from apportion.run.ways_out import (
        WayOut as WayOut,
    )
    from apportion.run.ways_out import (
        ways_out as ways_out,
    )

lazy_face(__name__)
