"""place: which device runs which operator, if nothing is cut.

In: a graph from elsewhere with its own costs, or a captured step, a Cluster and its costs. Out: a
PlacementProblem, and a placement: a device for every unit. No torch.
Read placement_problem.py, objective.py and placers.py, which has one row for each placer; then by
folder: imports (what makes problems), objectives, lists, searches, loads, cuts, policy, coarse.
run_placer.py is where a request comes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.place.coarse.coarsen import (
        coarsen as coarsen,
    )
    from apportion.place.imports.captured import (
        captured_problem as captured_problem,
    )
    from apportion.place.imports.captured import (
        op_of_node as op_of_node,
    )
    from apportion.place.imports.doppler_graph import (
        DOPPLER as DOPPLER,
    )
    from apportion.place.imports.export_graph import (
        fiddle_data as fiddle_data,
    )
    from apportion.place.imports.imported import (
        imported_problem as imported_problem,
    )
    from apportion.place.imports.imported import (
        with_expert as with_expert,
    )
    from apportion.place.imports.read_graph import (
        read_graph as read_graph,
    )
    from apportion.place.imports.read_graph import (
        read_split_file as read_split_file,
    )
    from apportion.place.objective import (
        Evaluation as Evaluation,
    )
    from apportion.place.objective import (
        PlacementObjective as PlacementObjective,
    )
    from apportion.place.objective import (
        PlacementResult as PlacementResult,
    )
    from apportion.place.objective import (
        PlacerProgress as PlacerProgress,
    )
    from apportion.place.objective import (
        Report as Report,
    )
    from apportion.place.objective import (
        StepObjective as StepObjective,
    )
    from apportion.place.objective_names import (
        STEP as STEP,
    )
    from apportion.place.objective_names import (
        THROUGHPUT as THROUGHPUT,
    )
    from apportion.place.objectives.step_time import (
        worst_ticks as worst_ticks,
    )
    from apportion.place.placement_problem import (
        NEVER as NEVER,
    )
    from apportion.place.placement_problem import (
        PlacementColumns as PlacementColumns,
    )
    from apportion.place.placement_problem import (
        PlacementLinks as PlacementLinks,
    )
    from apportion.place.placement_problem import (
        PlacementProblem as PlacementProblem,
    )
    from apportion.place.placement_problem import (
        check_placement as check_placement,
    )
    from apportion.place.placers import (
        PLACERS as PLACERS,
    )
    from apportion.place.placers import (
        placers_help as placers_help,
    )
    from apportion.place.policy.policy_comparison import (
        evaluate_policy as evaluate_policy,
    )
    from apportion.place.policy.policy_decode import (
        Decoded as Decoded,
    )
    from apportion.place.policy.policy_decode import (
        by_first_use as by_first_use,
    )
    from apportion.place.policy.policy_decode import (
        decode as decode,
    )
    from apportion.place.policy.policy_features import (
        PolicyGraph as PolicyGraph,
    )
    from apportion.place.policy.policy_features import (
        policy_graph as policy_graph,
    )
    from apportion.place.policy.policy_features import (
        unit_features as unit_features,
    )
    from apportion.place.policy.policy_file import (
        read_policy as read_policy,
    )
    from apportion.place.policy.policy_file import (
        write_policy as write_policy,
    )
    from apportion.place.policy.policy_network import (
        PolicyNetwork as PolicyNetwork,
    )
    from apportion.place.policy.policy_network import (
        encode as encode,
    )
    from apportion.place.policy.policy_network import (
        first_scores as first_scores,
    )
    from apportion.place.policy.policy_network import (
        load_network as load_network,
    )
    from apportion.place.policy.policy_network import (
        new_network as new_network,
    )
    from apportion.place.policy.policy_network import (
        pair_weights as pair_weights,
    )
    from apportion.place.policy.policy_network import (
        save_network as save_network,
    )
    from apportion.place.policy.policy_network import (
        tensor_shapes as tensor_shapes,
    )
    from apportion.place.problem_file import (
        load_problem as load_problem,
    )
    from apportion.place.problem_file import (
        save_problem as save_problem,
    )
    from apportion.place.run_placer import (
        Judge as Judge,
    )
    from apportion.place.run_placer import (
        PlacedProblem as PlacedProblem,
    )
    from apportion.place.run_placer import (
        place as place,
    )
    from apportion.place.run_placer import (
        with_memory_limit as with_memory_limit,
    )
    from apportion.place.searches.local_search import (
        local_search as local_search,
    )

lazy_face(__name__)
