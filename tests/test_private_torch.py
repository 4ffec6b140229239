"""Which files of the package use private interfaces of torch, and why they may.

Private is: a module or a name of torch that begins with an underscore, an attribute such as
`_schema` of one of its objects, and `torch.fx.experimental`. Operators in `torch.ops` are not, as
their names belong to the operator set, underscore or not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "apportion"

REASONS = {
    "capture/torch_private.py": "the place for them: whatever capture/ and verify/ need",
    "without_dynamo.py": "keeps torch._dynamo unloaded, which torch itself offers no way to do",
    "execute/allocations.py": "a dispatch mode that sees which call allocates which storage",
    "execute/torch_compiler.py": "inductor, whose entry without dynamo has no public name",
    "execute/update_calls.py": "torch._foreach_add_, as torch's own optimizers call it",
    "execute/cuda_graph.py": "torch._foreach_copy_, one kernel for many copies",
    "execute/rank_buffers.py": "torch._foreach_copy_, one kernel for many copies",
    "execute/recorded_step.py": "torch._foreach_copy_, one kernel for many copies",
    "execute/run_part.py": "asks whether two tensors share a storage",
    "execute/device_memory.py": "tells the allocator of a process that already runs",
    "execute/device_random.py": "torch.cuda.jiterator, which compiles an element-wise kernel",
    "execute/kernels/base.py": "reads the schema of an operator to call it by position",
    "execute/kernels/factory.py": "reads the schema of an operator to call it by position",
    "execute/kernels/index.py": "torch._assert_async, a check that does not wait for the device",
    "run/calibrate_cuda.py": "torch.cuda._sleep, to keep a stream busy while work is queued",
    "run/task_clock.py": "torch.cuda._sleep, to keep a stream busy while work is queued",
}

# Private attributes of torch's objects, whatever expression they are read from.
ATTRIBUTES = {
    "_C", "_can_decompose", "_cdata", "_opoverload", "_ops", "_schema", "_sequence_nr",
}  # fmt: skip


def private_uses(path: Path) -> Iterator[str]:
    """The private interfaces of torch that a file uses, each with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [f"torch.{node.attr}"] if node.attr in ATTRIBUTES else [dotted(node)]
        for name in names:
            if is_private(name):
                yield f"{name} in line {node.lineno}"


def dotted(node: ast.expr) -> str:
    """`torch.utils._pytree` for an attribute of a name; "" for one of any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def is_private(name: str) -> bool:
    first, *rest = name.split(".")
    if first != "torch" or rest[:1] == ["ops"]:
        return False
    experimental = rest[:2] == ["fx", "experimental"]
    return experimental or any(p.startswith("_") and not p.startswith("__") for p in rest)


@pytest.mark.slow
def test_only_the_listed_files_use_private_torch() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): list(private_uses(path))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    used = {name: uses for name, uses in found.items() if uses}
    more = {name: uses for name, uses in used.items() if name not in REASONS}
    assert not more, f"import these from capture/torch_private.py, or give a reason here: {more}"
    assert not REASONS.keys() - used.keys(), "these files use nothing private any more"
