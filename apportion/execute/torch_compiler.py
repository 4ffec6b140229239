"""The private interfaces of torch that compiled segments use, each under a plain name.

Part of the room execute. A function of tensors comes in, its functional graph of ATen operators
goes out (`traced`); that graph comes in, a callable that inductor made of it goes out (`compiled`).
Whatever segment_graph.py and inductor.py need of torch's compiler is here, so that a new version of
torch is met in one place. The compiler is loaded when this module is used, not when it is imported.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any

import torch

from apportion.capture import torch_private

CompiledCode = Callable[[list[Any]], Sequence[torch.Tensor]]
"""Takes its arguments in a list, which it empties as it goes, so that they can be freed."""


def fake_mode() -> AbstractContextManager[Any]:
    """A context in which tensors have no data. It has a ShapeEnv: without one, inductor's cache on
    disk is passed over in silence."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode: AbstractContextManager[Any] = torch_private.FakeTensorMode(shape_env=ShapeEnv())
    return mode


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which nothing warns: what torch says while it compiles is for its developers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def traced(
    function: Callable[..., Sequence[torch.Tensor]], fakes: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """The calls that a function makes on tensors without data, as a graph without mutations, in
    operators that inductor knows."""
    with _quiet():
        from torch._inductor import lowering  # which decompositions of pooling look at
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

    assert lowering is not None
    pure = torch.func.functionalize(function, remove="mutations")
    with _quiet(), torch.no_grad():
        return make_fx(pure, decomposition_table=select_decomp_table())(*fakes)


def compiled(
    graph: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], reproducible: bool = False
) -> CompiledCode:
    """What inductor makes of a graph. Outputs have the strides that they have in the graph.
    `reproducible`: without choices by measured time, which differ from process to process."""
    with _quiet():
        from torch._inductor import compile_fx, config
        from torch._inductor.virtualized import V

    _no_semaphore()
    settings = {"fx_graph_cache": True, "triton.cudagraphs": False}
    if reproducible and hasattr(config, "deterministic"):
        settings["deterministic"] = True
    made = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
    mode = torch._guards.detect_fake_mode([*fakes, *made])  # a graph may have no inputs
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(torch.no_grad())
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        stack.enter_context(config.patch(settings))
        if fakes and fakes[0].device.type == "cuda":
            graph = channels_last(graph, fakes)
        graph = compile_fx._recursive_joint_graph_passes(graph)
        output = graph.graph.find_nodes(op="output")[0]
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        code: CompiledCode = compile_fx.compile_fx_inner(graph, list(fakes))
    return code


def channels_last(
    graph: torch.fx.GraphModule, fakes: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """The graph with its images in memory order NHWC, where inductor finds that convolutions gain
    by it. It would change forward convolutions by itself, but a backward one reads its tensors in
    the order in which it was traced. Outputs have the order that they had."""
    from torch._inductor.graph import GraphLowering

    if not GraphLowering.decide_layout_opt(graph, is_inference=False):
        return graph
    meant = [node.meta["val"] for node in graph.graph.find_nodes(op="output")[0].args[0]]
    for view in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        view.target = torch.ops.aten.reshape.default  # a view of another order may need a copy
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        _ChannelsLast(graph, garbage_collect_values=False).run(*fakes)
    output = graph.graph.find_nodes(op="output")[0]
    kept = []
    with graph.graph.inserting_before(output):
        for node, before in zip(output.args[0], meant, strict=True):
            if node.meta["val"].stride() != before.stride() and before.is_contiguous():
                how: dict[str, Any] = {"memory_format": torch.contiguous_format}
                node = graph.graph.call_function(torch.ops.aten.clone.default, (node,), how)
                node.meta["val"] = before
            kept.append(node)
    output.args = (kept,)
    graph.recompile()
    return graph


class _ChannelsLast(torch.fx.Interpreter):
    """Runs a graph on tensors without data and puts a copy in order NHWC before every convolution
    that reads an image in another; what follows a convolution has its order."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is torch.ops.aten.convolution.default:
            source: Any = n.args[0]
            image = self.env[source]
            if image.dim() == 4 and not image.is_contiguous(memory_format=torch.channels_last):
                how: dict[str, Any] = {"memory_format": torch.channels_last}
                graph: Any = self.module.graph
                with graph.inserting_before(n):
                    copy = graph.call_function(torch.ops.aten.clone.default, (source,), how)
                copy.meta["val"] = self.env[copy] = image.clone(memory_format=torch.channels_last)
                n.update_arg(0, copy)
        n.meta["val"] = result = super().run_node(n)
        return result


def _no_semaphore() -> None:
    """Lets torch's progress bars, which it makes even where it shows none, lock by thread. Their
    own lock is a semaphore of the system, which a process that is ended leaves behind."""
    try:
        bars = import_module("tqdm").tqdm
    except ImportError:
        return
    if not hasattr(bars, "_lock"):
        bars.set_lock(threading.RLock())


def stop_workers() -> None:
    """Ends the processes in which inductor compiles; it starts new ones when it needs them."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


def without_kernels(code: CompiledCode) -> CompiledCode:
    """Compiled code for tensors without data: it allocates and drops as ever, and calls no kernel
    of its own. Raises ValueError if this version of torch keeps it elsewhere."""
    bound = _innermost(getattr(code, "current_callable", None))
    function = getattr(bound, "__func__", bound)
    if not isinstance(function, FunctionType) or function.__closure__:
        raise ValueError("this version of torch keeps compiled code where it cannot be looked at")
    names = dict(function.__globals__)
    names |= {name: _Nothing() for name in names if name.startswith(("triton_", "cpp_"))}
    names |= {name: _allocate for name in names if name.startswith("empty_strided")}
    names |= {name: _nothing for name in names if name.startswith("assert_")}
    names |= {
        "reinterpret_tensor": _reinterpret,
        "alloc_from_pool": _from_pool,
        "extern_kernels": _OnlyResults(),
        "get_raw_stream": _nothing,
    }
    dry = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    own = getattr(bound, "__self__", None)

    def call(args: list[Any]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = dry(args) if own is None else dry(own, args)
        return found

    return call


def _innermost(function: Any) -> Any:
    """The function that another one, which aligns its inputs, calls `model`."""
    while True:
        plain = getattr(function, "__func__", function)
        names = plain.__code__.co_freevars if isinstance(plain, FunctionType) else ()
        if "model" not in names:
            return function
        function = plain.__closure__[names.index("model")].cell_contents


def _nothing(*_: Any, **__: Any) -> int:
    return 0


class _Nothing:
    """A kernel that does nothing."""

    run = __call__ = staticmethod(_nothing)


class _OnlyResults:
    """Kernels of libraries, of which only the results are made."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: torch.Tensor | None = None, **named: Any) -> Any:
            return getattr(torch, name)(*args, **named) if out is None else out

        return call


def _allocate(size: Sequence[int], stride: Sequence[int], kind: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=kind, device="meta")


def _reinterpret(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _from_pool(
    pool: torch.Tensor, offset: int, kind: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    return pool.view(torch.uint8)[offset:].view(kind).as_strided(size, stride)
