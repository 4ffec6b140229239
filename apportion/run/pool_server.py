"""What multiprocessing's server does at its end: it removes what a killed parent could not.

Part of the room run. That server imports this module when it starts (pool.py); in other processes
it does nothing. The server ends when the process that has started it has, in whatever way; the
processes that it forks do not come here at their end.
"""

from __future__ import annotations

import atexit
import os
import sys

from apportion.run.left_folders import remove_after

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(remove_after, os.getppid())
