"""search: every method that finds a Strategy.

In: a Problem (a Graph, its Space, a Cluster and a CostModel) with a budget and a seed. Out: a
SearchResult. No torch. One algorithm a file; registry.py has one row for each.
Read problem.py and registry.py first, then baselines/ (fixed rules), levels/ (Tofu), layers/
(OptCNN), walks/ (FlexFlow), placement.py (the placers of place/ as methods) and tables/ (exact
elimination, which others use).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.search.baselines.data import (
        data as data,
    )
    from apportion.search.baselines.data import (
        sample_classes as sample_classes,
    )
    from apportion.search.baselines.fsdp import (
        ShardMesh as ShardMesh,
    )
    from apportion.search.baselines.fsdp import (
        shard_state as shard_state,
    )
    from apportion.search.baselines.layer_placement import (
        with_layers_as_expert as with_layers_as_expert,
    )
    from apportion.search.baselines.megatron import (
        tensor_parallel as tensor_parallel,
    )
    from apportion.search.baselines.ssp import (
        NOT_THE_SAME as NOT_THE_SAME,
    )
    from apportion.search.levels.certificate import (
        certify as certify,
    )
    from apportion.search.placement import (
        strategy_of as strategy_of,
    )
    from apportion.search.problem import (
        Problem as Problem,
    )
    from apportion.search.problem import (
        Progress as Progress,
    )
    from apportion.search.problem import (
        SearchResult as SearchResult,
    )
    from apportion.search.problem import (
        UnsuitableMethod as UnsuitableMethod,
    )
    from apportion.search.registry import (
        METHODS as METHODS,
    )
    from apportion.search.registry import (
        compared_by_default as compared_by_default,
    )
    from apportion.search.registry import (
        help_text as help_text,
    )
    from apportion.search.registry import (
        tried_by_auto as tried_by_auto,
    )

lazy_face(__name__)
