"""What multiprocessing's server does besides: it leaves an interrupt to the parent, from before it
forks processes, and at its end removes what a killed parent could not.

Part of the room run. That server imports this module when it starts (pool.py); in other processes
it does nothing. The server ends when the process that has started it has, in whatever way; the
processes that it forks do not come here at their end.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from apportion.run.left_folders import remove_after

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    # Processes get what the server had when it began; they would say where they were interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(remove_after, os.getppid())
