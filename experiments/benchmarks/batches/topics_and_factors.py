"""Topics beside tomotopy and gensim, matrix factors beside implicit: speed and held-out likelihood.

Speed is tokens, or entries, per second of processor time and pass, one thread, rank or topics 100.
The text is that of the docstrings and comments of Python's own library.
"""

import io
import json
import math
import sysconfig
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

import distbelief
from sandblaster.strads.documents import completion
from sandblaster.strads.factor_kernel import stepper, subtracter
from sandblaster.strads.factorization import MatrixFactorization
from sandblaster.strads.program import run
from sandblaster.strads.topic_kernel import sampler
from sandblaster.strads.topics import LatentDirichletAllocation


N_TOPICS = 100
ALPHA, BETA = 0.1, 0.01
HELD_OUT = 10  # one document of so many


def documents() -> list[list[str]]:
    """Return pieces of 200 words of docstrings and comments."""
    found: list[list[str]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            words = list(prose(path))
            found += [words[start : start + 200] for start in range(0, len(words) - 50, 200)]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[index] for index in order]


def prose(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT or token.string.startswith(('"""', "'''")):
                letters = (one if "a" <= one <= "z" else " " for one in token.string.lower())
                yield from (one for one in "".join(letters).split() if 3 <= len(one) <= 15)
    except (tokenize.TokenError, SyntaxError):
        return  # a file of tests that is no Python


def counted(texts: list[list[str]]) -> "tuple[sparse.csr_array[np.int64], list[str]]":
    n_with = Counter(word for text in texts for word in set(text))
    words = sorted(word for word, n in n_with.items() if 5 <= n <= len(texts) / 3)
    index = {word: place for place, word in enumerate(words)}
    pairs = [(row, index[word]) for row, text in enumerate(texts) for word in text if word in index]
    rows, columns = np.array(pairs).T
    ones = np.ones(len(rows), np.int64)
    counts = sparse.coo_array((ones, (rows, columns)), shape=(len(texts), len(words))).tocsr()
    return counts, words


def topics(*, small: bool) -> dict[str, float]:
    n_topics, n_passes = (10, 5) if small else (N_TOPICS, 100)
    texts = documents()
    texts = texts[:200] if small else texts
    counts, words = counted(texts)
    is_held_out = np.arange(len(texts)) % HELD_OUT == 0
    seen, held_out = counts[~is_held_out], counts[is_held_out]
    n_tokens = int(seen.sum())
    print(f"topics: {seen.shape[0]} documents, {n_tokens} tokens of {len(words)} words")
    figures: dict[str, float] = {}

    def show(name: str, seconds: float, n_made: int, weights: NDArray[np.float64]) -> None:
        total, n = completion(held_out, weights, np.full(n_topics, ALPHA))
        speed = n_made * n_tokens / seconds / 1e6
        figures[f"topics_{name}"], figures[f"likelihood_{name}"] = speed, total / n
        print(f"  {name:10} {speed:6.2f} M tokens/s, held-out log-likelihood {total / n:.4f}")

    sampler()
    model = LatentDirichletAllocation(
        n_topics, doc_topic_prior=ALPHA, topic_word_prior=BETA, max_iter=n_passes, tol=-1
    )
    start = time.process_time()
    model.fit(seen)
    seconds = time.process_time() - start
    weights = model.components_ / model.components_.sum(axis=1, keepdims=True)
    show("ours", seconds, n_passes, np.ascontiguousarray(weights.T))
    kept = [text for text, skip in zip(texts, is_held_out, strict=True) if not skip]
    with missing("tomotopy"):
        show("tomotopy", *by_tomotopy(kept, words, n_topics, n_passes))
    with missing("gensim"):
        show("gensim", *by_gensim(seen, words, n_topics))
    for name in ("tomotopy", "gensim"):
        if f"topics_{name}" in figures:
            figures[f"topics_over_{name}"] = figures["topics_ours"] / figures[f"topics_{name}"]
    return figures


def turns(*, small: bool) -> dict[str, float]:
    """Return seconds of a job of topics by replicas and staleness, and what they gain."""
    texts = documents()
    counts, _ = counted(texts[:200] if small else texts)
    sampler()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.npz"
        sparse.save_npz(path, counts)
        for staleness in (0, 1, 3):
            for replicas in (1, 2):
                job = _job(path, staleness, replicas, n_passes=3 if small else 20)
                done = distbelief.train(job, show=False)
                assert not done.exit_code, done.summary.error
                lines = (Path(done.directory) / "metrics.jsonl").read_text().splitlines()
                last = json.loads(lines[-1])["figures"]
                key = f"turns_{staleness}_of_{replicas}"
                figures[f"{key}_seconds"] = done.summary.training_seconds or math.nan
                shares = {one: last[f"{one}_share"] for one in ("computing", "waiting", "staging")}
                figures |= {f"{key}_{one}": share for one, share in shares.items()}
                print(f"  {key}: {figures[f'{key}_seconds']:.2f} s, {shares}", flush=True)
            gain = figures[f"turns_{staleness}_of_1_seconds"]
            gain /= figures[f"turns_{staleness}_of_2_seconds"]
            figures[f"turns_{staleness}_gain"] = gain
    return figures


def _job(path: Path, staleness: int, replicas: int, *, n_passes: int) -> dict[str, object]:
    options = {
        "n_components": N_TOPICS,
        "doc_topic_prior": ALPHA,
        "topic_word_prior": BETA,
        "max_iter": n_passes,
        "tol": -1.0,
        "n_blocks": 4,
        "staleness": staleness,
    }
    files = {"counts": str(path)}
    model = {"factory": "sandblaster.strads.jobs:topics", "arguments": {**files, **options}}
    data = {"factory": "sandblaster.strads.jobs:documents", "arguments": files}
    return {
        "model": model,
        "data": {"train": data},
        "algorithm": {"name": "sandblaster", "method": "strads", "loss": "cross_entropy"},
        "cluster": {"replicas": replicas, "shards": 1},
        "output": {"directory": str(path.parent / f"run-{staleness}-{replicas}")},
    }


@contextmanager
def missing(name: str) -> Iterator[None]:
    """Name a library that is not installed; its figures are left out."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        print(f"  {name} is not installed: pip install {name}", flush=True)


Found = tuple[float, int, NDArray[np.float64]]
"""Seconds, passes, and the probability of each word in each topic: (n_words, n_topics)."""


def by_tomotopy(texts: list[list[str]], words: list[str], n_topics: int, n_passes: int) -> Found:
    import tomotopy  # noqa: PLC0415 -- a peer, not installed with the package

    peer = tomotopy.LDAModel(k=n_topics, alpha=ALPHA, eta=BETA, seed=1)
    peer.optim_interval = 0  # both keep their priors
    index = {word: place for place, word in enumerate(words)}
    for text in texts:
        peer.add_doc([word for word in text if word in index])
    peer.train(0)
    start = time.process_time()
    peer.train(n_passes, workers=1)
    seconds = time.process_time() - start
    weights = np.full((len(words), n_topics), 1e-12)
    places = [index[word] for word in peer.used_vocabs]
    for topic in range(n_topics):
        weights[places, topic] += peer.get_topic_word_dist(topic)
    return seconds, n_passes, weights


def by_gensim(seen: "sparse.csr_array[np.int64]", words: list[str], n_topics: int) -> Found:
    from gensim.matutils import Sparse2Corpus  # noqa: PLC0415 -- as above
    from gensim.models import LdaModel  # noqa: PLC0415 -- as above

    corpus = list(Sparse2Corpus(seen.T.tocsc()))
    start = time.process_time()
    slow = LdaModel(
        corpus, n_topics, id2word=dict(enumerate(words)), alpha=ALPHA, eta=BETA, random_state=0
    )
    return time.process_time() - start, 1, slow.get_topics().T.astype(float)


# --- factors ---


def factors(*, small: bool) -> dict[str, float]:
    figures = rmse(10 if small else 300)
    for rank in (4,) if small else (32, 64, 100):
        for is_feedback in (False, True):
            figures |= speed(rank, is_feedback=is_feedback, small=small)
    return figures


def rmse(n_passes: int) -> dict[str, float]:
    """Return the error of other entries, over that of dense least squares on the same ones."""
    rng = np.random.default_rng(0)
    u, v = rng.standard_normal((300, 4)), rng.standard_normal((200, 4))
    whole = u @ v.T + 0.1 * rng.standard_normal((300, 200))
    is_seen = rng.random(whole.shape) < 0.3
    model = MatrixFactorization(4, regularization=0.1, max_iter=n_passes, tol=1e-9)
    model.fit(
        sparse.csr_array(sparse.coo_array((whole[is_seen], np.nonzero(is_seen)), whole.shape))
    )
    ours = model.row_factors_ @ model.components_ + model.mean_
    targets = np.where(is_seen, whole - model.mean_, 0.0)
    a, b = rng.standard_normal((300, 4)), rng.standard_normal((200, 4))
    for _ in range(n_passes):
        for one, other, mask, t in ((a, b, is_seen, targets), (b, a, is_seen.T, targets.T)):
            for row, seen in enumerate(mask):
                some = other[seen]
                one[row] = np.linalg.solve(some.T @ some + 0.1 * np.eye(4), some.T @ t[row, seen])
    theirs = a @ b.T + model.mean_
    errors = [float(np.sqrt(((one - whole)[~is_seen] ** 2).mean())) for one in (ours, theirs)]
    print(f"factors: held-out RMSE {errors[0]:.5f}, of dense least squares {errors[1]:.5f}")
    return {"rmse": errors[0], "rmse_over_dense": errors[0] / errors[1]}


def speed(rank: int, *, is_feedback: bool, small: bool) -> dict[str, float]:
    rng = np.random.default_rng(0)
    n_rows, n_columns, n = (200, 50, 1000) if small else (20_000, 5_000, 1_000_000)
    shares = 1 / np.arange(1, n_columns + 1) ** 0.8
    places = rng.integers(0, n_rows, n), rng.choice(n_columns, n, p=shares / shares.sum())
    entries = sparse.coo_array((np.ones(n), places), shape=(n_rows, n_columns)).tocsr()
    stepper()
    subtracter()
    n_passes = 3 if small or not is_feedback else 12
    model = MatrixFactorization(
        rank, implicit_strength=1.0 if is_feedback else None, max_iter=n_passes, tol=-1, n_blocks=4
    )
    program = model.program(entries)
    start = time.process_time()
    objectives = [objective for objective, _ in run(program)[0]]
    of_pass = (time.process_time() - start) / n_passes
    kind = "feedback" if is_feedback else "ratings"
    ours = entries.nnz / of_pass / 1e6
    figures = {f"{kind}_{rank}": ours}
    print(f"  rank {rank}, {kind}: {ours:.2f} M entries/s", flush=True)
    if not is_feedback:
        return figures
    with missing("implicit"):
        seconds, n_made, loss = by_implicit(entries, rank, n_passes=2 if small else 8)
        theirs = n_made * entries.nnz / seconds / 1e6
        figures |= {f"implicit_{rank}": theirs, f"feedback_{rank}_over_implicit": ours / theirs}
        text = f"  rank {rank}, implicit: {theirs:.2f} M entries/s"
        needed = next((k for k, one in enumerate(objectives, 1) if one <= loss), None)
        if needed is not None:
            figures[f"feedback_{rank}_to_loss_over_implicit"] = seconds / (needed * of_pass)
            text += f"; to the loss of {n_made} passes, {needed} of ours: "
            text += f"{seconds / (needed * of_pass):.2f} times as fast as it"
        print(text, flush=True)
    return figures


def by_implicit(
    entries: "sparse.csr_array[np.float64]", rank: int, *, n_passes: int
) -> tuple[float, int, float]:
    """Return seconds, passes, and the objective of ours then."""
    from implicit.als import AlternatingLeastSquares  # noqa: PLC0415 -- as above

    matrix = sparse.csr_matrix(entries.astype(np.float32))
    # Its weights of entries are alpha r, ours 1 + r.
    matrix.data += 1
    peer = AlternatingLeastSquares(
        rank, iterations=1, num_threads=1, random_state=0, regularization=0.1, alpha=1.0
    )
    peer.fit(matrix, show_progress=False)
    peer.iterations = n_passes - 1
    start = time.process_time()
    peer.fit(matrix, show_progress=False)
    seconds = (time.process_time() - start) * n_passes / (n_passes - 1)
    u, v = peer.user_factors.astype(float), peer.item_factors.astype(float)
    loss = 0.1 * float((u**2).sum() + (v**2).sum()) + float(((u.T @ u) * (v.T @ v)).sum())
    for row, (start_of, end) in enumerate(zip(entries.indptr, entries.indptr[1:], strict=False)):
        expected = v[entries.indices[start_of:end]] @ u[row]
        weights = 1 + entries.data[start_of:end]
        loss += float((weights * (1 - expected) ** 2 - expected**2).sum())
    return seconds, n_passes, loss
