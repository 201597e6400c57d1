"""Latent Dirichlet allocation by word rotation (ST-4), with collapsed Gibbs sampling.

Documents are cut into blocks, words dealt into as many buckets: the i-th most frequent one into
bucket i mod n_blocks. In turn t block b draws topics for its tokens of bucket b + t mod n_blocks:

               bucket 0   bucket 1   bucket 2
    turn 0     block 0    block 1    block 2          After n_blocks turns, which are a pass,
    turn 1     block 2    block 0    block 1          every token has been drawn once.
    turn 2     block 1    block 2    block 0

No two blocks have the rows of a word at the same time, so those are exact. Only the sums of all
topics are those of the turn's beginning, plus the block's own changes. Pass 0 gives each token any
topic: drawn from the counts of those before it, they took many more passes to become good ones.

A token's random number is made of seed, pass, document and position: no bit depends on workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import digamma
from typing_extensions import override

from distbelief.core.errors import SettingError
from distbelief.parameter_server.rows import Values
from sandblaster.strads.columns import of_sklearn
from sandblaster.strads.estimator import Estimator, blocks_of, check_numbers, checked_entries
from sandblaster.strads.program import Program, Pushed, Steps, Task, run
from sandblaster.strads.topic_kernel import LANES, Counts, sampler


Matrix: TypeAlias = "sparse.csr_array[np.int64]"  # (n_documents, n_words) of counts
Words = NDArray[np.uint64]

_WINDOW: Final = 5  # passes of which the mean is compared: single ones are noisy
_PRIOR_EVERY: Final = 10  # passes
_FOLD_IN_MAX: Final = 200  # iterations
_PRIOR_MIN: Final = 1e-6  # products of smaller ones are lost in float32,
_PRIOR_MAX: Final = 1e6  # and beside larger ones the counts


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


def completion(
    counts: Matrix, word_weights: Values, alpha: Values, *, seed: int = 0, first: int = 0
) -> tuple[float, int]:
    """Return the log-likelihood of half of each document given the other half, and its tokens.

    Document completion (Wallach et al. 2009, section 5.1): topics are estimated from the tokens
    of one half, drawn by `seed`, and the others are scored. Arguments as in `fold_in`; `first`
    is the number of the first document.
    """
    lengths = np.asarray(counts.sum(axis=1), np.int64)
    seen = uniforms(token_keys(lengths, first, seed), 0) < 0.5
    entries = np.repeat(np.arange(counts.nnz), counts.data)
    n_seen = np.bincount(entries[seen], minlength=counts.nnz)
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


# --- the program ---


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Draw topics of the tokens of a bucket."""

    number: int  # of the pass; 0: any topics
    bucket: int
    alpha: Values  # (n_topics,)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Weigh:
    """Report what the next prior is made of."""

    alpha: Values


@final
@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """Score held-out documents."""

    alpha: Values


Argument: TypeAlias = Sample | Weigh | Evaluate
Report: TypeAlias = Values
"""Sums over tokens or documents. Log-likelihood, number of tokens; of `Weigh`: (n_topics + 1,)."""


@final
@dataclass(slots=True, eq=False)
class Block:
    """Some documents, and the topics of their tokens."""

    tokens: list[Counts]  # of each bucket: (n, 2), the row of the word in it, the document
    keys: list[Words]  # (n,)
    topics: list[Counts]  # (n,), set by pass 0
    document_topics: Counts  # (n_documents, width): how many of these there are
    lengths: NDArray[np.int64]  # (n_documents,)
    held_out: Matrix
    first_held_out: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """What the schedule returns."""

    alpha: Values
    scores: Sequence[float]
    """After each pass: log-likelihood per token, each given all others."""
    held_out_scores: Sequence[tuple[int, float]]  # passes, and `completion` per token


@final
@dataclass(kw_only=True, eq=False)
class Topics(Program[Block, Argument, Report, Learned]):
    """Topics of documents. Its tables: "words", rows by `row_of`, and "sums" of these.

    Args:
        counts: (n_documents, n_words) of whole numbers, canonical.
        alpha: The prior of topics in a document: (n_topics,).
        beta: The prior of words in a topic.
        held_out: Documents that are only evaluated; may have no rows.

    All others as those of the estimator.
    """

    counts: Matrix
    alpha: Values
    beta: float
    seed: int
    n_blocks: int
    max_iter: int
    tol: float
    learn_alpha: bool  # every 10 passes: Minka 2000, equation 55
    held_out: Matrix
    evaluate_every: int
    patience: int
    tables: Mapping[str, Values] = field(init=False)
    row_of: NDArray[np.int64] = field(init=False)  # (n_words,): of the words table

    def __post_init__(self) -> None:
        n_documents, n_words = self.counts.shape
        frequencies = np.bincount(self.counts.indices, self.counts.data, minlength=n_words)
        ranked = np.argsort(-frequencies, kind="stable")
        dealt = np.concatenate([ranked[bucket :: self.n_blocks] for bucket in range(self.n_blocks)])
        self.row_of = np.empty(n_words, np.int64)
        self.row_of[dealt] = np.arange(n_words)
        sizes = [len(range(bucket, n_words, self.n_blocks)) for bucket in range(self.n_blocks)]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])  # of buckets, among rows
        # Blocks have about as many tokens each.
        ends = np.cumsum(np.asarray(self.counts.sum(axis=1), np.int64))
        shares = np.arange(self.n_blocks + 1) * (ends[-1] / self.n_blocks)
        self._documents = np.searchsorted(ends, shares)
        self._documents[[0, -1]] = 0, n_documents
        self.tables = {
            "words": np.zeros((n_words, len(self.alpha))),
            "sums": np.zeros(len(self.alpha)),
        }

    @override
    def load(self, block: int) -> Block:
        first, end = self._documents[block : block + 2]
        counts = self.counts[first:end]
        lengths = np.asarray(counts.sum(axis=1), np.int64)
        rows = self.row_of[np.repeat(counts.indices, counts.data)]
        buckets = np.searchsorted(self._starts, rows, side="right") - 1
        documents = np.repeat(np.arange(len(lengths)), lengths)
        tokens = np.stack([rows - self._starts[buckets], documents], axis=1).astype(np.int32)
        keys = token_keys(lengths, int(first), self.seed)
        places = np.split(
            np.argsort(buckets, kind="stable"),
            np.cumsum(np.bincount(buckets, minlength=self.n_blocks))[:-1],
        )
        n_held_out = self.held_out.shape[0]
        start, stop = (n_held_out * one // self.n_blocks for one in (block, block + 1))
        return Block(
            tokens=[tokens[some] for some in places],
            keys=[keys[some] for some in places],
            topics=[np.zeros(len(some), np.int32) for some in places],
            document_topics=np.zeros((len(lengths), self._width), np.int32),
            lengths=lengths,
            held_out=self.held_out[start:stop],
            first_held_out=start,
        )

    @property
    def _width(self) -> int:
        return -(-len(self.alpha) // LANES) * LANES

    @override
    def schedule(self, state: object = None) -> Steps[Argument, Report, Learned]:
        assert state is None, "blocks keep topics: there are no marks"
        alpha, scores, evaluations = self.alpha, list[float](), list[tuple[int, float]]()
        for number in range(self.max_iter + 1):
            totals = np.zeros(2)
            for turn in range(self.n_blocks):
                totals += sum((yield self._turn(number, turn, alpha)), np.zeros(2))
            if not number:
                continue
            scores.append(float(totals[0] / totals[1]))
            if self.learn_alpha and not number % _PRIOR_EVERY:
                alpha = yield from self._fitted(alpha)
            if self.held_out.shape[0] and not number % self.evaluate_every:
                takes = {name: slice(0, len(values)) for name, values in self.tables.items()}
                reports = yield self._all(Evaluate(alpha), takes)
                total, n_tokens = sum(reports, np.zeros(2))
                if not n_tokens:
                    raise SettingError("held_out has too few words to score; give more")
                evaluations.append((number, float(total / n_tokens)))
            if self._is_over(scores, [score for _, score in evaluations]):
                break
        return Learned(alpha, scores, evaluations)

    def _turn(self, number: int, turn: int, alpha: Values) -> list[Task[Argument]]:
        tasks: list[Task[Argument]] = []
        for block in range(self.n_blocks):
            bucket = (block + turn) % self.n_blocks
            takes = {"words": self._rows(bucket), "sums": slice(0, len(alpha))}
            argument = Sample(number, bucket, alpha)
            tasks.append(Task(block=block, argument=argument, takes=takes))
        return tasks

    def _rows(self, bucket: int) -> "slice[int, int, None]":
        return slice(int(self._starts[bucket]), int(self._starts[bucket + 1]))

    def _all(
        self, argument: Argument, takes: "Mapping[str, slice[int, int, None]]"
    ) -> list[Task[Argument]]:
        blocks = range(self.n_blocks)
        return [Task(block=block, argument=argument, takes=takes) for block in blocks]

    def _fitted(self, alpha: Values) -> Steps[Argument, Report, Values]:
        for _ in range(5):
            reports = yield self._all(Weigh(alpha), {})
            totals = sum(reports, np.zeros(len(alpha) + 1))
            alpha = np.maximum(alpha * totals[:-1] / totals[-1], _PRIOR_MIN)
        return alpha

    def _is_over(self, scores: Sequence[float], held_out: Sequence[float]) -> bool:
        if len(held_out) > self.patience:
            best = max(held_out[: -self.patience])
            if max(held_out[-self.patience :]) <= best:
                return True
        last, before = scores[-_WINDOW:], scores[-2 * _WINDOW : -_WINDOW]
        return len(before) == _WINDOW and sum(last) - sum(before) <= self.tol * _WINDOW

    @override
    def push(self, block: Block, argument: Argument, taken: Mapping[str, Values]) -> Pushed[Report]:
        match argument:
            case Sample():
                return self._sample(block, argument, taken)
            case Weigh(alpha):
                numbers = block.document_topics[:, : len(alpha)]
                of_topics = (digamma(numbers + alpha) - digamma(alpha)).sum(axis=0)
                total = alpha.sum()
                of_lengths = (digamma(block.lengths + total) - digamma(total)).sum()
                return Pushed(adds={}, report=np.append(of_topics, of_lengths))
            case Evaluate(alpha):
                weights = self.word_weights(taken)
                score = completion(
                    block.held_out, weights, alpha, seed=self.seed, first=block.first_held_out
                )
                return Pushed(adds={}, report=np.array(score))

    def _sample(
        self, block: Block, argument: Sample, taken: Mapping[str, Values]
    ) -> Pushed[Report]:
        bucket, n_topics = argument.bucket, len(argument.alpha)
        tokens, topics = block.tokens[bucket], block.topics[bucket]
        draws = uniforms(block.keys[bucket], argument.number)
        words = np.zeros((len(taken["words"]), self._width), np.int32)
        words[:, :n_topics] = taken["words"]
        sums = np.zeros(self._width, np.int64)
        sums[:n_topics] = taken["sums"]
        weights = np.ones(len(tokens), np.float32)
        if argument.number:
            beta_sum = self.beta * len(self.row_of)
            inverses, alpha = np.zeros((2, self._width), np.float32)
            inverses[:n_topics] = 1 / (sums[:n_topics] + beta_sum)
            alpha[:n_topics] = argument.alpha
            rest = words, block.document_topics, sums, inverses, alpha
            sampler()(tokens, topics, draws, weights, *rest, np.float32(self.beta), beta_sum)
        else:
            topics[:] = draws * n_topics
            np.add.at(words, (tokens[:, 0], topics), 1)
            np.add.at(block.document_topics, (tokens[:, 1], topics), 1)
            sums += np.bincount(topics, minlength=len(sums))
        others = np.log(np.maximum(block.lengths - 1, 0) + argument.alpha.sum())
        n_of = np.bincount(tokens[:, 1], minlength=len(others))
        score = np.log(weights).sum(dtype=np.float64) - n_of @ others
        return Pushed(
            adds={
                "words": (self._rows(bucket), words[:, :n_topics] - taken["words"]),
                "sums": (slice(0, n_topics), sums[:n_topics] - taken["sums"]),
            },
            report=np.array([score, len(tokens)]),
        )

    def word_weights(self, tables: Mapping[str, Values]) -> Values:
        """Return the probability of each word in each topic: (n_words, n_topics)."""
        weights = (tables["words"] + self.beta) / (tables["sums"] + self.beta * len(self.row_of))
        return weights[self.row_of]


# --- the estimator ---


class LatentDirichletAllocation(Estimator):
    """Topics of documents, by collapsed Gibbs sampling over rotating words (STRADS, ST-4).

    The same input gives the same bits, for any `workers`; another `n_blocks` is another sample.
    Install the extra `kernels`: without numba sampling takes some 250 times as long.

    Args:
        n_components: The number of topics.
        doc_topic_prior: Of each topic in a document; None: 1 / n_components.
        topic_word_prior: Of each word in a topic; None: 1 / n_components.
        learn_doc_topic_prior: Whether the former is fitted to the documents, topic by topic.
        max_iter: Passes over all tokens, at most.
        tol: Sampling ends when the log-likelihood per token, as the mean over 5 passes, rises by
            no more.
        evaluate_every: Passes between evaluations of `held_out`.
        patience: Sampling ends after so many evaluations without a better one; the topics are
            those of the last pass.
        n_blocks: Blocks of documents, sampled at the same time, by up to so many workers; None: 8,
            or all documents or words if these are fewer.
        workers: Threads. They share the time only with numba.
        random_state: The seed, 0 or more.

    Attributes:
        components_: (n_components, n_features): tokens of each word in each topic, plus the prior.
        doc_topic_prior_: (n_components,)
        n_iter_: Passes made.
        scores_: After each pass: log-likelihood per token, each given all others.
        held_out_scores_: Passes, and `score` of the held-out documents then.
    """

    def __init__(  # noqa: PLR0913 -- scikit-learn's convention
        self,
        n_components: int = 10,
        *,
        doc_topic_prior: float | None = None,
        topic_word_prior: float | None = None,
        learn_doc_topic_prior: bool = False,
        max_iter: int = 200,
        tol: float = 1e-4,
        evaluate_every: int = 10,
        patience: int = 3,
        n_blocks: int | None = None,
        workers: int = 1,
        random_state: int = 0,
    ) -> None:
        self.n_components = n_components
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.learn_doc_topic_prior = learn_doc_topic_prior
        self.max_iter = max_iter
        self.tol = tol
        self.evaluate_every = evaluate_every
        self.patience = patience
        self.n_blocks = n_blocks
        self.workers = workers
        self.random_state = random_state

    def program(self, X: object, *, held_out: object = None) -> Topics:  # noqa: N803 -- scikit-learn's name
        """Return what `fit` runs.

        Raises:
            SettingError: as `fit`.
        """
        user = type(self).__name__
        check_numbers(
            user,
            n_components=self.n_components,
            max_iter=self.max_iter,
            evaluate_every=self.evaluate_every,
            patience=self.patience,
            tol=self.tol,
            workers=self.workers,
            random_state=self.random_state,
        )
        priors = [self.doc_topic_prior, self.topic_word_prior]
        alpha, beta = (1 / self.n_components if one is None else one for one in priors)
        check_numbers(user, doc_topic_prior=alpha, topic_word_prior=beta)
        for name, value in {"doc_topic_prior": alpha, "topic_word_prior": beta}.items():
            if not _PRIOR_MIN <= value <= _PRIOR_MAX:
                raise SettingError(
                    f"{user}: {name} is {value}; use {_PRIOR_MIN:g} to {_PRIOR_MAX:g}"
                )
        counts = _checked_counts(X, user=user)
        if not counts.nnz:
            raise SettingError(f"{user}: X has no words; give documents with at least one")
        n_documents, n_words = counts.shape
        n_blocks = blocks_of(user, self.n_blocks, documents=n_documents, words=n_words)
        if held_out is None:
            evaluated = counts[:0]
        else:
            evaluated = _checked_counts(held_out, user=user, n_words=n_words)
        return Topics(
            counts=counts,
            alpha=np.full(self.n_components, float(alpha)),
            beta=float(beta),
            seed=int(self.random_state),
            n_blocks=n_blocks,
            max_iter=self.max_iter,
            tol=self.tol,
            learn_alpha=self.learn_doc_topic_prior,
            held_out=evaluated,
            evaluate_every=self.evaluate_every,
            patience=self.patience,
        )

    def fit(
        self,
        X: object,  # noqa: N803 -- scikit-learn's name
        y: object = None,  # noqa: ARG002 -- scikit-learn's signature
        *,
        held_out: object = None,
    ) -> "LatentDirichletAllocation":
        """Sample topics of documents.

        Args:
            X: Counts of words, (n_documents, n_features): scipy.sparse or dense. Documents without
                words change nothing.
            y: Nothing: for pipelines.
            held_out: Counts of documents that are only scored, for the rule of `patience`.

        Raises:
            SettingError: counts that are negative or no whole numbers, a wrong parameter, more
                blocks than documents or words.
        """
        program = self.program(X, held_out=held_out)
        learned, tables = run(program, workers=self.workers)
        self.components_ = tables["words"][program.row_of].T + program.beta
        self.doc_topic_prior_ = learned.alpha
        self.n_features_in_ = len(program.row_of)
        self.n_iter_ = len(learned.scores)
        self.scores_ = learned.scores
        self.held_out_scores_ = learned.held_out_scores
        return self

    def transform(self, X: object) -> Values:  # noqa: N803 -- as above
        """Return the topics of documents, (n_documents, n_components), rows of sum 1."""
        counts, weights = self._given(X)
        return fold_in(counts, weights, self.doc_topic_prior_)

    def fit_transform(self, X: object, y: object = None) -> Values:  # noqa: N803 -- as above
        """Sample topics of documents, and return them as `transform` does."""
        return self.fit(X, y).transform(X)

    def score(self, X: object, y: object = None) -> float:  # noqa: N803, ARG002 -- as above
        """Return the log-likelihood per token of half of each document, given the other half."""
        counts, weights = self._given(X)
        total, n_tokens = completion(
            counts, weights, self.doc_topic_prior_, seed=int(self.random_state)
        )
        if not n_tokens:
            raise SettingError(f"{type(self).__name__}: X has too few words to score; give more")
        return total / n_tokens

    def perplexity(self, X: object) -> float:  # noqa: N803 -- as above
        """Return exp(-score): the lower, the better."""
        return float(np.exp(-self.score(X)))

    def _given(self, counts: object) -> tuple[Matrix, Values]:
        user = type(self).__name__
        if not hasattr(self, "components_"):
            kind = of_sklearn("NotFittedError", SettingError)
            raise kind(f"this {user} has no topics yet; call fit first")
        matrix = _checked_counts(counts, user=user, n_words=self.n_features_in_)
        weights = self.components_ / self.components_.sum(axis=1, keepdims=True)
        return matrix, np.ascontiguousarray(weights.T)


def _checked_counts(counts: object, *, user: str, n_words: int | None = None) -> Matrix:
    matrix = checked_entries(counts, user=user)
    if n_words not in {None, matrix.shape[1]}:
        raise SettingError(
            f"{user}: X has {matrix.shape[1]} columns, not {n_words}; use the same vocabulary"
        )
    numbers = matrix.data
    for is_wrong, what in (
        (numbers < 0, "is negative"),
        (numbers != np.floor(numbers), "is no whole number"),
        (numbers >= 2**31, "is too large"),
    ):
        if is_wrong.any():
            value = numbers[is_wrong.argmax()]
            raise SettingError(f"{user}: a count of X, {value}, {what}; give counts of words")
    parts = numbers.astype(np.int64), matrix.indices.copy(), matrix.indptr.copy()
    whole: Matrix = sparse.csr_array(parts, shape=matrix.shape)
    whole.eliminate_zeros()
    return whole
