"""Copies to the host and back.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.describe import FROM_HOST_KIND, ON_HOST_KIND, TO_HOST_KIND
from apportion.execute.host_copies import from_host
from apportion.execute.kernels.base import Context, own


@own(TO_HOST_KIND)
def _to_host(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (args[0].new_empty(args[0].shape),)  # of the dry run; Rank.to_host copies


@own(FROM_HOST_KIND)
def _from_host(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (from_host(args[0], context.device),)


@own(ON_HOST_KIND)
def _on_host(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (args[0].detach(),)
