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
        known_clusters as known_clusters,
    )
    from apportion.machine.cluster import (
        usable_cores as usable_cores,
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
        AlgorithmLine as AlgorithmLine,
    )
    from apportion.machine.collective import (
        algorithm_lines as algorithm_lines,
    )
    from apportion.machine.collective import (
        all_reduce as all_reduce,
    )
    from apportion.machine.collective import (
        all_reduce_lines as all_reduce_lines,
    )
    from apportion.machine.collective import (
        collective as collective,
    )
    from apportion.machine.collective import (
        halves as halves,
    )
    from apportion.machine.collective import (
        is_best_direct as is_best_direct,
    )
    from apportion.machine.collective import (
        near_groups as near_groups,
    )
    from apportion.machine.compile_mode import (
        AUTO as AUTO,
    )
    from apportion.machine.compile_mode import (
        GENERATED as GENERATED,
    )
    from apportion.machine.compile_mode import (
        GRAPH as GRAPH,
    )
    from apportion.machine.compile_mode import (
        INDUCTOR as INDUCTOR,
    )
    from apportion.machine.compile_mode import (
        INTERPRETER as INTERPRETER,
    )
    from apportion.machine.compile_mode import (
        REPLAYED as REPLAYED,
    )
    from apportion.machine.compile_mode import (
        check_mode as check_mode,
    )
    from apportion.machine.compile_mode import (
        predicted_mode as predicted_mode,
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
        check_kinds as check_kinds,
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
        device_classes as device_classes,
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
        rates_by_itemsize as rates_by_itemsize,
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
        BEGIN as BEGIN,
    )
    from apportion.machine.cost_table import (
        BESIDE as BESIDE,
    )
    from apportion.machine.cost_table import (
        EXCHANGE_LINE as EXCHANGE_LINE,
    )
    from apportion.machine.cost_table import (
        FUSED_LINE as FUSED_LINE,
    )
    from apportion.machine.cost_table import (
        HOST_BACK_LINE as HOST_BACK_LINE,
    )
    from apportion.machine.cost_table import (
        HOST_OUT_LINE as HOST_OUT_LINE,
    )
    from apportion.machine.cost_table import (
        HOST_WORK_LINE as HOST_WORK_LINE,
    )
    from apportion.machine.cost_table import (
        PACK_LINE as PACK_LINE,
    )
    from apportion.machine.cost_table import (
        REPLAY as REPLAY,
    )
    from apportion.machine.cost_table import (
        Condition as Condition,
    )
    from apportion.machine.cost_table import (
        CostFile as CostFile,
    )
    from apportion.machine.cost_table import (
        CostLine as CostLine,
    )
    from apportion.machine.cost_table import (
        CostTable as CostTable,
    )
    from apportion.machine.cost_table import (
        Fit as Fit,
    )
    from apportion.machine.cost_table import (
        KernelMeasurement as KernelMeasurement,
    )
    from apportion.machine.cost_table import (
        ReferenceTime as ReferenceTime,
    )
    from apportion.machine.cost_table import (
        fused_name as fused_name,
    )
    from apportion.machine.cost_table import (
        kind_and_inputs as kind_and_inputs,
    )
    from apportion.machine.cost_table import (
        kind_of_signature as kind_of_signature,
    )
    from apportion.machine.cost_table import (
        load_cost_file as load_cost_file,
    )
    from apportion.machine.cost_table import (
        save_cost_file as save_cost_file,
    )
    from apportion.machine.fusible_kinds import (
        elementwise as elementwise,
    )
    from apportion.machine.fusible_kinds import (
        fusible as fusible,
    )
    from apportion.machine.fusible_kinds import (
        reads_twice as reads_twice,
    )
    from apportion.machine.fusible_kinds import (
        reads_windows as reads_windows,
    )
    from apportion.machine.fusible_kinds import (
        reduces_rows as reduces_rows,
    )
    from apportion.machine.host_links import (
        HostRates as HostRates,
    )
    from apportion.machine.host_links import (
        host_link as host_link,
    )
    from apportion.machine.host_links import (
        host_rates as host_rates,
    )
    from apportion.machine.host_links import (
        hosts_of as hosts_of,
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
        cluster_from_json as cluster_from_json,
    )
    from apportion.machine.topology import (
        cluster_to_json as cluster_to_json,
    )
    from apportion.machine.topology import (
        first_devices as first_devices,
    )
    from apportion.machine.wire_time import (
        on_different_hosts as on_different_hosts,
    )
    from apportion.machine.wire_time import (
        wire_lines as wire_lines,
    )
    from apportion.machine.wire_time import (
        wire_seconds as wire_seconds,
    )

lazy_face(__name__)
