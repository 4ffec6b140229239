"""describe: what operators compute, stated once in a small language.

In: an operator's name and the shapes of its arguments. Out: a Description and its formula, from
which split/ derives every way to cut the operator. No torch.
Read language.py first, then ops/matmul.py as an example, interval.py (ranges of indices),
formula.py (a description evaluated for shapes) and watched_extents.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.describe import (
        ops as ops,
    )
    from apportion.describe.descriptions import (
        DESCRIPTIONS as DESCRIPTIONS,
    )
    from apportion.describe.descriptions import (
        REASONS as REASONS,
    )
    from apportion.describe.descriptions import (
        Description as Description,
    )
    from apportion.describe.descriptions import (
        PartLocation as PartLocation,
    )
    from apportion.describe.descriptions import (
        describe as describe,
    )
    from apportion.describe.descriptions import (
        find_description as find_description,
    )
    from apportion.describe.descriptions import (
        reason_unsplit as reason_unsplit,
    )
    from apportion.describe.errors import (
        BadDescription as BadDescription,
    )
    from apportion.describe.errors import (
        IllegalCut as IllegalCut,
    )
    from apportion.describe.errors import (
        Undescribed as Undescribed,
    )
    from apportion.describe.errors import (
        bad_description as bad_description,
    )
    from apportion.describe.formula import (
        Formula as Formula,
    )
    from apportion.describe.formula import (
        accesses_of as accesses_of,
    )
    from apportion.describe.formula import (
        arguments_read as arguments_read,
    )
    from apportion.describe.formula import (
        check_formula as check_formula,
    )
    from apportion.describe.formula import (
        depends_on_position as depends_on_position,
    )
    from apportion.describe.formula import (
        evaluate_formula as evaluate_formula,
    )
    from apportion.describe.formula import (
        evaluate_outputs as evaluate_outputs,
    )
    from apportion.describe.interval import (
        Affine as Affine,
    )
    from apportion.describe.interval import (
        Box as Box,
    )
    from apportion.describe.interval import (
        Factors as Factors,
    )
    from apportion.describe.interval import (
        Range as Range,
    )
    from apportion.describe.interval import (
        bounds as bounds,
    )
    from apportion.describe.interval import (
        flatten as flatten,
    )
    from apportion.describe.interval import (
        full as full,
    )
    from apportion.describe.interval import (
        lengths as lengths,
    )
    from apportion.describe.interval import (
        part_range as part_range,
    )
    from apportion.describe.interval import (
        refine as refine,
    )
    from apportion.describe.interval import (
        runs as runs,
    )
    from apportion.describe.interval import (
        unflatten as unflatten,
    )
    from apportion.describe.interval import (
        volume as volume,
    )
    from apportion.describe.language import (
        ALL as ALL,
    )
    from apportion.describe.language import (
        Access as Access,
    )
    from apportion.describe.language import (
        All as All,
    )
    from apportion.describe.language import (
        Apply as Apply,
    )
    from apportion.describe.language import (
        Const as Const,
    )
    from apportion.describe.language import (
        Expr as Expr,
    )
    from apportion.describe.language import (
        Gather as Gather,
    )
    from apportion.describe.language import (
        Index as Index,
    )
    from apportion.describe.language import (
        Max as Max,
    )
    from apportion.describe.language import (
        Min as Min,
    )
    from apportion.describe.language import (
        Opaque as Opaque,
    )
    from apportion.describe.language import (
        Output as Output,
    )
    from apportion.describe.language import (
        Position as Position,
    )
    from apportion.describe.language import (
        Prod as Prod,
    )
    from apportion.describe.language import (
        Quotient as Quotient,
    )
    from apportion.describe.language import (
        Reduce as Reduce,
    )
    from apportion.describe.language import (
        Sum as Sum,
    )
    from apportion.describe.language import (
        f as f,
    )
    from apportion.describe.language import (
        opaque as opaque,
    )
    from apportion.describe.ops.host import (
        FROM_HOST_KIND as FROM_HOST_KIND,
    )
    from apportion.describe.ops.host import (
        HOST_KINDS as HOST_KINDS,
    )
    from apportion.describe.ops.host import (
        ON_HOST_KIND as ON_HOST_KIND,
    )
    from apportion.describe.ops.host import (
        TO_HOST_KIND as TO_HOST_KIND,
    )
    from apportion.describe.ops.update import (
        HOST_UPDATE_KIND as HOST_UPDATE_KIND,
    )
    from apportion.describe.ops.update import (
        UPDATE_KIND as UPDATE_KIND,
    )
    from apportion.describe.watched_extents import (
        shape_pattern as shape_pattern,
    )

lazy_face(__name__)
