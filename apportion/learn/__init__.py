"""learn: placement by learned policies, and their training.

In: PlacementProblems. Out: a placement for each, and policies that are saved and used again. Needs
torch; a trained `policy` is used without it (place/policy/policy.py).
Read train_policy.py, then placeto.py, gdp.py, colocrl.py and hdp.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.learn.gdp import (
        train_gdp as train_gdp,
    )
    from apportion.learn.gdp_file import (
        load_gdp as load_gdp,
    )
    from apportion.learn.gdp_file import (
        save_gdp as save_gdp,
    )
    from apportion.learn.placeto_policy import (
        load_placeto as load_placeto,
    )
    from apportion.learn.placeto_training import (
        EpisodeReport as EpisodeReport,
    )
    from apportion.learn.placeto_training import (
        train_placeto as train_placeto,
    )
    from apportion.learn.train_policy import (
        PolicyTraining as PolicyTraining,
    )
    from apportion.learn.train_policy import (
        TrainingProgress as TrainingProgress,
    )
    from apportion.learn.train_policy import (
        train_policy as train_policy,
    )

lazy_face(__name__)
