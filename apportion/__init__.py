"""apportion divides a training step written for one device over many.

These are its public names. The package is a house of rooms in the order in which data passes them:
capture, describe, split, machine, lower, simulate, search, execute, verify, plan, run, show, cli;
docs/map.md walks one step through them. `apportion.loops` and `apportion.tables` are public too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face
from apportion.version import VERSION

if TYPE_CHECKING:
    from apportion.capture import CaptureError as CaptureError
    from apportion.capture import Program as Program
    from apportion.capture import capture as capture
    from apportion.checkpoint import Resumed as Resumed
    from apportion.checkpoint import load_checkpoint as load_checkpoint
    from apportion.checkpoint import save_checkpoint as save_checkpoint
    from apportion.describe import ALL as ALL
    from apportion.describe import Max as Max
    from apportion.describe import Min as Min
    from apportion.describe import Output as Output
    from apportion.describe import Prod as Prod
    from apportion.describe import Sum as Sum
    from apportion.describe import describe as describe
    from apportion.describe import f as f
    from apportion.describe import opaque as opaque
    from apportion.graph import Graph as Graph
    from apportion.machine import Cluster as Cluster
    from apportion.machine import cluster as cluster
    from apportion.plan import Plan as Plan
    from apportion.run import Check as Check
    from apportion.run import DriftWarning as DriftWarning
    from apportion.run import Runner as Runner
    from apportion.run import StepMetrics as StepMetrics
    from apportion.run import check as check
    from apportion.run import compare as compare
    from apportion.run import distribute as distribute
    from apportion.run import plan as plan
    from apportion.run import ways_out as ways_out
    from apportion.verify import check_splits as check_splits

__version__ = VERSION
lazy_face(__name__)
