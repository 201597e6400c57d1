"""Collapsed Gibbs sampling of topics, compiled by numba where it is installed: numpy's bits.

A token's topic k is drawn with a weight of (Griffiths and Steyvers 2004, equation 5)

    (n_wk + beta) (n_dk + alpha_k) / (n_k + n_words beta)         the token itself not counted

All topics are weighed, eight at a time by vector instructions: with some hundred topics that is
faster than alias tables or sparse sums, which follow pointers, and it is exact. Weights are added
up in 16 interleaved sums, since a single one would wait for each addition in turn.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sandblaster.strads.compiled import compiled


Counts = NDArray[np.int32]
Sums = NDArray[np.int64]
Halves = NDArray[np.float32]
Numbers = NDArray[np.float64]

LANES: Final = 16  # topics are filled up to a multiple of it; those never drawn have `inverses` 0


Sampler: TypeAlias = Callable[
    [Counts, Counts, Numbers, Halves, Counts, Counts, Sums, Halves, Halves, np.float32, float], None
]
"""The arguments of `sample`."""


def sampler() -> Sampler:
    """Return `sample` as compiled, or else numpy's."""
    return compiled(
        sample,
        "void(read(int32, 2), int32[::1], read(float64, 1), float32[::1], int32[:, ::1], "
        "int32[:, ::1], int64[::1], float32[::1], read(float32, 1), float32, float64)",
        otherwise=sample_in_numpy,
    )


def sample(  # noqa: PLR0913, PLR0917 -- numba takes arrays, not objects
    tokens: Counts,  # (n, 2): the word of each, the document
    topics: Counts,  # (n,) of each: changed
    uniforms: Numbers,  # (n,) in [0, 1)
    weights: Halves,  # (n,) where the sum over topics is written
    word_topics: Counts,  # (n_words, width): changed, as the next three
    document_topics: Counts,  # (n_documents, width)
    topic_sums: Sums,  # (width,)
    inverses: Halves,  # (width,) of topic_sums + beta_sum; 0 beyond the last topic
    alpha: Halves,  # (width,)
    beta: np.float32,
    beta_sum: float,  # over all words
) -> None:
    """Draw a new topic for each token, one after the other.

    It checks no index. Plain Python, too, so that it can be held against numpy without numba.
    """
    width = len(alpha)
    last = width - LANES
    sums = np.empty(width, np.float32)
    for place in range(len(tokens)):
        words, documents = word_topics[tokens[place, 0]], document_topics[tokens[place, 1]]
        topic = topics[place]
        words[topic] -= 1
        documents[topic] -= 1
        topic_sums[topic] -= 1
        inverses[topic] = np.float32(1.0 / (topic_sums[topic] + beta_sum))
        for k in range(LANES):
            sums[k] = (
                (np.float32(words[k]) + beta) * (np.float32(documents[k]) + alpha[k]) * inverses[k]
            )
        for k in range(last):  # counted from here: with k - LANES no vectors are made of it
            sums[k + LANES] = (
                sums[k]
                + (np.float32(words[k + LANES]) + beta)
                * (np.float32(documents[k + LANES]) + alpha[k + LANES])
                * inverses[k + LANES]
            )
        total = np.float32(0)
        for k in range(last, width, 4):  # by fours: fewer additions wait for others
            total += (sums[k] + sums[k + 1]) + (sums[k + 2] + sums[k + 3])
        weights[place] = total
        rest = np.float32(total * uniforms[place])
        lane = 0
        while lane < LANES and rest >= sums[last + lane]:
            rest -= sums[last + lane]
            lane += 1
        if lane == LANES:  # by rounding, once in some millions of draws
            lane, rest = 0, np.float32(0)
        topic = lane
        while rest >= sums[topic]:
            topic += LANES
        topics[place] = topic
        words[topic] += 1
        documents[topic] += 1
        topic_sums[topic] += 1
        inverses[topic] = np.float32(1.0 / (topic_sums[topic] + beta_sum))


def sample_in_numpy(  # noqa: PLR0913, PLR0917 -- as above
    tokens: Counts,
    topics: Counts,
    uniforms: Numbers,
    weights: Halves,
    word_topics: Counts,
    document_topics: Counts,
    topic_sums: Sums,
    inverses: Halves,
    alpha: Halves,
    beta: np.float32,
    beta_sum: float,
) -> None:
    """Do as `sample`, in some 250 times as long."""
    for place, (word, document) in enumerate(tokens.tolist()):
        words, documents = word_topics[word], document_topics[document]
        topic = int(topics[place])
        words[topic] -= 1
        documents[topic] -= 1
        topic_sums[topic] -= 1
        inverses[topic] = 1.0 / (topic_sums[topic] + beta_sum)
        each = (words.astype(np.float32) + beta) * (documents.astype(np.float32) + alpha)
        each *= inverses
        sums = np.add.accumulate(each.reshape(-1, LANES))
        total = np.float32(0)
        for a, b, c, d in sums[-1].reshape(-1, 4):
            total += (a + b) + (c + d)
        weights[place] = total
        rest = np.float32(total * uniforms[place])
        lane = 0
        while lane < LANES and rest >= sums[-1, lane]:
            rest -= sums[-1, lane]
            lane += 1
        if lane == LANES:
            lane, rest = 0, np.float32(0)
        topic = int(np.argmax(rest < sums[:, lane])) * LANES + lane
        topics[place] = topic
        words[topic] += 1
        documents[topic] += 1
        topic_sums[topic] += 1
        inverses[topic] = 1.0 / (topic_sums[topic] + beta_sum)
