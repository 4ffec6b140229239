"""cli: the commands that people type.

In: arguments. Out: an exit status: 0 for success, 1 when the work failed, 2 for a wrong request.
Everything heavy is imported inside commands, so that help comes at once.
Read main.py first; calibrate_command.py and explain_command.py are commands of their own, demo.py
is what `make demo` runs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    pass

# NumPy asks for huge pages for large columns, which the kernel has to clear whole, and to put
# together first where memory is in pieces: of planning a Llama of 8 billion parameters for 64
# devices that took a tenth. To be said before NumPy is loaded.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")

lazy_face(__name__)
