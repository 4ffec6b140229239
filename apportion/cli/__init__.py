"""cli: the commands that people type.

In: arguments. Out: an exit status: 0 for success, 1 when the work failed, 2 for a wrong request.
Everything heavy is imported inside commands, so that help comes at once.
Read main.py first, then options.py, requests.py and the modules named after their commands.
calibrate_models.py and explain_plan.py do the work of two of them; demo.py is what `make demo`
runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    pass

lazy_face(__name__)
