"""LoopBody: the source of a decorated function, with everything that it refers to.

Part of the room loops. A Python function comes in; out goes what the analysis reads and what other
processes need in order to compile it: its syntax tree, its parameters, and the numbers, modules and
helper functions that its free names stand for. A body that cannot be read is refused with its line.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType as PythonFunction
from types import ModuleType
from typing import Any

import numpy as np

MODULES = {"numpy": np, "math": math}
BUILTINS = frozenset(
    [
        "abs",
        "bool",
        "divmod",
        "enumerate",
        "float",
        "int",
        "len",
        "max",
        "min",
        "pow",
        "range",
        "round",
        "sum",
        "zip",
        "True",
        "False",
    ]
)


class LoopError(ValueError):
    """A loop that cannot be run as it is written: one sentence, with the line to change."""


@dataclass(frozen=True)
class FreeNames:
    """What the free names of a function stand for: modules by their own names, numbers and arrays,
    functions of this room (`loops.accumulate`), and helper functions with their source."""

    modules: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    helpers: Mapping[str, HelperSource] = field(default_factory=dict)


@dataclass(frozen=True)
class HelperSource:
    """A function that the body calls: its name, its text, and what it refers to in turn."""

    name: str
    text: str
    free: FreeNames


@dataclass(frozen=True)
class LoopBody:
    """`key` and `value` are the first two parameters, `parameters` those after them. `special` maps
    what the tree calls (`loops.accumulate`, as text) to the function of this room that it is."""

    name: str
    file: str
    first_line: int
    tree: ast.FunctionDef
    key: str
    value: str
    parameters: tuple[str, ...]
    free: FreeNames
    special: Mapping[str, Callable[..., Any]]

    @property
    def returns(self) -> bool:
        """Whether it gives elements other values."""
        nodes = ast.walk(self.tree)
        return any(isinstance(node, ast.Return) and node.value is not None for node in nodes)

    def place(self, node: ast.AST | int) -> str:
        """File and line of a node, as messages show them."""
        line = node if isinstance(node, int) else getattr(node, "lineno", self.first_line)
        return f"{self.file}:{line}"

    def error(self, node: ast.AST | int, sentence: str) -> LoopError:
        """The refusal of a line."""
        return LoopError(f"{self.place(node)}: {sentence}")


def read_body(
    function: Callable[..., Any], special: Mapping[str, Callable[..., Any]] | None = None
) -> LoopBody:
    """The LoopBody of a function; `special` are functions of this room by their names. Raises
    LoopError if its source or something that it refers to cannot be had."""
    tree, file = function_tree(function)
    names = _parameters(tree, file)
    known = {id(each): each for each in (special or {}).values()}
    free, calls = _free_names(function, tree, file, known)
    rest = tuple(names[2:])
    return LoopBody(tree.name, file, tree.lineno, tree, names[0], names[1], rest, free, calls)


def function_tree(function: Callable[..., Any]) -> tuple[ast.FunctionDef, str]:
    """The syntax tree of a function with the line numbers of its file, and the file."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        name = getattr(function, "__name__", str(function))
        raise LoopError(
            f"the source of {name} cannot be read; define it in a file, not at a prompt"
        ) from None
    try:
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except SyntaxError:
        tree = ast.Module([], [])
    file = inspect.getsourcefile(function) or "?"
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise LoopError(f"{file}:{first}: a loop's body has to be a function written with def")
    ast.increment_lineno(tree, first - 1)
    return tree.body[0], file


def _parameters(tree: ast.FunctionDef, file: str) -> list[str]:
    given = tree.args
    if given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
        raise LoopError(
            f"{file}:{tree.lineno}: the body of a loop takes plain parameters only: no defaults, "
            "no * and no keywords"
        )
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    if len(names) < 2:
        raise LoopError(
            f"{file}:{tree.lineno}: the body of a loop takes the key and the value of an element "
            "first, then the arrays: def body(key, value, W, H)"
        )
    return names


# Free names


def _free_names(
    function: Callable[..., Any],
    tree: ast.FunctionDef,
    file: str,
    special: Mapping[int, Callable[..., Any]],
    callers: tuple[str, ...] = (),
) -> tuple[FreeNames, dict[str, Callable[..., Any]]]:
    """What a function's free names stand for, and which of its calls are functions of this room."""
    found = FreeNames({}, {}, {})
    calls: dict[str, Callable[..., Any]] = {}
    seen = _Scope(function, {**getattr(function, "__globals__", {}), **closure(function)})
    for node in ast.walk(tree):
        target = seen.lookup(node) if isinstance(node, ast.Attribute | ast.Name) else None
        if id(target) in special and target is not None:
            calls[ast.unparse(node)] = special[id(target)]
    for name, node in _loaded_names(tree):
        if name in seen.names:
            place = f"{file}:{node.lineno}"
            _add_name(found, name, seen.names[name], place, calls, callers)
        elif name not in BUILTINS and not _is_exception(name):
            raise LoopError(
                f"{file}:{node.lineno}: {name} is not defined, or is not something that a loop's "
                "body can use"
            )
    return found, calls


@dataclass(frozen=True)
class _Scope:
    """The names around a function."""

    function: Callable[..., Any]
    names: Mapping[str, Any]

    def lookup(self, node: ast.expr) -> Any:
        """The object that `a.b.c` stands for; None if that is not known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.lookup(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None


def closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The names of the functions around a function that it refers to."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    found = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return found


def _loaded_names(tree: ast.FunctionDef) -> Iterator[tuple[str, ast.Name]]:
    """Names that the body reads and does not bind itself."""
    own = {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)}
    nodes = [node for statement in tree.body for node in ast.walk(statement)]
    own |= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in own:
            yield node.id, node


def _add_name(
    found: FreeNames,
    name: str,
    value: Any,
    place: str,
    calls: Mapping[str, Any],
    callers: tuple[str, ...],
) -> None:
    """Sort a free name into `found`; refuse what other processes could not be given."""
    modules, constants, helpers = found.modules, found.constants, found.helpers
    assert isinstance(modules, dict) and isinstance(constants, dict) and isinstance(helpers, dict)
    if isinstance(value, ModuleType):
        if value.__name__ in MODULES:
            modules[name] = value.__name__
        elif not any(text == name or text.startswith(f"{name}.") for text in calls):
            raise LoopError(
                f"{place}: the module {value.__name__} cannot be used in a loop's body; numpy and "
                "math can"
            )
    elif isinstance(value, bool | int | float | np.number | np.bool_ | np.ndarray):
        constants[name] = value
    elif name in calls:
        return
    elif _home(value):
        modules[name] = _home(value)
    elif isinstance(getattr(value, "py_func", value), PythonFunction):
        if name in callers:
            raise LoopError(f"{place}: {name} calls itself, which cannot be compiled here")
        if name not in helpers:
            helpers[name] = read_helper(getattr(value, "py_func", value), callers)
    elif getattr(builtins, name, None) is not value:
        raise LoopError(
            f"{place}: {name} is a {type(value).__name__}, which a loop's body cannot refer to; "
            "pass it as an argument"
        )


def _home(value: Any) -> str:
    """`numpy.sqrt` for that function of numpy; '' for what is neither numpy's nor math's."""
    name = str(getattr(value, "__name__", ""))
    for module in (np, math):
        if name and getattr(module, name, None) is value:
            return f"{module.__name__}.{name}"
    return ""


def read_helper(function: Callable[..., Any], callers: tuple[str, ...] = ()) -> HelperSource:
    """The source of a function that other processes call, and what it refers to. Raises LoopError
    if they could not be given that."""
    tree, file = function_tree(function)
    tree.decorator_list = []
    free, _ = _free_names(function, tree, file, {}, (*callers, tree.name))
    return HelperSource(tree.name, ast.unparse(tree), free)


def plain_function(source: HelperSource) -> Callable[..., Any]:
    """A function as plain Python, made of its source."""
    space: dict[str, Any] = dict(source.free.constants)
    for name, module in source.free.modules.items():
        parent, _, member = module.rpartition(".")
        space[name] = getattr(MODULES[parent], member) if parent else MODULES[module]
    for name, helper in source.free.helpers.items():
        space[name] = plain_function(helper)
    exec(compile(source.text, f"<{source.name}>", "exec"), space)
    found: Callable[..., Any] = space[source.name]
    return found


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)
