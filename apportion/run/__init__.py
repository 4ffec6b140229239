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
        StepSource as StepSource,
    )
    from apportion.run.calibrate import (
        cached as cached,
    )
    from apportion.run.calibrate import (
        condition as condition,
    )
    from apportion.run.calibrate import (
        divided as divided,
    )
    from apportion.run.calibrate import (
        machine as machine,
    )
    from apportion.run.calibrate import (
        missing as missing,
    )
    from apportion.run.plan_here import (
        compare as compare,
    )
    from apportion.run.plan_here import (
        plan as plan,
    )
    from apportion.run.run import (
        Run as Run,
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

lazy_face(__name__)
