"""simulate: when every task of a TaskGraph runs, and what memory is held meanwhile.

In: a TaskGraph, a Cluster and a CostModel. Out: a Timeline with time and memory. No torch.
delta/ does it again after one changed Choice, equal to the full simulation bit for bit.
Read schedule.py first (the specification beside its compiled twin), then durations.py, routes.py,
network.py, simulate.py, repeat_steps.py, memory_curve.py, timeline.py, breakdown.py, slack.py, and
delta/delta.py last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.simulate.breakdown import (
        ComparisonRow as ComparisonRow,
    )
    from apportion.simulate.breakdown import (
        breakdowns as breakdowns,
    )
    from apportion.simulate.breakdown import (
        comparison as comparison,
    )
    from apportion.simulate.breakdown import (
        measured_timeline as measured_timeline,
    )
    from apportion.simulate.delta.delta import (
        Delta as Delta,
    )
    from apportion.simulate.delta.delta import (
        delta_compile_seconds as delta_compile_seconds,
    )
    from apportion.simulate.durations import (
        feeds as feeds,
    )
    from apportion.simulate.durations import (
        issue_nanoseconds as issue_nanoseconds,
    )
    from apportion.simulate.durations import (
        nanoseconds as nanoseconds,
    )
    from apportion.simulate.durations import (
        restricted as restricted,
    )
    from apportion.simulate.durations import (
        shares as shares,
    )
    from apportion.simulate.fusion import (
        FusedGroups as FusedGroups,
    )
    from apportion.simulate.fusion import (
        fused_groups as fused_groups,
    )
    from apportion.simulate.fusion import (
        fused_traffic as fused_traffic,
    )
    from apportion.simulate.fusion import (
        unwritten_slots as unwritten_slots,
    )
    from apportion.simulate.host_bytes import (
        host_excess as host_excess,
    )
    from apportion.simulate.host_bytes import (
        host_peaks as host_peaks,
    )
    from apportion.simulate.memory_curve import (
        Cause as Cause,
    )
    from apportion.simulate.memory_curve import (
        Curve as Curve,
    )
    from apportion.simulate.memory_curve import (
        Peak as Peak,
    )
    from apportion.simulate.memory_curve import (
        curves as curves,
    )
    from apportion.simulate.memory_curve import (
        granules as granules,
    )
    from apportion.simulate.memory_curve import (
        op_name as op_name,
    )
    from apportion.simulate.memory_curve import (
        peak as peak,
    )
    from apportion.simulate.memory_curve import (
        peaks as peaks,
    )
    from apportion.simulate.network import (
        needed_at as needed_at,
    )
    from apportion.simulate.network import (
        network as network,
    )
    from apportion.simulate.schedule import (
        LinkSpans as LinkSpans,
    )
    from apportion.simulate.schedule import (
        Network as Network,
    )
    from apportion.simulate.schedule import (
        link_spans as link_spans,
    )
    from apportion.simulate.schedule import (
        queued as queued,
    )
    from apportion.simulate.schedule import (
        schedule_compiled as schedule_compiled,
    )
    from apportion.simulate.segments import (
        SEGMENT_PAGES as SEGMENT_PAGES,
    )
    from apportion.simulate.segments import (
        segment_bytes as segment_bytes,
    )
    from apportion.simulate.simulate import (
        simulate as simulate,
    )
    from apportion.simulate.slack import (
        slack as slack,
    )
    from apportion.simulate.timeline import (
        Timeline as Timeline,
    )

lazy_face(__name__)
