"""Lists names of the package that have two meanings, long functions, and state kept in modules.

    python tools/homonyms.py        # exit status 1 if something is not listed with its reason

A class or module name means one thing in the whole package; a leading underscore does not make it
another name. Models of the zoo are programs of their own: their layers are not counted.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "apportion"
FUNCTION_LINES = 80

# Names that several places share, with the reason.
SHARED: dict[str, str] = {
    "module __init__": "Python's own name",
    "module base": "the registry that the families of one folder share, in decompose and kernels",
    "module attention": "a family of operators: its description, its kernels, its samples",
    "module conv": "a family of operators",
    "module factory": "a family of operators",
    "module grouped": "a family of operators",
    "module index": "a family of operators",
    "module linalg": "a family of operators",
    "module loss": "a family of operators",
    "module matmul": "a family of operators",
    "module norm": "a family of operators",
    "module opened": "a family of operators",
    "module optimizer": "a family of operators, and what capture makes of torch's optimizers",
    "module pool": "a family of operators, and a pool of processes",
    "module reduction": "a family of operators",
    "module tables": "tables that are printed, and tables of rows that processes share",
    "module update": "a family of operators",
    "module view": "a family of operators",
    "module window": "a family of operators",
}

# Module-level objects that change while the program runs, with the reason.
STATE: dict[str, str] = {
    "apportion.capture.decompose.base.DECOMPOSITIONS": "a registry: filled while its files load",
    "apportion.capture.functional_twins.functional_twin": "a cache of a function of the operator",
    "apportion.capture.random_rules.RANDOM_RULES": "a registry: filled while its file loads",
    "apportion.capture.torch_private.is_composite": "a cache of a function of the operator",
    "apportion.capture.user_line._shown_file": "a cache of a function of the file's name",
    "apportion.catalogue._by_name": "a cache of a file of the package",
    "apportion.catalogue.open_models": "a cache of a file of the package",
    "apportion.columns.PATIENCE": "one for all compiled functions, which are made on import",
    "apportion.columns._numba": "Numba, which is told of our functions once",
    "apportion.columns._numba_folders": "a cache of folders' names",
    "apportion.describe.descriptions.DESCRIPTIONS": "the registry that describe() fills",
    "apportion.describe.descriptions.REASONS": "the registry that unsplit() fills",
    "apportion.describe.formula._SHARED": "a cache of formulas of all sizes, bounded",
    "apportion.describe.formula._SIZED": "a cache: descriptions that look at sizes",
    "apportion.describe.formula._parameters": "a cache of a function of the description",
    "apportion.describe.interval.refine": "a cache of arithmetic, bounded",
    "apportion.describe.ops.resample._nearest": "a cache of arithmetic",
    "apportion.execute.allocations._workspaces": "a cache of measured allocations",
    "apportion.execute.kernels.attention._prefers_cudnn": "what torch prefers on this machine",
    "apportion.execute.host_adam._loop": "a cache of compiled loops",
    "apportion.execute.host_blocks.round_loop": "a cache of compiled loops",
    "apportion.execute.host_blocks.widen_loop": "a cache of compiled loops",
    "apportion.execute.host_sgd._loop": "a cache of compiled loops",
    "apportion.execute.host_random._spreads": "a cache of arithmetic, bounded",
    "apportion.execute.pinned_memory._postponed": "memory to unpin after CUDA graphs are recorded",
    "apportion.execute.device_random.is_trusted": "a cache of a property of the device",
    "apportion.execute.device_random._kernel": "a cache of compiled kernels",
    "apportion.execute.device_random._words": "a cache of arithmetic, bounded",
    "apportion.execute.kernels.base.dtype": "a cache of a function of the name",
    "apportion.execute.kernels.base.OWN": "a registry: filled while its files load",
    "apportion.execute.kernels.base._kernel": "a cache of a function of the operator",
    "apportion.execute.kernels.base._caller": "a cache of a function of the operator",
    "apportion.execute.kernels.update._prepared": "a cache of compiled update bodies",
    "apportion.loops.compile_kernel._interpreted": "a cache of kernels by their text, bounded",
    "apportion.loops.compile_kernel.compile_text": "a cache of kernels by their text, bounded",
    "apportion.loops.session._SESSIONS": "the sessions that loops run in, the innermost last",
    "apportion.machine.collective._network": "a cache by Cluster and group, bounded",
    "apportion.machine.collective._profile": "a cache by Cluster and group, bounded",
    "apportion.machine.cost_model._combined": "a cache by tables and mode, bounded",
    "apportion.machine.cost_model._scaled_table": "a cache by device, bounded",
    "apportion.machine.cost_model.shipped": "the files that come with the package, read once",
    "apportion.machine.cost_model._distinct_kinds": "a cache by kinds, bounded",
    "apportion.machine.cost_model.fit_columns": "a cache by table and kinds, bounded",
    "apportion.search.tables.elimination_in_numpy._PATTERNS": "a cache by contents, bounded",
    "apportion.search.walks.moves._grids_by_axes": "a cache of arithmetic",
    "apportion.split.derive._call_splits": "a cache of splits by signature, bounded",
    "apportion.cli.main._TERMINATED": "that a signal ends this process: there is no way back",
    "apportion.split.open_composites._OPENINGS": "a registry: filled while its file loads",
}


def files(folder: Path = PACKAGE) -> Iterator[Path]:
    """The modules of the package, without the zoo's models."""
    return (p for p in sorted(folder.rglob("*.py")) if "zoo" not in p.relative_to(folder).parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def homonyms() -> dict[str, list[str]]:
    """Classes and modules that share a name, with the places where they are."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files():
        place = str(path.relative_to(PACKAGE.parent))
        found[f"module {path.stem}"].append(place)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found[f"class {node.name.lstrip('_')}"].append(f"{place}:{node.lineno}")
    return {name: places for name, places in found.items() if len(places) > 1}


def long_functions() -> dict[str, int]:
    """Functions of more lines than a screen has, options and what is said of them not counted."""
    found = {}
    for path in files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                lines = (node.end_lineno or node.lineno) - first + 1
                if lines > FUNCTION_LINES:
                    found[f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}"] = lines
    return found


def state() -> dict[str, str]:
    """Module-level names that are bound to something which can change: a container that a function
    of the module changes, an object of a class that is not frozen, or a cache of results."""
    found = {}
    for path in files():
        place = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = parsed(path)
        changed = set(_changed_names(tree))
        for node in tree.body:
            for name, value in _bindings(node):
                if name in changed and isinstance(
                    value, ast.Dict | ast.List | ast.Set | ast.Call | ast.DictComp | ast.ListComp
                ):
                    found[f"{place}.{name}"] = "is changed by functions of its module"
            if isinstance(node, ast.FunctionDef) and any(map(_is_cache, node.decorator_list)):
                found[f"{place}.{node.name}"] = "keeps its results"
    return found


def _bindings(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value


MUTATORS = {"append", "add", "update", "setdefault", "pop", "clear", "extend", "insert", "remove"}


def _changed_names(tree: ast.Module) -> Iterator[str]:
    """Names whose object functions change in place, or that they bind anew."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        own = {node.arg for node in nodes if isinstance(node, ast.arg)} | {
            node.id for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }  # fmt: skip
        for node in nodes:
            if isinstance(node, ast.Global):
                yield from node.names
            target: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                target = node.func.value if node.func.attr in MUTATORS else None
            elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(
                node.ctx, ast.Store | ast.Del
            ):
                target = node.value
            if isinstance(target, ast.Name) and target.id not in own:
                yield target.id


def _is_cache(decorator: ast.expr) -> bool:
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
    return name in ("cache", "lru_cache")


def unlisted() -> list[str]:
    """One line for everything that is not listed with a reason."""
    lines = [
        f"{name} is in {', '.join(at)}" for name, at in homonyms().items() if name not in SHARED
    ]
    lines += [f"{name} has {count} lines" for name, count in long_functions().items()]
    lines += [f"{name} {what}" for name, what in state().items() if name not in STATE]
    return lines


def main() -> int:
    for line in (lines := unlisted()):
        print(line)
    print(f"{len(SHARED)} shared names and {len(STATE)} module states are listed with reasons")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
