"""Topics beside tomotopy and gensim, matrix factors beside implicit: speed and held-out likelihood.

    pip install tomotopy gensim implicit numba
    python -m experiments.benchmarks.batches.strads_peers [--passes 100]

Speed is tokens, or entries, per second of processor time and pass, one thread, rank or topics 100.
The text is that of the docstrings and comments of Python's own library.
"""

import argparse
import io
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sandblaster.strads.documents import completion
from sandblaster.strads.factor_kernel import stepper
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


def topics(n_passes: int) -> None:
    texts = documents()
    counts, words = counted(texts)
    is_held_out = np.arange(len(texts)) % HELD_OUT == 0
    seen, held_out = counts[~is_held_out], counts[is_held_out]
    n_tokens = int(seen.sum())
    print(f"{seen.shape[0]} documents, {n_tokens} tokens of {len(words)} words")

    def show(name: str, seconds: float, n_made: int, weights: NDArray[np.float64]) -> None:
        total, n = completion(held_out, weights, np.full(N_TOPICS, ALPHA))
        speed = n_made * n_tokens / seconds / 1e6
        print(f"{name:10} {speed:6.2f} M tokens/s, held-out log-likelihood {total / n:.4f}")

    sampler()
    model = LatentDirichletAllocation(
        N_TOPICS, doc_topic_prior=ALPHA, topic_word_prior=BETA, max_iter=n_passes, tol=-1
    )
    start = time.process_time()
    model.fit(seen)
    seconds = time.process_time() - start
    weights = model.components_ / model.components_.sum(axis=1, keepdims=True)
    show("sandblaster", seconds, n_passes, np.ascontiguousarray(weights.T))

    import tomotopy  # noqa: PLC0415 -- a peer, not installed with the package

    peer = tomotopy.LDAModel(k=N_TOPICS, alpha=ALPHA, eta=BETA, seed=1)
    peer.optim_interval = 0  # both keep their priors
    index = {word: place for place, word in enumerate(words)}
    for text, skip in zip(texts, is_held_out, strict=True):
        if not skip:
            peer.add_doc([word for word in text if word in index])
    peer.train(0)
    start = time.process_time()
    peer.train(n_passes, workers=1)
    seconds = time.process_time() - start
    weights = np.full((len(words), N_TOPICS), 1e-12)
    places = [index[word] for word in peer.used_vocabs]
    for topic in range(N_TOPICS):
        weights[places, topic] += peer.get_topic_word_dist(topic)
    show("tomotopy", seconds, n_passes, weights)

    from gensim.matutils import Sparse2Corpus  # noqa: PLC0415 -- as above
    from gensim.models import LdaModel  # noqa: PLC0415 -- as above

    corpus = list(Sparse2Corpus(seen.T.tocsc()))
    start = time.process_time()
    slow = LdaModel(
        corpus, N_TOPICS, id2word=dict(enumerate(words)), alpha=ALPHA, eta=BETA, random_state=0
    )
    show("gensim", time.process_time() - start, 1, slow.get_topics().T.astype(float))


def factors(rank: int, *, is_feedback: bool) -> None:
    rng = np.random.default_rng(0)
    n_rows, n_columns, n = 20_000, 5_000, 1_000_000
    shares = 1 / np.arange(1, n_columns + 1) ** 0.8
    places = rng.integers(0, n_rows, n), rng.choice(n_columns, n, p=shares / shares.sum())
    entries = sparse.coo_array((np.ones(n), places), shape=(n_rows, n_columns)).tocsr()
    stepper()
    model = MatrixFactorization(
        rank, implicit_strength=1.0 if is_feedback else None, max_iter=3, tol=-1, n_blocks=4
    )
    program = model.program(entries)
    start = time.process_time()
    run(program)
    ours = 3 * entries.nnz / (time.process_time() - start) / 1e6

    from implicit.als import AlternatingLeastSquares  # noqa: PLC0415 -- as above

    peer = AlternatingLeastSquares(rank, iterations=1, num_threads=1, random_state=0)
    matrix = sparse.csr_matrix(entries.astype(np.float32))
    peer.fit(matrix, show_progress=False)
    peer.iterations = 3
    start = time.process_time()
    peer.fit(matrix, show_progress=False)
    theirs = 3 * entries.nnz / (time.process_time() - start) / 1e6
    kind = "feedback" if is_feedback else "ratings"
    print(f"rank {rank}, {kind}: {ours:.2f} M entries/s, implicit (feedback) {theirs:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=100)
    topics(parser.parse_args().passes)
    for rank in (32, 100):
        for is_feedback in (False, True):
            factors(rank, is_feedback=is_feedback)


if __name__ == "__main__":
    main()
