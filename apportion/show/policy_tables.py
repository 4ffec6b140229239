"""Tables about learned placers: what a policy file is, and how it compares.

Part of the room show. Facts come in, tables go out.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from apportion.show.plain_table import PlainTable


def policy_tables(facts: dict[str, Any]) -> list[Table | str]:
    """What a policy file is."""
    own = facts["facts"]
    table = PlainTable(title=f"{facts['policy']}: a policy of kind {facts['kind']}")
    table.show_header = False
    table.add_row("size", f"{facts['bytes']:,} bytes, {facts['parameters']:,} parameters")
    for key in sorted(own):
        table.add_row(key, _text(own[key]))
    return [table]


def policy_comparison(facts: dict[str, Any]) -> list[Table | str]:
    """Step times of a policy and of what needs no learning."""
    times, unit = facts["times"], facts["time_unit"]
    table = PlainTable(
        title=f"{facts['model']} on {facts['cluster']}: {facts['units']} units, "
        f"{facts['devices']} devices"
    )
    for column in ("placement", f"step, {unit}", "of one device"):
        table.add_column(column, justify="left" if column == "placement" else "right")
    for name, value in times.items():
        table.add_row(name, f"{value:.6g}", f"{value / times['single']:.3f}")
    said = (
        f"{facts['proposals']} proposals in {facts['policy_seconds']:.2f} s; "
        f"{facts['search_seconds']:g} s of local search"
    )
    return [table, said]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    if isinstance(value, dict):
        return ", ".join(f"{key} {value[key]}" for key in sorted(value)) or "none"
    return str(value)
