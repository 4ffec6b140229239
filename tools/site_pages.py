"""Pages of the documentation that are made when it is built: the reference of the command line and
of Python from their own help and docstrings, the notebook, and what lies in the root.

mkdocs.yml names this file as a hook; `make docs` builds the pages into site/.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "first_plan.ipynb"
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?!design/)((?:examples|benchmarks|tests|apportion)/[^)]+)\)"
)
FETCHED = re.compile(r'src="https://unpkg\.com/iframe-worker/shim"')
FIELD = re.compile(r"\w[\w.]* {2,}\S")  # a name in one column, what it is in another
QUOTED = re.compile(r"(?<=: )'([^']*)'")  # an annotation that is not evaluated
WIDE = 90
PLACE = re.compile(r" at 0x[0-9a-f]+")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the decisions to the last tab. A page in no tab is a warning, which ends the build."""
    assert config.nav is not None
    docs = Path(config.docs_dir)
    pages = sorted(str(path.relative_to(docs)) for path in (docs / "design").glob("*.md"))
    (last,) = config.nav[-1].values()
    last.append({"Decisions": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    made = {
        "reference/commands.md": commands_page(),
        "reference/api.md": api_page(),
        "notebook.md": notebook_page(NOTEBOOK),
        "changelog.md": root_page("CHANGELOG.md"),
        "contributing.md": root_page("CONTRIBUTING.md"),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files that are no pages become their names."""
    return OUTSIDE.sub(r"`\2`", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Search works from the disk by a script that comes along; the theme would fetch one."""
    here = "../" * page.url.count("/") + "scripts/worker_from_disk.js"
    return FETCHED.sub(f'src="{here}"', output)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same on pages that are no documents, such as the one for addresses that are not there."""
    return FETCHED.sub('src="scripts/worker_from_disk.js"', output_content)


def root_page(name: str) -> str:
    """A page of the root, whose links are as seen from there."""
    return (ROOT / name).read_text().replace("](docs/", "](")


# The command line


def commands_page() -> str:
    """All commands with their arguments and options, in the order of `apportion --help`."""
    from apportion.cli.main import app

    root = typer.main.get_command(app)
    rows = ["# Commands", "", "What `apportion COMMAND --help` says.", ""]
    for path, command in _commands(root, ()):
        rows += [f"## {' '.join(('apportion', *path))}", "", _plain(command.help or ""), ""]
        rows += ["| | |", "|---|---|", *_parameters(command), ""]
    return "\n".join(rows)


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, each in (inner or {}).items():
        yield from _commands(each, (*path, name))


def _parameters(command: Any) -> Iterator[str]:
    context = command.context_class(command)
    for each in command.get_params(context):
        record = each.get_help_record(context)
        if record is None:
            named, said = each.make_metavar(context), getattr(each, "help", None) or ""
        else:
            named, said = record
        yield f"| `{_cell(named)}` | {_cell(_plain(said))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(text: str) -> str:
    """Help as Markdown: what would be taken for HTML is text."""
    return inspect.cleandoc(text).replace("\f", "").replace("<", "&lt;").replace("\b", "")


# Python


def api_page() -> str:
    """All public names with their signatures and docstrings."""
    import apportion as ap
    from apportion import loops, tables

    rows = ["# Python", "", "`import apportion as ap`", ""]
    for module, prefix in ((ap, "ap"), (loops, "apportion.loops"), (tables, "apportion.tables")):
        if module is not ap:
            rows += [f"## {prefix}", "", _plain(module.__doc__ or ""), ""]
        for name in sorted(module.__all__, key=str.lower):
            if not name.startswith("_"):
                rows += _entry(f"{prefix}.{name}", getattr(module, name), 3)
    return "\n".join(rows)


def _entry(name: str, item: Any, depth: int) -> list[str]:
    """A heading, the signature and the docstring; of a class its public methods too."""
    if inspect.ismodule(item):
        return [f"{'#' * depth} {name}", "", _plain(item.__doc__ or ""), ""]
    rows = [f"{'#' * depth} {name}", ""]
    if callable(item) and (shown := _signature(name, item)):
        rows += ["```python", shown, "```", ""]
    if inspect.isclass(item) or inspect.isroutine(item):
        rows += [_docstring(item), ""]
        members = vars(item).items() if inspect.isclass(item) else ()
        for member, what in members:
            what = getattr(what, "__func__", what)
            if member[0] != "_" and (inspect.isfunction(what) or isinstance(what, property)):
                rows += _member(member, what)
    return rows


def _member(name: str, item: Any) -> list[str]:
    if isinstance(item, property):
        return [f"**`.{name}`** {_docstring(item)}", ""]
    return ["```python", _signature(f".{name}", item), "```", "", _docstring(item), ""]


def _docstring(item: Any) -> str:
    """The docstring; paragraphs that are tables of fields, and what is indented, stay as they
    are."""
    found = []
    for paragraph in _plain(inspect.getdoc(item) or "").split("\n\n"):
        lines = paragraph.splitlines()
        is_table = len([line for line in lines if FIELD.match(line)]) > 1
        found.append("\n".join(f"    {line}" for line in lines) if is_table else paragraph)
    return "\n\n".join(found)


def _signature(name: str, item: Any) -> str:
    try:
        told = inspect.signature(item)
    except (TypeError, ValueError):
        return ""
    parts = [QUOTED.sub(r"\1", PLACE.sub("", str(each))) for each in told.parameters.values()]
    ends = "" if told.return_annotation is told.empty else f" -> {told.return_annotation}"
    line = f"{name}({', '.join(parts)}){ends}"
    if len(line) <= WIDE:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){ends}"])


# The notebook


def notebook_page(path: Path) -> str:
    """The cells of a notebook with what they printed."""
    rows = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            rows += [text, ""]
            continue
        rows += ["```python", text, "```", ""]
        printed = "".join("".join(each.get("text", [])) for each in cell["outputs"])
        rows += ["```text", printed.rstrip("\n"), "```", ""] if printed else []
    rows += [f"This page is `{path.relative_to(ROOT)}`, a notebook that runs.", ""]
    return "\n".join(rows)
