"""The network interface that ranks talk over, and nothing else listens on.

Part of the room run. The name of an interface comes in, or none; gloo and NCCL are told. Processes
of one machine talk over the loopback interface unless they are told otherwise: then nothing that
they listen on can be reached from outside.
"""

from __future__ import annotations

import os
import socket

LOOPBACK = "lo"
SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_interface(name: str | None) -> None:
    """Lets gloo and NCCL use the interface of that name; without one, what the environment says, or
    the loopback interface where all ranks are on this machine. Raises ValueError if there is none
    of that name here."""
    if name is None:
        if any(setting in os.environ for setting in SETTINGS) or not _on_one_machine():
            return
        os.environ[SETTINGS[0]] = LOOPBACK
        return
    if name not in (known := [each for _, each in socket.if_nameindex()]):
        raise ValueError(f"there is no network interface {name!r} here; there are {known}")
    for setting in SETTINGS:
        os.environ[setting] = name


def _on_one_machine() -> bool:
    """Whether torchrun says that all ranks are on this machine, and such an interface is here."""
    here, all_ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    known = [each for _, each in socket.if_nameindex()]
    return here is not None and here == all_ranks and LOOPBACK in known
