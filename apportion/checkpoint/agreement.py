"""Agreement: short texts that ranks tell each other, so that all go on or none does.

Part of the room checkpoint. A text comes in on each rank; every rank gets those of all, or that of
one. Over gloo, as bytes: nothing is unpickled. Without a process group there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from apportion.execute import peer_errors


def rank_count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """The number of this one."""
    return dist.get_rank() if dist.is_initialized() else 0


def told_by_all(text: str) -> list[str]:
    """What every rank says, in order; all have to call it."""
    if rank_count() == 1:
        return [text]
    raw = _bytes(text)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(rank_count())]
    with peer_errors():
        dist.all_gather(lengths, torch.tensor([len(raw)]))
    longest = max(int(length) for length in lengths)
    if longest == 0:
        return [""] * rank_count()
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(raw)] = raw
    found = [torch.empty_like(padded) for _ in range(rank_count())]
    with peer_errors():
        dist.all_gather(found, padded)
    pairs = zip(found, lengths, strict=True)
    return [each[: int(length)].numpy().tobytes().decode() for each, length in pairs]


def told_by_first(text: str) -> str:
    """What rank 0 says; all have to call it."""
    if rank_count() == 1:
        return text
    raw = _bytes(text if own_rank() == 0 else "")
    length = torch.tensor([len(raw)])
    with peer_errors():
        dist.broadcast(length, 0)
    found = raw if own_rank() == 0 else torch.empty(int(length), dtype=torch.uint8)
    if int(length):
        with peer_errors():
            dist.broadcast(found, 0)
    return found.numpy().tobytes().decode()


def first_rank_says(make: Callable[[], str]) -> str:
    """What rank 0 makes, on all ranks; its ValueError is raised on all."""
    said = ""
    if own_rank() == 0:
        try:
            said = "=" + make()
        except ValueError as error:
            said = "!" + str(error)
    said = told_by_first(said)
    if said.startswith("!"):
        raise ValueError(said[1:])
    return said[1:]


def raise_on_all(failure: str) -> None:
    """Raises a ValueError on all ranks if one of them says what went wrong: the first of those."""
    for text in told_by_all(failure):
        if text:
            raise ValueError(text)


def _bytes(text: str) -> torch.Tensor:
    raw = text.encode()
    return torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8)[: len(raw)]
