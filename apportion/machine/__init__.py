"""machine: the devices and links to plan for, and what work costs on them.

In: a preset's name, a TOML file or a count such as 8xh100. Out: a Cluster and a CostModel.
No torch. Presets are in presets/, measured cost tables in costs/.
Read cluster.py first, then cluster_file.py (TOML), collective.py and wire_time.py (messages),
cost_table.py (what was measured), cost_fit.py (lines through it) and cost_model.py (seconds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.machine import (
        cost_fit as cost_fit,
    )
    from apportion.machine.cluster import (
        cluster as cluster,
    )
    from apportion.machine.cluster import (
        cores as cores,
    )
    from apportion.machine.cluster import (
        known as known,
    )
    from apportion.machine.cluster_file import (
        MAX_DEVICES as MAX_DEVICES,
    )
    from apportion.machine.collective import (
        ALL_GATHER as ALL_GATHER,
    )
    from apportion.machine.collective import (
        ALL_TO_ALL as ALL_TO_ALL,
    )
    from apportion.machine.collective import (
        PATTERNS as PATTERNS,
    )
    from apportion.machine.collective import (
        REDUCE_SCATTER as REDUCE_SCATTER,
    )
    from apportion.machine.collective import (
        Profile as Profile,
    )
    from apportion.machine.collective import (
        all_reduce as all_reduce,
    )
    from apportion.machine.collective import (
        all_reduce_profile as all_reduce_profile,
    )
    from apportion.machine.collective import (
        collective as collective,
    )
    from apportion.machine.collective import (
        profile as profile,
    )
    from apportion.machine.cost_fit import (
        fits as fits,
    )
    from apportion.machine.cost_fit import (
        line as line,
    )
    from apportion.machine.cost_model import (
        ASSUMED as ASSUMED,
    )
    from apportion.machine.cost_model import (
        ESTIMATED as ESTIMATED,
    )
    from apportion.machine.cost_model import (
        FITTED as FITTED,
    )
    from apportion.machine.cost_model import (
        MEASURED as MEASURED,
    )
    from apportion.machine.cost_model import (
        CostModel as CostModel,
    )
    from apportion.machine.cost_model import (
        PriceTable as PriceTable,
    )
    from apportion.machine.cost_model import (
        ahead_nanoseconds as ahead_nanoseconds,
    )
    from apportion.machine.cost_model import (
        assemble_seconds as assemble_seconds,
    )
    from apportion.machine.cost_model import (
        assembly_price as assembly_price,
    )
    from apportion.machine.cost_model import (
        classes as classes,
    )
    from apportion.machine.cost_model import (
        compute_price as compute_price,
    )
    from apportion.machine.cost_model import (
        compute_seconds as compute_seconds,
    )
    from apportion.machine.cost_model import (
        default_cost as default_cost,
    )
    from apportion.machine.cost_model import (
        dump_cost as dump_cost,
    )
    from apportion.machine.cost_model import (
        exchange_line as exchange_line,
    )
    from apportion.machine.cost_model import (
        load_cost as load_cost,
    )
    from apportion.machine.cost_model import (
        price_table as price_table,
    )
    from apportion.machine.cost_model import (
        times_messages as times_messages,
    )
    from apportion.machine.cost_model import (
        to_nanoseconds as to_nanoseconds,
    )
    from apportion.machine.cost_model import (
        whole_nanoseconds as whole_nanoseconds,
    )
    from apportion.machine.cost_table import (
        AHEAD as AHEAD,
    )
    from apportion.machine.cost_table import (
        ASSEMBLE_LINE as ASSEMBLE_LINE,
    )
    from apportion.machine.cost_table import (
        EXCHANGE_LINE as EXCHANGE_LINE,
    )
    from apportion.machine.cost_table import (
        PACK_LINE as PACK_LINE,
    )
    from apportion.machine.cost_table import (
        Condition as Condition,
    )
    from apportion.machine.cost_table import (
        CostFile as CostFile,
    )
    from apportion.machine.cost_table import (
        CostTable as CostTable,
    )
    from apportion.machine.cost_table import (
        Line as Line,
    )
    from apportion.machine.cost_table import (
        Work as Work,
    )
    from apportion.machine.cost_table import (
        alike as alike,
    )
    from apportion.machine.cost_table import (
        kind_of as kind_of,
    )
    from apportion.machine.cost_table import (
        load as load,
    )
    from apportion.machine.cost_table import (
        save as save,
    )
    from apportion.machine.topology import (
        Cluster as Cluster,
    )
    from apportion.machine.topology import (
        Device as Device,
    )
    from apportion.machine.topology import (
        Host as Host,
    )
    from apportion.machine.topology import (
        Link as Link,
    )
    from apportion.machine.topology import (
        first as first,
    )
    from apportion.machine.topology import (
        from_json as from_json,
    )
    from apportion.machine.topology import (
        to_json as to_json,
    )
    from apportion.machine.wire_time import (
        wire_lines as wire_lines,
    )
    from apportion.machine.wire_time import (
        wire_seconds as wire_seconds,
    )

lazy_face(__name__)
