"""Writes verify/entry_operators.json: which operators each entry of PyTorch's operator database
calls, so that `apportion ops --verify --op NAME` runs only the entries that it needs.

    python tools/entry_operators.py

It runs all entries, which takes minutes. The file is for the version of torch that it is made with.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from apportion.verify.entry_index import INDEX, index_version
from apportion.verify.torch_samples import entries, entry_name, samples_of_entry


def called(number: int) -> tuple[str, list[str]]:
    """The name of an entry and of the operators that it calls."""
    torch.set_num_threads(1)
    entry = entries()[number]
    return entry_name(entry), sorted({str(s.target) for s in samples_of_entry(entry)})


def main() -> None:
    count = len(entries())
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        rows = dict(pool.map(called, range(count), chunksize=8))
    names = sorted({op for ops in rows.values() for op in ops})
    numbers = {name: k for k, name in enumerate(names)}
    data = {
        "torch": index_version(),
        "operators": names,
        "entries": {name: [numbers[op] for op in ops] for name, ops in sorted(rows.items())},
    }
    INDEX.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print(f"wrote {INDEX}: {count} entries, {len(names)} operators")


if __name__ == "__main__":
    main()
