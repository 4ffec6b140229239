"""Builds the sdist, from it the wheel, and installs that into an empty environment:

    python tools/check_packages.py           # with all dependencies, under constraints.txt: minutes
    python tools/check_packages.py --built DIR    # leaves what is built in DIR and installs nothing

Everything that git has in apportion/ must be in the wheel. In the new environment, with the extra
hf and in an empty folder, plans are made, saved, reported, run, exported and served.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = (
    "import sys; from setuptools import build_meta; "
    "print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
)
COMMANDS = (
    "apportion --version",
    "apportion models",
    "apportion plan gpt2:tiny --cluster 2xh100 --method data --out p.json",
    "apportion report p.json -o p.html",
)


WITH_EXTRAS = (
    "apportion plan bert-base-uncased,num_hidden_layers=1 --batch 2 --seq 16 --cluster 2xh100 "
    "--method data --out hub.json",
    "apportion run gpt2:tiny --procs 2 --method data --steps 2 --check",
    "apportion plan hf:llama,tiny --cluster local:2 --method fsdp --recompute none --out q.json",
    "apportion run hf:llama,tiny --plan q.json --check",
    "apportion export q.json -o train.py",
    "torchrun --nproc-per-node 2 train.py",
)


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of what git has, and the wheel that is built from it."""
    copy = folder / "source"
    tracked = _output(["git", "ls-files", "-z"], ROOT).split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    sdist = folder / _built("build_sdist", copy, folder)
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, folder / _built("build_wheel", unpacked, folder)


def _built(how: str, source: Path, folder: Path) -> str:
    said = _output(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", BUILD, how, folder], source
    )
    return said.strip().splitlines()[-1]


def _output(words: list[str | Path], folder: Path) -> str:
    done = subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words[:3]))} failed: {done.stderr[-3000:]}")
    return done.stdout


def missing(wheel: Path) -> list[str]:
    """Files of the package that git has and the wheel lacks."""
    with zipfile.ZipFile(wheel) as packed:
        there = set(packed.namelist())
    ours = _output(["git", "ls-files", "apportion"], ROOT).splitlines()
    return sorted(name for name in ours if name not in there and (ROOT / name).is_file())


def install(wheel: Path, folder: Path) -> None:
    """Installs a wheel into a new environment, and uses it from elsewhere."""
    _output([sys.executable, "-m", "venv", folder / "venv"], folder)
    bin = folder / "venv" / "bin"
    constraints = ROOT / "constraints.txt"
    _output([bin / "pip", "install", "-q", f"{wheel}[hf]", "-c", constraints], folder)
    (folder / "empty").mkdir()
    use(bin, folder / "empty", (*COMMANDS, *WITH_EXTRAS))
    serve(bin, folder / "empty")


def serve(bin: Path, folder: Path) -> None:
    """Asks the page that an installed package serves for itself, and ends it."""
    words = [str(bin / "apportion"), "serve", "p.json", "--port", "0"]
    server = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=_alone())
    try:
        assert server.stdout is not None
        told = iter(server.stdout.readline, "")
        address = next(word for line in told for word in line.split() if word.startswith("http"))
        with urllib.request.urlopen(address, timeout=60) as page:
            print("apportion serve ->", f"{len(page.read()):,} bytes")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def _alone(**environment: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment


def use(
    bin: Path, folder: Path, commands: tuple[str, ...] | None = None, **environment: str
) -> None:
    """Runs commands of an installed package in a folder."""
    variables = _alone(**environment)
    for command in commands or COMMANDS:
        name, *words = command.split()
        done = subprocess.run(
            [str(bin / name), *words], cwd=folder, capture_output=True, text=True, env=variables
        )
        if done.returncode:
            raise SystemExit(f"{command} failed: {done.stderr[-3000:]}")
        print(command, "->", done.stdout.strip().splitlines()[0] if done.stdout else "done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--built", type=Path, help="where to leave what is built")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sdist, wheel = build(Path(scratch))
        print(
            f"{sdist.name}: {sdist.stat().st_size:,} bytes; {wheel.name}: {wheel.stat().st_size:,}"
        )
        if lacks := missing(wheel):
            raise SystemExit(f"the wheel lacks {', '.join(lacks[:5])}")
        if given.built is None:
            install(wheel, Path(scratch))
            return
        given.built.mkdir(parents=True, exist_ok=True)
        for each in (sdist, wheel):
            (given.built / each.name).write_bytes(each.read_bytes())


if __name__ == "__main__":
    main()
