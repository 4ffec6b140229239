"""plan: the best Strategy by several methods, its prediction, and why it is so.

In: a Program, a Cluster, a method and a budget. Out: a Plan, which is saved as JSON and can be
simulated, explained and run. Next room: run, which executes it.
Read plan.py first, then candidates.py (methods tried and scored), devices_needed.py (when nothing
fits), alternatives.py, explain.py and explanation.py (what another choice would cost).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.plan.candidates import (
        CostSource as CostSource,
    )
    from apportion.plan.candidates import (
        DefaultCosts as DefaultCosts,
    )
    from apportion.plan.candidates import (
        PlanCosts as PlanCosts,
    )
    from apportion.plan.candidates import (
        PlanningProgress as PlanningProgress,
    )
    from apportion.plan.decision import (
        WorkDivision as WorkDivision,
    )
    from apportion.plan.decision import (
        WorkDivisions as WorkDivisions,
    )
    from apportion.plan.decision import (
        decision as decision,
    )
    from apportion.plan.given_strategy import (
        plan_strategy as plan_strategy,
    )
    from apportion.plan.given_strategy import (
        repeated_ops as repeated_ops,
    )
    from apportion.plan.make_plan import (
        best_plans as best_plans,
    )
    from apportion.plan.make_plan import (
        compare_methods as compare_methods,
    )
    from apportion.plan.make_plan import (
        make_plan as make_plan,
    )
    from apportion.plan.make_plan import (
        warn_unsplit as warn_unsplit,
    )
    from apportion.plan.memory_defaults import (
        memory_defaults as memory_defaults,
    )
    from apportion.plan.memory_pins import (
        Pins as Pins,
    )
    from apportion.plan.plan import (
        Plan as Plan,
    )
    from apportion.plan.plan import (
        PlanTrial as PlanTrial,
    )
    from apportion.plan.plan import (
        PlanWarning as PlanWarning,
    )
    from apportion.plan.plan import (
        Prediction as Prediction,
    )
    from apportion.plan.plan import (
        with_certificate as with_certificate,
    )
    from apportion.plan.plan import (
        with_costs as with_costs,
    )
    from apportion.plan.plan import (
        with_model as with_model,
    )
    from apportion.plan.plan import (
        with_trials as with_trials,
    )
    from apportion.plan.plan_book import (
        book_sizes as book_sizes,
    )
    from apportion.plan.plan_book import (
        page as page,
    )
    from apportion.plan.plan_book import (
        planned_for as planned_for,
    )
    from apportion.plan.plan_book import (
        smaller_cluster as smaller_cluster,
    )
    from apportion.plan.plan_editor import (
        ChangeEffect as ChangeEffect,
    )
    from apportion.plan.plan_editor import (
        PlanEditor as PlanEditor,
    )
    from apportion.plan.plan_editor import (
        search_again as search_again,
    )
    from apportion.plan.plan_file import (
        plan_from_json as plan_from_json,
    )
    from apportion.plan.plan_file import (
        plan_to_json as plan_to_json,
    )
    from apportion.plan.plan_file import (
        read_plan as read_plan,
    )
    from apportion.plan.recomputation import (
        KEEP as KEEP,
    )
    from apportion.plan.recomputation import (
        MODULES as MODULES,
    )
    from apportion.plan.stale import (
        SSP as SSP,
    )
    from apportion.plan.stale import (
        with_staleness as with_staleness,
    )
    from apportion.plan.throughput import (
        throughput as throughput,
    )
    from apportion.plan.utilisation import (
        utilisation as utilisation,
    )

lazy_face(__name__)
