"""Errors that the user's step raises while it is captured, as one sentence of ours.

Part of capture/. A step runs on fake tensors, which have no data; some code cannot: compiled
extensions, code that picks a device, caches. An exception of anybody's comes in; a CaptureError
goes out that says where it was raised, what it said, and the switch that helps where one is known.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from apportion.capture.call_place import place_of_frames
from apportion.capture.record import record
from apportion.capture.trace import CaptureError


@dataclass(frozen=True)
class _Remedy:
    """What helps where the error says `said`, or was raised in a file with `inside` in its path."""

    said: tuple[str, ...]
    inside: tuple[str, ...]
    helps: str


_REMEDIES = (
    _Remedy(
        ("not compiled with CUDA", "No CUDA GPUs", "support for cuda", "NVIDIA driver"), (),
        "a step is captured on the CPU, so name no device in it: make tensors on the device of "
        "others, device=x.device",
    ),
    _Remedy(
        ("found two different devices", "Expected all tensors to be on the same device"), (),
        "a step is captured with all tensors on one device, so make tensors on the device of "
        "others, device=x.device",
    ),
    _Remedy(
        (), ("torch/_dynamo/convert_frame", "torch/_inductor/", "torch/_functorch/_aot"),
        "capture the module as it was before torch.compile (compiled._orig_mod), as apportion "
        "compiles by itself",
    ),
    _Remedy(
        (), ("torch/jit/",),
        "use the plain module instead of the one that torch.jit has compiled",
    ),
    _Remedy(
        (), ("cache_utils.py",),
        "training needs no cache of keys and values, so set use_cache=False",
    ),
    _Remedy(
        (), ("flash_attn", "flash_attention", "flex_attention", "masking_utils.py", "xformers"),
        'choose attention in plain operators, attn_implementation="eager" or "sdpa"',
    ),
    _Remedy(
        ("backward through the graph a second time",), (),
        "call backward() once for each forward pass, or backward(retain_graph=True)",
    ),
    _Remedy(
        ("data pointer", "data_ptr", "FakeTensor", "fake mode", "storage", "triton", "numpy"), (),
        "code that looks into the memory of tensors cannot be captured, so switch to the "
        "implementation in plain PyTorch (such as attn_implementation=\"eager\", "
        "use_kernels=False), or register it with torch.library.custom_op",
    ),
)  # fmt: skip
_OTHERWISE = "see that it runs in plain PyTorch by itself, or move this out of the step"


@contextmanager
def foreign_errors() -> Iterator[None]:
    """A context in which what the recorded step raises becomes a CaptureError. Errors of our own,
    outside of the step, stay what they are."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # it writes a traceback before it raises
    try:
        yield
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        found = in_our_words(error)
        if found is None:
            raise
        raise found from None
    finally:
        log.disabled = before


def in_our_words(error: BaseException) -> CaptureError | None:
    """The error as a sentence; None if it was not raised in a step that is being recorded."""
    frames = list(traceback.walk_tb(error.__traceback__))
    begins = [k for k, (frame, _) in enumerate(frames) if frame.f_code is record.__code__]
    if not begins:
        return None
    inner = frames[begins[0] + 1 :]
    place = place_of_frames(inner)
    said = " ".join(str(error).split())
    said = said if len(said) < 300 else said[:300].rsplit(" ", 1)[0] + " ..."
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    files = [frame.f_code.co_filename for frame, _ in inner]
    return CaptureError(f"the step fails{place.at} ({what}); {_remedy(said, files)}")


def _remedy(said: str, files: list[str]) -> str:
    for each in _REMEDIES:
        if any(text in said for text in each.said):
            return each.helps
        if any(part in name for part in each.inside for name in files[-12:]):
            return each.helps
    return _OTHERWISE
