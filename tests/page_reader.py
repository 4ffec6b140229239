"""Somebody who does what a page of the documentation says."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from apportion.cli import main as cli

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.M | re.S)


def tool(name: str) -> ModuleType:
    """A module of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Reader:
    """Writes the files that a page shows and runs its commands, in the working directory."""

    def __init__(self, screen: pytest.CaptureFixture[str]) -> None:
        self.screen = screen

    def follow(self, page: str) -> dict[str, str]:
        """What each command of a page has printed."""
        printed = {}
        for kind, title, text in FENCE.findall((ROOT / "docs" / page).read_text()):
            if title:
                Path(title).write_text(text)
            elif kind == "python":
                printed[text] = self.start([sys.executable, "-c", text])
            elif kind == "console":
                lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
                assert lines, f"{page}: a block without a command"
                printed |= {line: self.done(line) for line in lines}
        return printed

    def done(self, line: str) -> str:
        """What a command prints. Ours run in this process, which spares them torch's start."""
        name, *rest = shlex.split(line)
        if name != "apportion":
            return self.start([str(Path(sys.executable).with_name(name)), *rest])
        self.screen.readouterr()
        status = cli.status(rest)
        out, err = self.screen.readouterr()
        assert status == 0, f"{line}: {err[-2000:]}"
        return out

    def start(self, words: list[str]) -> str:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, f"{' '.join(words)}: {ran.stderr}"
        return ran.stdout
