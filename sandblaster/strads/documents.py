"""Documents of which topics are not sampled, their score, and the random numbers of tokens."""

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from distbelief.parameter_server.rows import Values


Matrix: TypeAlias = "sparse.csr_array[np.int64]"  # (n_documents, n_words) of counts
Words = NDArray[np.uint64]

_FOLD_IN_MAX: Final = 200  # iterations


# --- random numbers ---


def token_keys(lengths: NDArray[np.int64], first: int, seed: int) -> Words:
    """Return a number for each token of documents, of the seed, document and position.

    Args:
        lengths: Of the documents: (n_documents,).
        first: The number of the first of them.
        seed: 0 or more.
    """
    documents = np.repeat(np.arange(first, first + len(lengths), dtype=np.uint64), lengths)
    positions = np.arange(len(documents)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return _mixed(_mixed(documents + key) + positions.astype(np.uint64))


def uniforms(keys: Words, number: int) -> NDArray[np.float64]:
    """Return the number-th random number in [0, 1) of each token (SplitMix64)."""
    steps = np.uint64((number + 1) * 0x9E3779B97F4A7C15 % 2**64)
    return (_mixed(keys + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(words: Words) -> Words:
    """Steele, Lea and Flood 2014, figure 14, with Stafford's constants."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# --- documents, given the topics ---


def fold_in(counts: Matrix, word_weights: Values, alpha: Values) -> Values:
    """Return the topics of documents, (n_documents, n_topics), rows of sum 1.

    Args:
        counts: Of words: (n_documents, n_words).
        word_weights: The probability of each word in each topic: (n_words, n_topics).
        alpha: The prior: (n_topics,). A document without words has its topics.
    """
    shares = np.tile(alpha / alpha.sum(), (counts.shape[0], 1))
    for document, (start, end) in enumerate(zip(counts.indptr, counts.indptr[1:], strict=False)):
        weights = word_weights[counts.indices[start:end]]
        numbers = counts.data[start:end].astype(np.float64)
        share = shares[document]
        for _ in range(_FOLD_IN_MAX if end > start else 0):
            new = alpha + share * ((numbers / (weights @ share)) @ weights)
            new /= new.sum()
            change = np.abs(new - share).sum()
            share[:] = new
            if change < 1e-4:
                break
    return shares


def given_half(counts: Matrix, *, seed: int = 0, first: int = 0) -> NDArray[np.int64]:
    """Return how many tokens of each entry `completion` gives: (n_entries,)."""
    lengths = np.asarray(counts.sum(axis=1), np.int64)
    seen = uniforms(token_keys(lengths, first, seed), 0) < 0.5
    entries = np.repeat(np.arange(counts.nnz), counts.data)
    return np.bincount(entries[seen], minlength=counts.nnz)


def completion(
    counts: Matrix, word_weights: Values, alpha: Values, *, seed: int = 0, first: int = 0
) -> tuple[float, int]:
    """Return the log-likelihood of half of each document given the other half, and its tokens.

    Document completion (Wallach et al. 2009, section 5.1): topics are estimated from the tokens
    of one half, drawn by `seed`, and the others are scored. Arguments as in `fold_in`; `first`
    is the number of the first document.
    """
    n_seen = given_half(counts, seed=seed, first=first)
    given = sparse.csr_array((n_seen, counts.indices, counts.indptr), shape=counts.shape)
    shares = fold_in(given, word_weights, alpha)
    n_rest = counts.data - n_seen
    documents = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
    total = 0.0
    for start in range(0, counts.nnz, 1 << 16):  # entries: the products of all would not fit
        part = slice(start, start + (1 << 16))
        each = np.einsum("ij,ij->i", word_weights[counts.indices[part]], shares[documents[part]])
        total += float(n_rest[part] @ np.log(each))
    return total, int(n_rest.sum())
