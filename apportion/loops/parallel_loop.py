"""ParallelLoop: a loop's body with its analysis, and how it is called.

Part of the room loops; read this first.

    @loops.parallel(over=ratings)
    def step(key, rating, W, H, rate):
        u, i = key
        ...

    step.explain(W, H, 0.01)
    with loops.processes(4):
        step(W, H, 0.01)

A call goes over all elements of `over` once. It reads the body, finds out which iterations depend
on which, chooses a scheme that keeps that, and lets the session's processes run it (plan_loop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from apportion.loops.array import SparseArray
from apportion.loops.compile_kernel import refusal
from apportion.loops.explain_loop import LoopExplanation, explain_loop
from apportion.loops.loop_body import LoopError, closure, read_body
from apportion.loops.loop_plan import LoopPlan
from apportion.loops.measure_loop import predict_call
from apportion.loops.plain_mode import SPECIAL
from apportion.loops.plan_loop import LoopPlanner
from apportion.loops.predict_loop import LoopPrediction
from apportion.loops.rank_requests import RunPass
from apportion.loops.references import subscripted_parameters
from apportion.loops.run_pass import Fault, PassReport
from apportion.loops.session import current_session
from apportion.machine import Cluster

DEPTH = 2
ANY_NUMBER = 0.01  # for numbers that a prediction does not depend on


def parallel(
    over: SparseArray, ordered: bool = False, depth: int = DEPTH, repeated: bool = False
) -> Callable[[Callable[..., Any]], ParallelLoop]:
    """Makes a function the body of a loop over the elements of an array.

    ordered  iterations have to seem to run in the order of their keys. Without it they seem to run
             one after the other too, but in an order that lets all processes work at once.
    depth    how many parts of the rotating arrays there are for each process: while one is sent
             another is worked on
    repeated every pass touches the same elements of arrays: which ones is found out once
    """
    if not isinstance(over, SparseArray):
        raise LoopError("a loop goes over an array of loops.array, such as from_coordinates makes")
    if depth < 1:
        raise LoopError(f"a depth of {depth} makes no sense; give at least 1")
    return lambda function: ParallelLoop(
        LoopPlanner(read_body(function, SPECIAL), over, ordered, depth, repeated), function
    )


@dataclass(eq=False)
class ParallelLoop:
    """See the head of this file."""

    planner: LoopPlanner
    function: Callable[..., Any]
    calls: int = 0
    last: list[PassReport] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> None:
        session = current_session()
        bound = self.planner.bind(arguments)
        plan = self.planner.plan(session, bound, self.calls)
        self.planner.check_sample(session, bound, self.function)
        self.planner.over.is_changed |= self.planner.body.returns
        self.last = session.ask(RunPass(plan))
        if self.planner.turned and any(report.refused for report in self.last):
            self.planner.turned = False
            plan = self.planner.plan(session, bound, self.calls)
            self.last = session.ask(RunPass(plan))
        self.calls += 1
        for report in self.last:
            if report.refused:
                raise refusal(self.planner.body, plan.text, report.refused)
            if report.fault is not None:
                raise self._fault(plan, report.fault)

    def explain(self, *arguments: Any, processes: int | None = None) -> LoopExplanation:
        """How the loop is divided among so many processes, and why. Without arguments those of the
        parameters' names are taken from around the body, as far as they are there."""
        count = processes or current_session().count
        count = count if count > 1 else 2
        return explain_loop(self.planner, self._known(arguments), count)

    def predict(self, cluster: Cluster, *arguments: Any) -> LoopPrediction:
        """How long a pass takes on the processes of a cluster: an element is timed on this machine,
        on a part of the data. Without arguments as `explain`."""
        known, body = self._known(arguments), self.planner.body
        missing = [name for name in subscripted_parameters(body) if name not in known]
        if missing:
            raise LoopError(
                f"{body.name} needs {', '.join(missing)}, and where it is defined there is nothing "
                "of that name"
            )
        given = tuple(known.get(name, ANY_NUMBER) for name in body.parameters)
        return predict_call(self.planner, self.planner.bind(given), cluster)

    def _known(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """The arguments by their names, or whatever has these names where the body is defined."""
        wanted = self.planner.body.parameters
        if arguments:
            self.planner.bind(arguments)
            return dict(zip(wanted, arguments, strict=True))
        around = {**self.function.__globals__, **closure(self.function)}
        return {name: around[name] for name in wanted if name in around}

    def _fault(self, plan: LoopPlan, fault: Fault) -> LoopError:
        code, index, key = fault
        array, line = plan.text.faults[code]
        return self.planner.body.error(
            line, f"the subscript {index} of {array} is out of range in iteration {key}"
        )
