"""Cluster files: the tables of a TOML file that describes a cluster, read and checked.

The first step of cluster.py in machine/; cluster_tree.py makes a Cluster of the tables.
A file describes a tree: devices hang on switches, switches on other switches.

    name = "two small boxes"
    description = "one line for people"            # optional
    communication_on_device = false                # optional; true where sending burns the device

    [[switch]]
    name = "network"                               # exactly one switch has no parent

    [[switch]]
    name = "box"
    parent = "network"
    count = 2                                      # optional: so many, with all that hangs on each
    uplink = {bandwidth = "56 Gbit/s", latency = "2 us"}         # optional: to the parent, one
                                                                 # link each way
    bus = {bandwidth = "16 GB/s", latency = 0}     # optional: occupied by all messages through it
    host = {memory_bytes = "64 GB", bandwidth = "10 GB/s", latency = "10 us"}    # optional: the
                                                   # host's memory, its link shared by all devices
    provenance = "where these numbers come from"

    [[device]]
    name = "gpu"
    kind = "mygpu"
    on = "box"
    count = 4                                      # optional: so many on each `box`
    memory_bytes = "12 GB"
    memory_bandwidth = "240 GB/s"
    asynchronous = true                            # optional: a host issues kernels ahead; false
                                                   # for kind "cpu", else true
    launch_seconds = "10 us"                       # to issue or start one kernel
    flops = {float64 = "1.4 TFLOP/s", float32 = "4.3 TFLOP/s", float16 = "4.3 TFLOP/s"}
    port = {bandwidth = "16 GB/s", latency = "2 us"}             # one link out and one in
    nic = {bandwidth = "25 GB/s", latency = "5 us", devices = 2} # optional: instead of the port for
                                                   # messages that leave `box`; here one for two
    host = {bandwidth = "12 GB/s", latency = 0}    # optional: of its own, on the way to the host,
                                                   # where a switch above has one
    provenance = "where these numbers come from"

`flops` may also have bfloat16, tf32 and int8. A device may say `like = "a100"`: what it leaves out
is as in the preset of that name.

Bytes, seconds, bytes per second and operations per second, as numbers or as text with a unit. A
message takes the sum of the latencies of its links and the smallest of their bandwidths.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from apportion.checked import (
    LARGEST_NUMBER,
    LARGEST_SECONDS,
    LARGEST_WHOLE,
    brief,
    read_text,
)
from apportion.quantity import (
    BYTES,
    BYTES_PER_SECOND,
    OPERATIONS_PER_SECOND,
    SECONDS,
    Units,
    parse_quantity,
)

MAX_DEVICES = 1024  # routes are kept for every pair

PRESETS = Path(__file__).parent / "presets"


class _TomlTable(BaseModel):
    """A table of the file: unknown fields and numbers of the wrong type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _number_in(units: Units, whole: bool = False) -> BeforeValidator:
    def number(given: object) -> object:
        if not isinstance(given, str):
            return given
        said = parse_quantity(given, units)
        return round(said) if whole else said

    return BeforeValidator(number)


def _shown(given: str) -> str:
    return read_text(given, "a text")


_Text = Annotated[str, AfterValidator(_shown)]
_Name = Annotated[_Text, Field(min_length=1)]
_Bytes = Annotated[int, Field(gt=0, le=LARGEST_WHOLE), _number_in(BYTES, whole=True)]
_Bandwidth = Annotated[float, Field(gt=0, le=LARGEST_NUMBER), _number_in(BYTES_PER_SECOND)]
_Seconds = Annotated[float, Field(ge=0, le=LARGEST_SECONDS), _number_in(SECONDS)]
_Rate = Annotated[float, Field(gt=0, le=LARGEST_NUMBER), _number_in(OPERATIONS_PER_SECOND)]
_Count = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class LinkTable(_TomlTable):
    """A link, by its bandwidth and latency."""

    bandwidth: _Bandwidth
    latency: _Seconds


class NicTable(LinkTable):
    """A network card of one device or of several."""

    devices: _Count = 1


class HostTable(LinkTable):
    """The memory of a host and the link to it."""

    memory_bytes: _Bytes


class FlopsTable(_TomlTable):
    """Operations per second by type of number."""

    float64: _Rate
    float32: _Rate
    float16: _Rate
    bfloat16: _Rate | None = None
    tf32: _Rate | None = None
    int8: _Rate | None = None


class SwitchTable(_TomlTable):
    """What devices and other switches hang on."""

    name: _Name
    parent: _Name | None = None
    count: _Count = 1
    uplink: LinkTable | None = None
    bus: LinkTable | None = None
    host: HostTable | None = None
    provenance: _Text = ""


class DeviceTable(_TomlTable):
    """Equal devices on each copy of a switch."""

    name: _Name
    kind: _Name
    on: _Name
    count: _Count = 1
    memory_bytes: _Bytes
    memory_bandwidth: _Bandwidth
    asynchronous: bool | None = None
    launch_seconds: _Seconds
    flops: FlopsTable
    port: LinkTable
    nic: NicTable | None = None
    host: LinkTable | None = None
    provenance: _Name


class ClusterFile(_TomlTable):
    """A whole file."""

    name: _Name
    description: _Text = ""
    communication_on_device: bool = False
    switch: Annotated[list[SwitchTable], Field(min_length=1)]
    device: Annotated[list[DeviceTable], Field(min_length=1)]


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; ValueError if it is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cluster file {path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"cluster file {path} is nested too deeply") from None
    except ValueError as error:  # not TOML, or not UTF-8
        reason = brief(str(error), 200)
        raise ValueError(f"cluster file {path} is not TOML: {reason}") from None


def preset_names() -> list[str]:
    """The names of the files in presets/."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_tables(name: str) -> dict[str, Any]:
    """The tables of a preset."""
    return read(PRESETS / f"{name}.toml")


def check_tables(tables: dict[str, Any], where: str) -> ClusterFile:
    """The tables as a ClusterFile; ValueError, headed by `where`, names what is wrong."""
    try:
        file = ClusterFile.model_validate(_resolve_likes(tables))
        _check_tree(file)
    except ValidationError as error:
        raise ValueError(error_sentence(where, error)) from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return file


def error_sentence(where: str, error: ValidationError) -> str:
    """The first complaint of pydantic, as one sentence that names the field."""
    first = error.errors()[0]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    field = brief("".join(steps).lstrip("."))
    if first["type"] == "missing":
        return f"{where}: field {field} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: field {field} is not known"
    message = brief(first["msg"].removeprefix("Value error, "), 200)
    message = message[0].lower() + message[1:]
    return f"{where}: field {field}: {message}" if field else f"{where}: {message}"


# Devices like those of a preset


def _resolve_likes(tables: dict[str, Any]) -> dict[str, Any]:
    devices = tables.get("device")
    if not isinstance(devices, list):
        return tables
    return {**tables, "device": [_with_preset_values(table, k) for k, table in enumerate(devices)]}


def _with_preset_values(table: Any, position: int) -> Any:
    """The table with what it leaves out taken from the preset that it is like."""
    if not isinstance(table, dict) or "like" not in table:
        return table
    kind = table["like"]
    if kind not in countable_kinds():
        known = ", ".join(countable_kinds())
        raise ValueError(f"field device[{position}].like: {brief(kind)!r} is none of {known}")
    model = {
        k: v
        for k, v in preset_tables(kind)["device"][0].items()
        if k not in ("name", "on", "count")
    }
    own = {key: item for key, item in table.items() if key != "like"}
    if own.keys() & model.keys():  # other numbers need a source of their own
        source = model.pop("provenance")
        if isinstance(own.get("provenance"), str):
            own["provenance"] += f"; otherwise {source}"
    return model | own


def countable_kinds() -> list[str]:
    """Presets that can be counted: those named after the kind of their one device."""
    return [name for name in preset_names() if preset_tables(name)["device"][0].get("kind") == name]


# The tree


def _check_tree(file: ClusterFile) -> None:
    """Raises ValueError unless the switches form one tree on which all devices hang."""
    switches = {switch.name: switch for switch in file.switch}
    names = [switch.name for switch in file.switch] + [device.name for device in file.device]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two switches or devices are named {twice!r}")
    for device in file.device:
        if device.on not in switches:
            other = next((o.name for o in file.device if o.on in switches), None)
            lost = f", so that it has no path to device {other!r}" if other else ""
            raise ValueError(
                f"device {device.name!r} is on {device.on!r}, which is no switch{lost}"
            )
    for switch in file.switch:
        if (switch.uplink or switch.bus or switch.host) and not switch.provenance:
            raise ValueError(f"field switch.provenance of {switch.name!r} is missing")
        _root(switch, switches)
    _check_one_root(file, switches)
    total = sum(d.count * _copies(switches[d.on], switches) for d in file.device)
    if total > MAX_DEVICES:
        raise ValueError(f"{total} devices are more than {MAX_DEVICES}")


def _check_one_root(file: ClusterFile, switches: dict[str, SwitchTable]) -> None:
    below: dict[str, str] = {}
    for device in file.device:
        below.setdefault(_root(switches[device.on], switches).name, device.name)
    if len(below) > 1:
        (first, one), (second, other), *_ = below.items()
        raise ValueError(
            f"device {one!r} has no path to device {other!r}: switches {first!r} and {second!r} "
            "both have no parent"
        )
    roots = [switch for switch in file.switch if switch.parent is None]
    if len(roots) != 1:
        raise ValueError(
            "exactly one switch must have no parent, not "
            + " and ".join(repr(switch.name) for switch in roots)
        )
    root = roots[0]
    if root.count != 1:
        below_it = file.device[0].name
        raise ValueError(
            f"switch {root.name!r} has no parent but a count of {root.count}, so that there is no "
            f"path from device {root.name}0/{below_it} to {root.name}1/{below_it}"
        )
    if root.uplink is not None:
        raise ValueError(f"switch {root.name!r} has an uplink but no parent")


def _root(switch: SwitchTable, switches: dict[str, SwitchTable]) -> SwitchTable:
    return _above(switch, switches)[-1]


def _above(switch: SwitchTable, switches: dict[str, SwitchTable]) -> list[SwitchTable]:
    """The switch, its parent, and so on."""
    found = [switch]
    while switch.parent is not None:
        if switch.parent not in switches:
            raise ValueError(f"switch {switch.name!r} has the unknown parent {switch.parent!r}")
        switch = switches[switch.parent]
        if switch in found:
            raise ValueError(f"switch {switch.name!r} is its own ancestor")
        found.append(switch)
    return found


def _copies(switch: SwitchTable, switches: dict[str, SwitchTable]) -> int:
    above = 1 if switch.parent is None else _copies(switches[switch.parent], switches)
    return switch.count * above
