"""The kernel for CUDA devices draws the numbers of every other device, here compiled for a CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from apportion.capture.counter_random import index_words, key_words, uniform
from apportion.execute.device_random import MOST_DIMS, source, uniform_on_cuda
from apportion.execute.host_random import Atoms, places

BOXES: list[tuple[Atoms, ...]] = [
    (((7, 0, 7),),),
    (((3, 1, 3),), ((2, 0, 2), (5, 1, 4))),
    (((4, 0, 4),), ((3, 0, 3),), ((6, 2, 5),)),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("where", BOXES)
def test_the_kernel_s_source_draws_the_same_numbers(
    where: tuple[Atoms, ...], tmp_path: Path
) -> None:
    dims = len(where)
    args = ", ".join(f"a[{d}]" for d in range(dims))
    (tmp_path / "draw.cpp").write_text(
        "#include <cstring>\n"
        "static int __float_as_int(float x) { int i; std::memcpy(&i, &x, 4); return i; }\n"
        f"{source(dims)}\n"
        'extern "C" int draw(const int* a, long first, long second) '
        f"{{ return apportion_draw<int>({args}, first, second); }}\n"
    )
    library = tmp_path / "draw.so"
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "draw.cpp"], check=True
    )
    draw = ctypes.CDLL(str(library)).draw
    draw.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    key = (5, 6, 70000000001)
    words = [index_words(dim, places(atoms)) for dim, atoms in enumerate(where)]
    meant = uniform(key, [torch.from_numpy(places(atoms)) for atoms in where])
    found = torch.empty(meant.shape)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in meant.shape)).reshape(-1, dims):
        at = index.tolist()
        given = (ctypes.c_int * dims)(*(int(words[d][k].astype("int32")) for d, k in enumerate(at)))
        bits = draw(given, *key_words(key))
        found[tuple(at)] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)[0]
    assert torch.equal(found, meant)


def test_torch_s_compiler_can_read_every_source() -> None:
    for dims in range(1, MOST_DIMS + 1):
        parsed = torch.cuda.jiterator._create_jit_fn(source(dims), first=0, second=0)
        assert parsed.kernel_name == "apportion_draw"


@pytest.mark.parametrize("where", [*BOXES, ()])
def test_where_there_is_no_such_device_torch_s_operators_draw(where: tuple[Atoms, ...]) -> None:
    key = (1, 2, 3)
    found = uniform_on_cuda(*key_words(key), where, torch.float64, "cpu")
    meant = uniform(key, [torch.from_numpy(places(atoms)) for atoms in where], torch.float64)
    assert torch.equal(found, meant)
