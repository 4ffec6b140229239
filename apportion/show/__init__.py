"""show: what people and other programs see of plans and runs.

In: Plans, Timelines, Clusters. Out: tables on a terminal, JSON facts, an HTML report, traces for
Perfetto and Chakra. Next room: cli, which prints them.
Read tables.py and json_facts.py first, then report.py with templates/, perfetto.py, chakra.py,
cluster_tables.py, placement_tables.py, progress.py, placement_progress.py and streams.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.show import (
        cluster_tables as cluster_tables,
    )
    from apportion.show import (
        plan_tables as plan_tables,
    )
    from apportion.show import (
        tables as tables,
    )
    from apportion.show.chakra import (
        export as export,
    )
    from apportion.show.json_facts import (
        comparison_facts as comparison_facts,
    )
    from apportion.show.json_facts import (
        plan_facts as plan_facts,
    )
    from apportion.show.json_facts import (
        run_facts as run_facts,
    )
    from apportion.show.json_facts import (
        step_facts as step_facts,
    )
    from apportion.show.json_facts import (
        way_facts as way_facts,
    )
    from apportion.show.json_facts import (
        why_facts as why_facts,
    )
    from apportion.show.perfetto import (
        LinkUsage as LinkUsage,
    )
    from apportion.show.perfetto import (
        trace as trace,
    )
    from apportion.show.placement_progress import (
        placement_progress as placement_progress,
    )
    from apportion.show.placement_tables import (
        placed_tables as placed_tables,
    )
    from apportion.show.placement_tables import (
        placement_facts as placement_facts,
    )
    from apportion.show.plain_table import (
        plain_table as plain_table,
    )
    from apportion.show.policy_tables import (
        policy_comparison as policy_comparison,
    )
    from apportion.show.policy_tables import (
        policy_tables as policy_tables,
    )
    from apportion.show.progress import (
        progress as progress,
    )
    from apportion.show.report import (
        page as page,
    )
    from apportion.show.streams import (
        answer as answer,
    )
    from apportion.show.streams import (
        note as note,
    )
    from apportion.show.streams import (
        say as say,
    )
    from apportion.show.streams import (
        stdout_kept as stdout_kept,
    )
    from apportion.show.streams import (
        warnings_noted as warnings_noted,
    )

lazy_face(__name__)
