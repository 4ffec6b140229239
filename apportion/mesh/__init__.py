"""mesh: plans as PyTorch users write them by hand, on a device mesh with FSDP2, and back.

In: a Plan, or a MeshLayout that somebody has.
Out: a MeshLayout and a program of plain PyTorch, or a refusal by the name of the operator that
cannot be said so; a Plan of the MeshLayout.
Read mesh_layout.py first (what a layout says), then layout_strategy.py (what it means for every
Op), plan_layout.py (a Plan of it), layout_of_plan.py (the way back), sample_means.py (what ranks
may average) and program_text.py (the program).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.mesh.layout_of_plan import (
        layout_of_plan as layout_of_plan,
    )
    from apportion.mesh.mesh_layout import (
        layout_text as layout_text,
    )
    from apportion.mesh.mesh_layout import (
        load_layout as load_layout,
    )
    from apportion.mesh.plan_layout import (
        plan_layout as plan_layout,
    )
    from apportion.mesh.program_text import (
        check_program as check_program,
    )
    from apportion.mesh.program_text import (
        program_notes as program_notes,
    )
    from apportion.mesh.program_text import (
        program_text as program_text,
    )

lazy_face(__name__)
