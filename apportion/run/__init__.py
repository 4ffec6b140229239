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
    from apportion.run.pool import (
        SharedPool as SharedPool,
    )
    from apportion.run.renewal import (
        count_missing as count_missing,
    )
    from apportion.run.run import (
        Run as Run,
    )
    from apportion.run.run import (
        check_shared_gpu as check_shared_gpu,
    )
    from apportion.run.run import (
        run as run,
    )
    from apportion.run.runner import (
        Runner as Runner,
    )
    from apportion.run.runner import (
        distribute as distribute,
    )
    from apportion.run.step_source import (
        source_of_model as source_of_model,
    )

lazy_face(__name__)
