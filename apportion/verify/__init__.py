"""verify: whether every derived split computes what the whole operator computes.

In: an operator and calls of it. Out: splits that are wrong, missing or impossible, by brute force.
Read run_split.py first, then verify_call.py (all splits of a call), blind_search.py (splits that
were not derived), torch_samples.py and own_samples/ (calls to try), crash_proof.py,
verify_step.py, check_splits.py (for users) and survey.py (for all operators).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.verify import (
        survey as survey,
    )
    from apportion.verify.check_splits import (
        check_splits as check_splits,
    )
    from apportion.verify.survey import (
        SurveySummary as SurveySummary,
    )

lazy_face(__name__)
