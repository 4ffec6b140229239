"""The host's part in a step: copies between a device and its host (memory/offload.py), and updates
that are done there (memory/host_state.py; described in update.py)."""

from __future__ import annotations

from typing import Any

from apportion.describe.descriptions import describe
from apportion.describe.language import f

TO_HOST_KIND = "apportion.to_host"
ON_HOST_KIND = "apportion.on_host"  # nothing but the moment at which the copy is complete
FROM_HOST_KIND = "apportion.from_host"
HOST_KINDS = (TO_HOST_KIND, ON_HOST_KIND, FROM_HOST_KIND)
"""Copies, and the wait for one. An update on the host is none."""


@describe(TO_HOST_KIND, FROM_HOST_KIND)
def host_copy(x: Any) -> Any:
    return lambda *i: f("copy", x[i])


@describe(ON_HOST_KIND, alias=True)
def on_host(x: Any, copy: Any) -> Any:
    return lambda *i: f("copied", x[i], copy[i])
