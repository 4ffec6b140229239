"""loops: parallel loops over data that keep their meaning.

In: a function that is the body of a loop, and arrays. Out: the arrays after all iterations,
computed by several processes, equal to a serial run. Not part of the walk of a training step:
matrix factorisation, topic models and sparse regression are loops that read and write shared
arrays. Read parallel_loop.py first (what users call), then the analysis in the order of its data:
loop_body.py, subscripts.py, references.py, dependence.py, schemes.py, tile_schedule.py; then how it
runs: array.py, plan_loop.py, kernel_text.py, run_pass.py, session.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.loops import array as array
    from apportion.loops.buffer import buffer as buffer
    from apportion.loops.buffer import stale as stale
    from apportion.loops.checkpoint import load as load
    from apportion.loops.checkpoint import save as save
    from apportion.loops.explain_loop import LoopExplanation as LoopExplanation
    from apportion.loops.loop_body import LoopError as LoopError
    from apportion.loops.parallel_loop import ParallelLoop as ParallelLoop
    from apportion.loops.parallel_loop import parallel as parallel
    from apportion.loops.plain_mode import accumulate as accumulate
    from apportion.loops.plain_mode import uniform as uniform
    from apportion.loops.predict_loop import LoopPrediction as LoopPrediction
    from apportion.loops.session import accumulated as accumulated
    from apportion.loops.session import processes as processes

lazy_face(__name__)
