"""Other people's programs on the data of benchmarks/orion.py, in an environment of their own.

    python -m venv peers && peers/bin/pip install numpy libmf cmfrec tomotopy lda scikit-learn
    python benchmarks/orion.py throughput --peers peers/bin/python

orion.py calls this file with that Python, the name of a function and the file of the data; what is
measured comes back as a line of JSON. One thread each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MEAN = 3.53  # of ratings: LIBMF begins with factors for positive ones


def libmf_seconds(data: Any, rank: int, rounds: int) -> dict[str, Any]:
    """Seconds a pass of LIBMF, by the clock and of the processor: the difference of runs of 1 and
    of 5 passes."""
    from libmf import mf

    table = np.stack([data["users"], data["items"], data["ratings"]], axis=1).astype(np.float32)

    def fit(passes: int) -> Any:
        model = mf.MF(k=rank, nr_threads=1, nr_bins=20, nr_iters=passes, quiet=True)
        began = np.array([time.perf_counter(), time.process_time()])
        model.fit(table)
        return np.array([time.perf_counter(), time.process_time()]) - began

    fit(1)
    found = np.array([(fit(5) - fit(1)) / 4 for _ in range(rounds)])
    seconds, of_processor = found.min(axis=0).tolist()
    return {"seconds": seconds, "cpu": of_processor}


def libmf_curve(data: Any, rank: int, passes: int) -> dict[str, Any]:
    """Root mean square errors after 1, 2, ... passes, each of a run of its own."""
    from libmf import mf

    users, items, ratings = data["users"], data["items"], data["ratings"]
    table = np.stack([users, items, ratings + MEAN], axis=1).astype(np.float32)
    errors = []
    for count in range(1, passes + 1):
        model = mf.MF(
            k=rank, nr_threads=1, nr_bins=20, nr_iters=count, quiet=True,
            lambda_p2=0.05, lambda_q2=0.05,
        )  # fmt: skip
        model.fit(table)
        found = (model.p_factors()[users] * model.q_factors()[items]).sum(axis=1)
        missed = found - table[:, 2]
        errors.append(float(np.sqrt((missed**2).mean())))
    return {"errors": errors}


def cmfrec_curve(data: Any, rank: int, passes: int) -> dict[str, Any]:
    """Errors and seconds after 1, 2, ... passes of alternating least squares."""
    import pandas
    from cmfrec import CMF

    frame = pandas.DataFrame(
        {"UserId": data["users"], "ItemId": data["items"], "Rating": data["ratings"]}
    )
    errors, seconds = [], []
    for count in range(1, passes + 1):
        model = CMF(
            k=rank, lambda_=5.0, niter=count, nthreads=1, verbose=False, user_bias=False,
            item_bias=False, center=False, finalize_chol=False,
        )  # fmt: skip
        began = time.perf_counter()
        model.fit(frame)
        seconds.append(time.perf_counter() - began)
        missed = model.predict(frame.UserId, frame.ItemId) - frame.Rating
        errors.append(float(np.sqrt((missed**2).mean())))
    return {"errors": errors, "seconds": seconds}


def lda_curve(data: Any, topics: int, passes: int) -> dict[str, Any]:
    """Log likelihoods a token of the package lda, and seconds a pass."""
    import logging

    from lda import LDA

    logging.disable(logging.CRITICAL)
    words, documents = data["words"], data["documents"]
    counts = np.zeros((documents.max() + 1, words.max() + 1), np.int64)
    np.add.at(counts, (documents, words), 1)
    model = LDA(topics, n_iter=passes + 1, alpha=0.1, eta=0.1, refresh=1, random_state=0)
    began = time.perf_counter()
    model.fit(counts)
    seconds = (time.perf_counter() - began) / (passes + 1)
    return {
        "likelihoods": [float(each) / len(words) for each in model.loglikelihoods_[1:]],
        "seconds": seconds,
    }


def tomotopy_curve(data: Any, topics: int, passes: int) -> dict[str, Any]:
    """Log likelihoods a token of tomotopy, and seconds a pass."""
    import tomotopy

    words, documents = data["words"], data["documents"]
    model = tomotopy.LDAModel(k=topics, alpha=0.1, eta=0.1, seed=0)
    model.optim_interval = 0
    for each in np.split(words, np.flatnonzero(np.diff(documents)) + 1):
        model.add_doc([str(word) for word in each])
    model.train(0, workers=1)
    found, seconds = [], 0.0
    for _ in range(passes):
        began = time.perf_counter()
        model.train(1, workers=1)
        seconds += time.perf_counter() - began
        w = np.array([model.get_topic_word_dist(k, normalize=False) for k in range(topics)])
        d = np.array([doc.get_topic_dist(normalize=False) for doc in model.docs])
        found.append(likelihood(w.T - 0.1, d - 0.1))
    return {"likelihoods": found, "seconds": seconds / passes}


def likelihood(w: Any, d: Any, alpha: float = 0.1, beta: float = 0.1) -> float:
    """Of words and their topics, a token: counts of each topic in words and in documents."""
    from scipy.special import gammaln

    words, topics = w.shape
    found = topics * (gammaln(words * beta) - words * gammaln(beta))
    found += gammaln(w + beta).sum() - gammaln(w.sum(axis=0) + words * beta).sum()
    found += len(d) * (gammaln(topics * alpha) - topics * gammaln(alpha))
    found += gammaln(d + alpha).sum() - gammaln(d.sum(axis=1) + topics * alpha).sum()
    return float(found / w.sum())


def regression_curve(data: Any, passes: int) -> dict[str, Any]:
    """Mean losses of scikit-learn's SGDClassifier after each pass, and seconds a pass."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import SGDClassifier
    from sklearn.metrics import log_loss

    starts, labels = data["starts"], data["labels"]
    rows = csr_matrix((data["values"].astype(np.float64), data["ids"], starts))
    model = SGDClassifier(
        loss="log_loss", alpha=1e-12, learning_rate="constant", eta0=float(data["rate"]),
        shuffle=False, fit_intercept=False,
    )  # fmt: skip
    losses, seconds = [], 0.0
    for _ in range(passes):
        began = time.perf_counter()
        model.partial_fit(rows, labels, classes=[0.0, 1.0])
        seconds += time.perf_counter() - began
        losses.append(float(log_loss(labels, model.predict_proba(rows)[:, 1])))
    return {"losses": losses, "seconds": seconds / passes}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (
        libmf_seconds, libmf_curve, cmfrec_curve, lda_curve, tomotopy_curve, regression_curve,
    )
}  # fmt: skip


def main() -> None:
    name, path, *numbers = sys.argv[1:]
    with np.load(path) as data:
        found = MEASURES[name](dict(data), *map(int, numbers))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
