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

Blocks keep the topics of their tokens. Every fourth pass they write them to a table, from which
they begin anew: there a job can go on.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, cast, final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from scipy import sparse
from scipy.special import digamma
from typing_extensions import override

from distbelief.core.errors import SettingError
from distbelief.parameter_server.rows import STALENESS_MAX, Rows, Values
from distbelief.protocol.vector_commands import Pull
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.columns import check_width, of_sklearn
from sandblaster.strads.documents import (
    Matrix,
    Words,
    completion,
    fold_in,
    given_half,
    token_keys,
    uniforms,
)
from sandblaster.strads.estimator import (
    Estimator,
    blocks_of,
    check_numbers,
    check_workers,
    checked_entries,
)
from sandblaster.strads.program import (
    Flight,
    Mark,
    Program,
    Pushed,
    Steps,
    Task,
    Types,
    checksum,
    run,
)
from sandblaster.strads.topic_kernel import LANES, Counts, sampler


_WINDOW: Final = 5  # passes of which the mean is compared: single ones are noisy
_FEW: Final = 4  # times as many numbers: fewer changes are sent one by one, with their places
_PRIOR_EVERY: Final = 10  # passes
_KEPT_EVERY: Final = 4  # passes
_PRIOR_MIN: Final = 1e-6  # products of smaller ones are lost in float32,
_PRIOR_MAX: Final = 1e6  # and beside larger ones the counts


# --- topics of tokens, several as one number ---


def topics_per_number(n_topics: int) -> int:
    """Return how many topics are the digits of one whole number that float64 has exactly."""
    n = 1
    while max(n_topics, 2) ** (n + 1) <= 2**53:
        n += 1
    return n


def packed_topics(topics: Counts, n_topics: int) -> Values:
    n = topics_per_number(n_topics)
    digits = np.zeros(-(-len(topics) // n) * n, np.int64)
    digits[: len(topics)] = topics
    return (digits.reshape(-1, n) @ n_topics ** np.arange(n)).astype(np.float64)


def unpacked_topics(numbers: Values, n_topics: int, n_tokens: int) -> Counts:
    powers = n_topics ** np.arange(topics_per_number(n_topics))
    digits = numbers.astype(np.int64)[:, None] // powers % n_topics
    return digits.ravel()[:n_tokens].astype(np.int32)


# --- the program ---


@final
class Sample(msgspec.Struct, frozen=True, eq=False, tag=True):
    """Draw topics of the tokens of a bucket; from those of the table, if it is taken."""

    number: int  # of the pass; 0: any topics
    bucket: int
    alpha: Values  # (n_topics,)
    checksum: int  # of the data: a host with other ones is refused
    n_lacking: int = 0  # turns of this block whose changes are not in the sums that it takes


@final
class Weigh(msgspec.Struct, frozen=True, eq=False, tag=True):
    """Report what the next prior is made of."""

    alpha: Values


@final
class Evaluate(msgspec.Struct, frozen=True, eq=False, tag=True):
    """Score held-out documents."""

    alpha: Values


@final
class Keep(msgspec.Struct, frozen=True, eq=False, tag=True):
    """Write the topics of the tokens to the table; and the prior, where there is one."""

    alpha: Values | None


Argument: TypeAlias = Sample | Weigh | Evaluate | Keep
Report: TypeAlias = Values
"""Sums over tokens or documents. Log-likelihood, number of tokens; of `Weigh`: (n_topics + 1,)."""


@final
@dataclass(slots=True, eq=False)
class Block:
    """Some documents, and the topics of their tokens."""

    buckets: NDArray[np.int64]  # (n_blocks + 1,) their bounds among the tokens
    tokens: Counts  # (n_tokens, 2): the row of the word in its bucket, the document
    keys: Words  # (n_tokens,)
    topics: Counts  # (n_tokens,), set by pass 0
    document_topics: Counts  # (n_documents, width): how many of these there are
    lengths: NDArray[np.int64]  # (n_documents,)
    held_out: Matrix
    first_held_out: int
    kept: "slice[int, int, None]"  # where its topics are in the table
    changes: deque[Values]  # of the sums, in the last turns


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
    """Topics of documents.

    Its tables:

        words    counts: (n_words * n_topics,), words in the order of `row_of`
        sums     of these over words: (n_topics,)
        topics   of the tokens, block by block, as `packed_topics`
        row_of   where each word is in "words": (n_words,)
        priors   alpha, then beta: (n_topics + 1, 2), the values and 1

    Counts are cut into rows of one number: shards may cut them anywhere.

    With a staleness of s a block has to have s + 1 buckets of its own, and takes every bucket s + 1
    turns after the block that had it before. So the counts of words are those after all earlier
    turns, also where the last s are not committed; and sums, with what the block itself has changed
    since, are as old as without it: a turn is 1 / (s + 1) as long.

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
    staleness: int = 0
    tables: Mapping[str, Values] = field(init=False)
    row_of: NDArray[np.int64] = field(init=False)  # (n_words,)

    def __post_init__(self) -> None:
        n_documents, n_words = self.counts.shape
        frequencies = np.bincount(self.counts.indices, self.counts.data, minlength=n_words)
        ranked = np.argsort(-frequencies, kind="stable")
        n_buckets = self.n_buckets
        dealt = np.concatenate([ranked[bucket::n_buckets] for bucket in range(n_buckets)])
        self.row_of = np.empty(n_words, np.int64)
        self.row_of[dealt] = np.arange(n_words)
        sizes = [len(range(bucket, n_words, n_buckets)) for bucket in range(n_buckets)]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])  # of buckets, among rows
        # Blocks have about as many tokens each.
        ends = np.cumsum(np.asarray(self.counts.sum(axis=1), np.int64))
        shares = np.arange(self.n_blocks + 1) * (ends[-1] / self.n_blocks)
        self._documents = np.searchsorted(ends, shares)
        self._documents[[0, -1]] = 0, n_documents
        n_topics = len(self.alpha)
        n_tokens = np.diff(np.concatenate([[0], ends])[self._documents])
        sizes_kept = -(-n_tokens // topics_per_number(n_topics))
        self._bounds = np.concatenate([[0], np.cumsum(sizes_kept)])  # of blocks in "topics"
        self.bounds = ("max_iter", "patience", "tol")
        self.tables = {
            "words": np.zeros(n_words * n_topics),
            "sums": np.zeros(n_topics),
            "topics": np.zeros(self._bounds[-1]),
            "row_of": self.row_of.astype(np.float64),
            "priors": np.stack([np.append(self.alpha, self.beta), np.ones(n_topics + 1)], axis=1),
        }
        # By this, (alpha, 1) are the new row: what is added would be rounded.
        self.pulls = {"priors": Pull("divide")}
        self.types = Types(argument=Argument, report=Report, state=Learned)
        self.keeps_state = True
        self.checksum = checksum(self.counts, self.held_out)

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
        order = np.argsort(buckets, kind="stable")
        sizes = np.bincount(buckets, minlength=self.n_buckets)
        n_held_out = self.held_out.shape[0]
        start, stop = (n_held_out * one // self.n_blocks for one in (block, block + 1))
        return Block(
            buckets=np.concatenate([[0], np.cumsum(sizes)]),
            tokens=tokens[order],
            keys=keys[order],
            topics=np.zeros(len(tokens), np.int32),
            document_topics=np.zeros((len(lengths), self._width), np.int32),
            lengths=lengths,
            held_out=self.held_out[start:stop],
            first_held_out=start,
            kept=self._kept(block),
            changes=deque(maxlen=self.staleness),
        )

    @property
    def n_buckets(self) -> int:
        return (self.staleness + 1) * self.n_blocks

    @property
    def _width(self) -> int:
        return -(-len(self.alpha) // LANES) * LANES

    @override
    def schedule(self, state: object = None) -> Steps[Argument, Report, Learned]:
        learned = Learned(self.alpha, (), ()) if state is None else cast("Learned", state)
        number, is_anew = -1 if state is None else len(learned.scores), True
        while (end := self._end(learned)) is None:
            number += 1
            alpha, totals = learned.alpha, np.zeros(2)
            # Of a flight, the first turn of blocks that begin anew is no part: they may move then.
            n_alone = int(is_anew) if self.staleness else self.n_buckets
            for turn in range(n_alone):
                reports = yield self._turn(number, turn, alpha, anew=is_anew and not turn)
                totals += sum(reports, np.zeros(2))
            is_anew = False
            if self.staleness:
                turns = (
                    self._turn(number, turn, alpha, n_lacking=min(turn - n_alone, self.staleness))
                    for turn in range(n_alone, self.n_buckets)
                )
                reports = yield Flight(rounds=turns, staleness=self.staleness)
                totals += sum(reports, np.zeros(2))
            if not number:
                continue
            if self.learn_alpha and not number % _PRIOR_EVERY:
                alpha = yield from self._fitted(alpha)
            evaluations = list(learned.held_out_scores)
            if self.held_out.shape[0] and not number % self.evaluate_every:
                takes = {name: slice(0, len(self.tables[name])) for name in ("words", "sums")}
                total, n_tokens = sum((yield self._all(Evaluate(alpha), takes)), np.zeros(2))
                evaluations.append((number, float(total / n_tokens)))
            scores = [*learned.scores, float(totals[0] / totals[1])]
            learned = Learned(alpha, scores, evaluations)
            ends = self._end(learned) is not None
            if ends or not number % _KEPT_EVERY:
                yield self._keep(alpha)
                is_anew = True
            if not ends:
                yield self._mark(learned, state=learned if is_anew else None)
        yield self._mark(learned, state=learned, end=end)
        return learned

    def _mark(self, learned: Learned, *, state: Learned | None, end: Reason | None = None) -> Mark:
        scores = learned.scores
        n_updates = len(scores) * int(self.counts.sum())
        return Mark(objective=-scores[-1], n_updates=n_updates, state=state, end=end)

    def _turn(
        self, number: int, turn: int, alpha: Values, *, n_lacking: int = 0, anew: bool = False
    ) -> list[Task[Argument]]:
        tasks: list[Task[Argument]] = []
        for block in range(self.n_blocks):
            bucket = (block * (self.staleness + 1) + turn) % self.n_buckets
            takes: dict[str, Rows] = {"words": self._rows(bucket), "sums": slice(0, len(alpha))}
            if anew:
                takes["topics"] = self._kept(block)
            argument = Sample(number, bucket, alpha, self.checksum, n_lacking)
            tasks.append(Task(block=block, argument=argument, takes=takes))
        return tasks

    def _keep(self, alpha: Values) -> list[Task[Argument]]:
        return [
            Task(
                block=block,
                argument=Keep(None if block else alpha),
                takes={"topics": self._kept(block)},
            )
            for block in range(self.n_blocks)
        ]

    def _rows(self, bucket: int) -> "slice[int, int, None]":
        start, stop = self._starts[bucket : bucket + 2] * len(self.alpha)
        return slice(int(start), int(stop))

    def _kept(self, block: int) -> "slice[int, int, None]":
        return slice(int(self._bounds[block]), int(self._bounds[block + 1]))

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

    def _end(self, learned: Learned) -> Reason | None:
        held_out, scores = [score for _, score in learned.held_out_scores], learned.scores
        if len(held_out) > self.patience:
            best = max(held_out[: -self.patience])
            if max(held_out[-self.patience :]) <= best:
                return Reason.HELD_OUT
        last, before = scores[-_WINDOW:], scores[-2 * _WINDOW : -_WINDOW]
        if len(before) == _WINDOW and sum(last) - sum(before) <= self.tol * _WINDOW:
            return Reason.CONVERGED_VALUE
        return Reason.MAX_ITERATIONS if len(scores) >= self.max_iter else None

    @override
    def push(self, block: Block, argument: Argument, taken: Mapping[str, Values]) -> Pushed[Report]:
        match argument:
            case Sample():
                if argument.checksum != self.checksum:
                    raise SettingError(
                        "counts or held_out are others here: give all hosts the same"
                    )
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
            case Keep(alpha):
                return self._keep_topics(block, alpha, taken["topics"])

    def _keep_topics(self, block: Block, alpha: Values | None, before: Values) -> Pushed[Report]:
        numbers = packed_topics(block.topics, len(self.alpha))
        adds: dict[str, tuple[Rows, Values]] = {"topics": (block.kept, numbers - before)}
        if alpha is not None:
            adds["priors"] = slice(0, len(alpha)), np.stack([alpha, np.ones(len(alpha))], axis=1)
        return Pushed(adds=adds, report=np.zeros(2))

    def _sample(
        self, block: Block, argument: Sample, taken: Mapping[str, Values]
    ) -> Pushed[Report]:
        bucket, n_topics = argument.bucket, len(argument.alpha)
        if "topics" in taken:
            self._begin_anew(block, taken["topics"], is_first=not argument.number)
        some = slice(*block.buckets[bucket : bucket + 2])
        tokens, topics = block.tokens[some], block.topics[some]
        draws = uniforms(block.keys[some], argument.number)
        before = taken["words"].reshape(-1, n_topics)
        words = np.zeros((len(before), self._width), np.int32)
        words[:, :n_topics] = before
        sums = np.zeros(self._width, np.int64)
        lacking = [*block.changes][len(block.changes) - argument.n_lacking :]
        sums[:n_topics] = sums_before = sum(lacking, taken["sums"])
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
        changes = sums[:n_topics] - sums_before
        block.changes.append(changes)
        others = np.log(np.maximum(block.lengths - 1, 0) + argument.alpha.sum())
        n_of = np.bincount(tokens[:, 1], minlength=len(others))
        score = np.log(weights).sum(dtype=np.float64) - n_of @ others
        of_words: tuple[Rows, Values]
        of_words = self._rows(bucket), (words[:, :n_topics] - before).ravel()
        changed = np.flatnonzero(of_words[1])
        if _FEW * len(changed) < before.size:
            of_words = changed + self._rows(bucket).start, of_words[1][changed]
        return Pushed(
            adds={"words": of_words, "sums": (slice(0, n_topics), changes)},
            report=np.array([score, len(tokens)]),
        )

    def _begin_anew(self, block: Block, numbers: Values, *, is_first: bool) -> None:
        block.topics = unpacked_topics(numbers, len(self.alpha), len(block.tokens))
        places = block.tokens[:, 1].astype(np.int64) * self._width + block.topics
        found = np.bincount(places, minlength=len(block.lengths) * self._width)
        found *= not is_first
        block.document_topics = found.reshape(-1, self._width).astype(np.int32)

    def word_weights(self, tables: Mapping[str, Values]) -> Values:
        """Return the probability of each word in each topic: (n_words, n_topics)."""
        counts = tables["words"].reshape(len(self.row_of), -1)
        weights = (counts + self.beta) / (tables["sums"] + self.beta * len(self.row_of))
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
        staleness: Turns, 0 to 8, that may be at work besides the oldest: in a job a worker goes on
            while others are not done. Another one is another sample; counts of words are exact.

    Attributes:
        components_: (n_components, n_features): tokens of each word in each topic, plus the prior.
        doc_topic_prior_: (n_components,)
        n_iter_: Passes made.
        scores_: After each pass: log-likelihood per token, each given all others.
        held_out_scores_: Passes, and `score` of the held-out documents then.
    """

    _takes: ClassVar[Mapping[str, bool]] = {"positive_only": True}

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
        staleness: int = 0,
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
        self.staleness = staleness

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
            staleness=self.staleness,
        )
        if self.staleness > STALENESS_MAX:
            raise SettingError(f"{user}: staleness is {self.staleness}; use 0 to {STALENESS_MAX}")
        learns = cast("object", self.learn_doc_topic_prior)
        if not isinstance(learns, bool | np.bool_):
            raise SettingError(f"{user}: learn_doc_topic_prior is {learns!r}; use true or false")
        priors = [self.doc_topic_prior, self.topic_word_prior]
        alpha, beta = (1 / self.n_components if one is None else one for one in priors)
        check_numbers(user, doc_topic_prior=alpha, topic_word_prior=beta)
        for name, value in {"doc_topic_prior": alpha, "topic_word_prior": beta}.items():
            if not _PRIOR_MIN <= value <= _PRIOR_MAX:
                raise SettingError(
                    f"{user}: {name} is {value}; use {_PRIOR_MIN:g} to {_PRIOR_MAX:g}"
                )
        counts = checked_counts(X, user=user)
        if not counts.nnz:
            raise SettingError(f"{user}: X has no words; give documents with at least one")
        n_documents, n_words = counts.shape
        per_block = self.staleness + 1  # buckets of words
        most = n_words // per_block if self.n_blocks is None else n_words
        n_blocks = blocks_of(user, self.n_blocks, documents=n_documents, words=max(most, 1))
        if self.n_blocks is not None:
            check_workers(user, self.workers, n_blocks)
        if n_blocks * per_block > n_words:
            raise SettingError(
                f"{user}: n_blocks is {n_blocks} and staleness {self.staleness}, which makes "
                f"{n_blocks * per_block} buckets, and X has {n_words} words; use less of either"
            )
        if held_out is None:
            evaluated = counts[:0]
        else:
            evaluated = checked_counts(held_out, user=user, n_words=n_words)
        n_given = given_half(evaluated, seed=int(self.random_state)).sum()
        if held_out is not None and n_given == evaluated.sum():
            raise SettingError(f"{user}: held_out has too few words to score; give more")
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
            staleness=self.staleness,
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
        sampler()  # compiled before threads ask for it
        learned, tables = run(program, workers=self.workers)
        self._take(tables)
        self.n_iter_ = len(learned.scores)
        self.scores_ = learned.scores
        self.held_out_scores_ = learned.held_out_scores
        return self

    @classmethod
    def from_model(cls, path: "str | os.PathLike[str]") -> "LatentDirichletAllocation":
        """Return the topics that a job has found, by its model.safetensors.

        Raises:
            SettingError: the file cannot be read, or is of another model.
        """
        try:
            tables = load_file(Path(path))
        except (OSError, SafetensorError) as error:
            raise SettingError(f"{path} cannot be read: {error}") from None
        if not {"words", "row_of", "priors"} <= tables.keys():
            raise SettingError(f"{path} has no topics: give the model of a job that samples them")
        model = cls(len(tables["priors"]) - 1, topic_word_prior=float(tables["priors"][-1, 0]))
        model._take(tables)
        return model

    def _take(self, tables: Mapping[str, Values]) -> None:
        rows = tables["row_of"].astype(np.int64)
        words = tables["words"].reshape(len(rows), -1)
        self.components_ = words[rows].T + tables["priors"][-1, 0]
        self.doc_topic_prior_ = tables["priors"][:-1, 0]
        self.n_features_in_ = len(rows)

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
        matrix = checked_counts(counts, user=user, n_words=self.n_features_in_)
        weights = self.components_ / self.components_.sum(axis=1, keepdims=True)
        return matrix, np.ascontiguousarray(weights.T)


def checked_counts(counts: object, *, user: str, n_words: int | None = None) -> Matrix:
    matrix = checked_entries(counts, user=user)
    if n_words is not None:
        check_width(matrix.shape[1], n_words, user, use=": use the same vocabulary")
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
