"""split: the ways to cut operators, and the choice of one for each.

In: a Graph and the descriptions of its operators. Out: a Space (every legal Split of every Op) and
a Strategy (the Choice of each Op, the layouts of some Values). No torch.
Read derive.py first (description to Split, by regions.py, restriction.py and partial.py), then
atoms.py (dimensions in factors), space.py, strategy.py, open_composites.py and repeats.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.split import (
        strategy as strategy,
    )
    from apportion.split.axis_effects import (
        PARTIAL as PARTIAL,
    )
    from apportion.split.axis_effects import (
        SEVERAL as SEVERAL,
    )
    from apportion.split.axis_effects import (
        WHOLE as WHOLE,
    )
    from apportion.split.axis_effects import (
        AxisEffect as AxisEffect,
    )
    from apportion.split.axis_effects import (
        AxisEffects as AxisEffects,
    )
    from apportion.split.communication import (
        AUTO as AUTO,
    )
    from apportion.split.communication import (
        BYTESCHEDULER as BYTESCHEDULER,
    )
    from apportion.split.communication import (
        DIRECT as DIRECT,
    )
    from apportion.split.communication import (
        HIERARCHICAL as HIERARCHICAL,
    )
    from apportion.split.communication import (
        MADE as MADE,
    )
    from apportion.split.communication import (
        NEED as NEED,
    )
    from apportion.split.communication import (
        NONE as NONE,
    )
    from apportion.split.communication import (
        P3 as P3,
    )
    from apportion.split.communication import (
        POLICIES as POLICIES,
    )
    from apportion.split.communication import (
        RANKED as RANKED,
    )
    from apportion.split.communication import (
        TICTAC as TICTAC,
    )
    from apportion.split.communication import (
        TREE as TREE,
    )
    from apportion.split.communication import (
        WFBP as WFBP,
    )
    from apportion.split.communication import (
        WITHIN as WITHIN,
    )
    from apportion.split.communication import (
        Communication as Communication,
    )
    from apportion.split.grid_choices import (
        MOST_AXES as MOST_AXES,
    )
    from apportion.split.grid_choices import (
        Grid as Grid,
    )
    from apportion.split.grid_choices import (
        axes_cut as axes_cut,
    )
    from apportion.split.grid_choices import (
        divisors as divisors,
    )
    from apportion.split.grid_choices import (
        one_cut as one_cut,
    )
    from apportion.split.grid_choices import (
        part_grids as part_grids,
    )
    from apportion.split.groups import (
        Groups as Groups,
    )
    from apportion.split.open_composites import (
        STATISTICS as STATISTICS,
    )
    from apportion.split.open_composites import (
        composites as composites,
    )
    from apportion.split.open_composites import (
        open_composites as open_composites,
    )
    from apportion.split.part import (
        Part as Part,
    )
    from apportion.split.part import (
        Split as Split,
    )
    from apportion.split.repeats import (
        ShortenedGraph as ShortenedGraph,
    )
    from apportion.split.repeats import (
        layers_of as layers_of,
    )
    from apportion.split.repeats import (
        shorten as shorten,
    )
    from apportion.split.space import (
        Space as Space,
    )
    from apportion.split.strategy import (
        Choice as Choice,
    )
    from apportion.split.strategy import (
        Layout as Layout,
    )
    from apportion.split.strategy import (
        Strategy as Strategy,
    )
    from apportion.split.strategy import (
        check_wire as check_wire,
    )
    from apportion.split.strategy import (
        grid_boxes as grid_boxes,
    )
    from apportion.split.strategy import (
        space_of as space_of,
    )
    from apportion.split.strategy import (
        unsplit_choice as unsplit_choice,
    )
    from apportion.split.strategy import (
        verify_choice as verify_choice,
    )
    from apportion.split.strategy import (
        verify_strategy as verify_strategy,
    )

lazy_face(__name__)
