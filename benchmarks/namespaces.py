"""Network namespaces of one's own: machines that share nothing but a cable, on one machine.

    with cabled(Cable(rate=12.5e6, burst=32_000)) as machines:
        process = machines[1].start([sys.executable, "rank.py"])

A namespace lives as long as a process is in it, and has no name. Each is held by a process that
dies with this one, however it dies, so nothing is ever left over. Needs Linux, root, `ip` and `tc`;
`why_not()` says what is lacking.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

HELD_SECONDS = 3600
PATIENCE = 10.0  # seconds for a namespace to come up
INTERFACE = "cable"
LISTENING = "0A"  # as the kernel writes it
TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")
WITH_US = ("setpriv", "--pdeathsig", "KILL")


# Linux's numbers: a change of a link, and how large segments may be, in all and by IPv4.
RTM_SETLINK, NLM_F_REQUEST, NLM_F_ACK = 19, 1, 4
IFLA_SIZES = (41, 58, 63, 64)  # GSO_MAX_SIZE, GRO_MAX_SIZE, GSO_IPV4_MAX_SIZE, GRO_IPV4_MAX_SIZE
USUAL_SEGMENT = 65_536


@dataclass(frozen=True)
class Cable:
    """A full-duplex cable: each end sends `rate` bytes per second through a token bucket of `burst`
    bytes; at most `queue` seconds' worth wait there. TCP hands it `segment` bytes at once, as to a
    card that cuts them into frames itself."""

    rate: float
    burst: int = 32_000
    queue: float = 0.2
    segment: int = USUAL_SEGMENT


@dataclass(frozen=True)
class Machine:
    """One namespace: the process that holds it, and its address on the cable."""

    holder: int
    address: str

    def call(self, *command: str) -> str:
        """Runs a command inside; returns its output. RuntimeError with what it says if it fails."""
        return _call(*self._inside(), *command)

    def start(self, command: Sequence[str], **named: Any) -> subprocess.Popen[str]:
        """Starts a command inside that dies with this process."""
        return subprocess.Popen([*self._inside(), *WITH_US, *command], text=True, **named)

    def sent_bytes(self, interface: str) -> int:
        """The kernel's count of bytes, headers included, that have left by the interface."""
        return sent_bytes(interface, self.holder)

    def listening(self) -> list[tuple[str, int]]:
        """The addresses and ports on which something inside listens for TCP connections."""
        return [each for name in ("tcp", "tcp6") for each in _listening(self.holder, name)]

    def _inside(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net"]


def _listening(process: int, protocol: str) -> Iterator[tuple[str, int]]:
    with open(f"/proc/{process}/net/{protocol}", encoding="ascii") as file:
        for line in list(file)[1:]:
            words = line.split()
            if words[3] == LISTENING:
                address, _, port = words[1].partition(":")
                raw = bytes.fromhex(address)
                ordered = b"".join(raw[k : k + 4][::-1] for k in range(0, len(raw), 4))
                family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
                yield socket.inet_ntop(family, ordered), int(port, 16)


def why_not() -> str:
    """What this machine lacks; empty if it can do all of this."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"network namespaces need the command {tool}"
    try:
        with cabled(Cable(rate=1e6)):
            return ""
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"


def sent_bytes(interface: str, process: int | str = "self") -> int:
    """The kernel's count of bytes sent by an interface of a process's namespace."""
    with open(f"/proc/{process}/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, counts = line.partition(":")
            if name.strip() == interface:
                return int(counts.split()[8])
    raise ValueError(f"there is no network interface {interface!r} here")


@contextmanager
def alone() -> Iterator[Machine]:
    """A namespace with nothing but a loopback interface."""
    command = [*WITH_US, "unshare", "--net", "sleep", str(HELD_SECONDS)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as holder:
        try:
            _await_namespace(holder)
            machine = Machine(holder.pid, "127.0.0.1")
            machine.call("ip", "link", "set", "lo", "up")
            yield machine
        finally:
            holder.kill()


@contextmanager
def cabled(cable: Cable) -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces and a cable between them."""
    with ExitStack() as stack:
        ends = [stack.enter_context(alone()) for _ in range(2)]
        ends[0].call(
            "ip", "link", "add", INTERFACE, "type", "veth",
            "peer", "name", INTERFACE, "netns", str(ends[1].holder),
        )  # fmt: skip
        machines = [Machine(end.holder, f"10.77.0.{k}") for k, end in enumerate(ends, 1)]
        for machine in machines:
            machine.call("ip", "address", "add", f"{machine.address}/24", "dev", INTERFACE)
            machine.call("ip", "link", "set", INTERFACE, "up")
            machine.call("tc", "qdisc", "replace", "dev", INTERFACE, "root", *_discipline(cable))
            if cable.segment != USUAL_SEGMENT:
                machine.call(sys.executable, __file__, "--segment", str(cable.segment))
        yield machines[0], machines[1]


@contextmanager
def switched(count: int, cable: Cable) -> Iterator[list[Machine]]:
    """So many namespaces, each on a cable of its own to a switch, which is one more namespace."""
    with ExitStack() as stack:
        switch = stack.enter_context(alone())
        switch.call("ip", "link", "add", "switch", "type", "bridge")
        switch.call("ip", "link", "set", "switch", "up")
        machines = []
        for number in range(count):
            end, port = stack.enter_context(alone()), f"port{number}"
            switch.call(
                "ip", "link", "add", port, "type", "veth",
                "peer", "name", INTERFACE, "netns", str(end.holder),
            )  # fmt: skip
            switch.call("ip", "link", "set", port, "master", "switch")
            switch.call("ip", "link", "set", port, "up")
            machine = Machine(end.holder, f"10.77.0.{number + 1}")
            machine.call("ip", "address", "add", f"{machine.address}/24", "dev", INTERFACE)
            machine.call("ip", "link", "set", INTERFACE, "up")
            for place, name in ((machine, INTERFACE), (switch, port)):
                place.call("tc", "qdisc", "replace", "dev", name, "root", *_discipline(cable))
            machines.append(machine)
        yield machines


def limit(cable: Cable) -> None:
    """Sets the limit of this process's end of the cable."""
    _call("tc", "qdisc", "replace", "dev", INTERFACE, "root", *_discipline(cable))
    set_segment(cable.segment)


def set_segment(nbytes: int) -> None:
    """Lets TCP hand this process's end of the cable so many bytes at once; RuntimeError if the
    kernel does not. `ip` knows the numbers of IPv4 only since it is younger than most."""
    sizes = b"".join(struct.pack("=HHI", 8, kind, nbytes) for kind in IFLA_SIZES)
    body = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(INTERFACE), 0, 0) + sizes
    flags = NLM_F_REQUEST | NLM_F_ACK
    head = struct.pack("=IHHII", 16 + len(body), RTM_SETLINK, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.bind((0, 0))
        link.send(head + body)
        error = struct.unpack_from("=i", link.recv(4096), 16)[0]
    if error:
        raise RuntimeError(f"segments of {nbytes} bytes: {os.strerror(-error)}")


def _discipline(cable: Cable) -> list[str]:
    return [
        "tbf", "rate", f"{round(8 * cable.rate)}bit", "burst", str(cable.burst),
        "latency", f"{round(1000 * cable.queue)}ms",
    ]  # fmt: skip


def _await_namespace(holder: subprocess.Popen[str]) -> None:
    """Waits until the process has left our own namespace."""
    ours = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if holder.poll() is not None:
            assert holder.stderr is not None
            raise RuntimeError(holder.stderr.read().strip() or "unshare failed")
        try:
            if os.readlink(f"/proc/{holder.pid}/ns/net") != ours:
                return
        except OSError:  # not ours to look at
            pass
        time.sleep(0.002)
    raise RuntimeError(f"no namespace came up within {PATIENCE:g} s")


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    set_segment(int(sys.argv[sys.argv.index("--segment") + 1]))
