"""Topics of documents by collapsed Gibbs sampling (latent Dirichlet allocation).

    python examples/topics.py                                  # serial
    python examples/topics.py --processes 2
    apportion loops show examples/topics.py:build --cluster local:4

The loop goes over tokens by (word, document), and a token's value is its topic: what the body
returns takes its place. Counts of a document belong to its row and counts of a word to its, so that
tiles that share neither can be sampled at once. The sums over all words everybody changes; they are
buffered, as in every parallel sampler. A token's random numbers are a function of the token and the
pass.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
from scipy.special import gammaln

import apportion.loops as loops

TOPICS, ALPHA, BETA = 20, 0.1, 0.1


def made_up(documents: int = 1000, words: int = 800, length: int = 60) -> tuple[np.ndarray, ...]:
    """Words and documents of tokens, drawn from hidden topics."""
    draw = np.random.default_rng(0)
    hidden = draw.dirichlet(np.full(words, 0.05), TOPICS)
    mixtures = draw.dirichlet(np.full(TOPICS, 0.1), documents)
    topics = [draw.choice(TOPICS, length, p=mixture) for mixture in mixtures]
    tokens = [draw.choice(words, p=hidden[topic]) for each in topics for topic in each]
    return np.array(tokens, np.int32), np.repeat(np.arange(documents, dtype=np.int32), length)


def counts(rows: np.ndarray, topics: np.ndarray, size: int, count: int) -> np.ndarray:
    found = np.bincount(rows.astype(np.int64) * count + topics, minlength=size * count)
    return found.reshape(size, count).astype(np.float32)


def build(
    data: tuple[np.ndarray, ...] | None = None, topics: int = TOPICS, seed: int = 0
) -> tuple[Any, ...]:
    """The loop and its arguments."""
    words, documents = made_up() if data is None else data
    first = np.random.default_rng(seed).integers(0, topics, len(words)).astype(np.int32)
    tokens = loops.array.from_coordinates(words, documents, first)
    of_words = loops.array.from_numpy(counts(words, first, tokens.shape[0], topics))
    of_documents = loops.array.from_numpy(counts(documents, first, tokens.shape[1], topics))
    sums = loops.array.from_numpy(np.bincount(first, minlength=topics).astype(np.float32))

    @loops.parallel(over=tokens)
    def sample(key, topic, of_words, of_documents, sums, alpha, beta):  # type: ignore[no-untyped-def]
        word, document = key
        of_words[word, topic] -= 1
        of_documents[document, topic] -= 1
        sums[topic] -= 1
        chances = np.empty(sums.shape[0])
        total = 0.0
        for k in range(sums.shape[0]):
            fits = (of_words[word, k] + beta) / (sums[k] + beta * of_words.shape[0])
            total += (of_documents[document, k] + alpha) * fits
            chances[k] = total
        drawn = loops.uniform() * total
        new = 0
        while new < sums.shape[0] - 1 and chances[new] < drawn:
            new += 1
        of_words[word, new] += 1
        of_documents[document, new] += 1
        sums[new] += 1
        return new

    return sample, of_words, of_documents, loops.buffer(sums), ALPHA, BETA


def log_likelihood(of_words: Any, of_documents: Any, alpha: float, beta: float) -> float:
    """Of the words and their topics, per token."""
    w, d = of_words.numpy().astype(np.float64), of_documents.numpy().astype(np.float64)
    words, topics = w.shape
    found = topics * (gammaln(words * beta) - words * gammaln(beta))
    found += gammaln(w + beta).sum() - gammaln(w.sum(axis=0) + words * beta).sum()
    found += len(d) * (gammaln(topics * alpha) - topics * gammaln(alpha))
    found += gammaln(d + alpha).sum() - gammaln(d.sum(axis=1) + topics * alpha).sum()
    return float(found / w.sum())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int)
    parser.add_argument("--passes", type=int, default=20)
    given = parser.parse_args()
    sample, of_words, of_documents, *rest = build()
    with loops.processes(given.processes) if given.processes else nullcontext():
        for number in range(given.passes):
            sample(of_words, of_documents, *rest)
            found = log_likelihood(of_words, of_documents, ALPHA, BETA)
            sys.stdout.write(f"pass {number}: log likelihood {found:.4f} a token\n")


if __name__ == "__main__":
    main()
