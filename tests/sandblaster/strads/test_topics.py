"""Topics: the sampler against the posterior, the rotation drawn, the estimator."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import gammaln
from sklearn.base import clone
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.pipeline import make_pipeline

import sandblaster
from distbelief.core.errors import SettingError
from distbelief.parameter_server.rows import add_up
from distbelief.protocol.vector_commands import Pull
from sandblaster.optimizers.termination import Reason
from sandblaster.strads import topic_kernel
from sandblaster.strads.documents import completion, fold_in, token_keys, uniforms
from sandblaster.strads.program import Flight, Mark, Task, packed, run, unpacked
from sandblaster.strads.topics import (
    Argument,
    Block,
    Learned,
    Sample,
    Topics,
    packed_topics,
    topics_per_number,
    unpacked_topics,
)


RESHAPE = "Reshape your data: X.reshape(-1, 1) is one column, X.reshape(1, -1) one sample"


@pytest.fixture(autouse=True)
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing: numpy gives the same bits, as one test claims."""
    monkeypatch.setattr("sandblaster.strads.topics.sampler", lambda: topic_kernel.sample_in_numpy)


def matrix(counts: object) -> "sparse.csr_array[np.int64]":
    if isinstance(counts, sparse.csr_array):
        return counts
    return sparse.csr_array(np.asarray(counts, np.int64))


def corpus(
    *, n_documents: int = 60, n_words: int = 40, n_topics: int = 4, length: int = 30, seed: int = 0
) -> "sparse.csr_array[np.int64]":
    """Documents of a few topics with words as frequent as Zipf's, each topic of its own words."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((n_topics, n_words))
    for word in range(n_words):
        weights[word % n_topics, word] = 1 / (word + 2)
    weights += 1e-3
    weights /= weights.sum(axis=1, keepdims=True)
    shares = rng.dirichlet(np.full(n_topics, 0.1), n_documents)
    return matrix([rng.multinomial(length, share @ weights) for share in shares])


def topics(counts: object, n_topics: int, **options: object) -> Topics:
    rest: dict[str, object] = {
        "alpha": np.full(n_topics, 0.5),
        "beta": 0.3,
        "seed": 0,
        "n_blocks": 1,
        "max_iter": 1,
        "tol": -np.inf,
        "learn_alpha": False,
        "held_out": matrix(counts)[:0],
        "evaluate_every": 1,
        "patience": 1,
    }
    return Topics(counts=matrix(counts), **{**rest, **options})  # type: ignore[arg-type]  # by name


def joint(words: Sequence[int], documents: Sequence[int], z: Sequence[int], n_words: int) -> float:
    """log p(words, z) with 2 topics, alpha 0.5, beta 0.3: Griffiths and Steyvers, equations 2, 3"""
    of_word, of_document = np.zeros((n_words, 2)), np.zeros((max(documents) + 1, 2))
    for word, document, topic in zip(words, documents, z, strict=True):
        of_word[word, topic] += 1
        of_document[document, topic] += 1
    total = gammaln(of_word + 0.3).sum() - gammaln(of_word.sum(axis=0) + 0.3 * n_words).sum()
    total += gammaln(of_document + 0.5).sum() - gammaln(of_document.sum(axis=1) + 1).sum()
    return float(total)


def test_st4_samples_have_the_frequencies_of_the_posterior_by_enumeration() -> None:
    counts = [[2, 1, 0], [0, 1, 1]]
    words, documents = [0, 0, 1, 1, 2], [0, 0, 0, 1, 1]
    states = list(product(range(2), repeat=5))
    logs = np.array([joint(words, documents, z, 3) for z in states])
    exact = np.exp(logs - logs.max())
    exact /= exact.sum()
    program = topics(counts, 2)
    block = program.load(0)
    tables = {name: values.copy() for name, values in program.tables.items()}
    seen = np.zeros(len(states))
    n = 4_000
    # Tokens of one bucket are in the order of documents, then words: as listed above.
    for number in range(n + 10):
        taken = {name: tables[name] for name in ("words", "sums")}
        pushed = program.push(block, Sample(number, 0, program.alpha, program.checksum), taken)
        for name, (rows, sums) in pushed.adds.items():
            tables[name][rows] += sums
        if number >= 10:
            seen[int("".join(map(str, block.topics)), 2)] += 1
    # Samples in a row are alike: the error is that of about a fifth as many independent ones.
    errors = np.abs(seen / n - exact)
    assert (errors <= 4.5 * np.sqrt(exact * (1 - exact) / (n / 5))).all()


def random_tokens(n_topics: int) -> "dict[str, NDArray[np.generic]]":
    rng = np.random.default_rng(1)
    width = -(-n_topics // topic_kernel.LANES) * topic_kernel.LANES
    tokens = np.stack([rng.integers(0, 7, 400), rng.integers(0, 9, 400)], axis=1).astype(np.int32)
    topics = rng.integers(0, n_topics, 400).astype(np.int32)
    word_topics, document_topics = (np.zeros((n, width), np.int32) for n in (7, 9))
    np.add.at(word_topics, (tokens[:, 0], topics), 1)
    np.add.at(document_topics, (tokens[:, 1], topics), 1)
    sums = np.bincount(topics, minlength=width)
    alpha, inverses = np.zeros((2, width), np.float32)
    alpha[:n_topics] = rng.random(n_topics) + 0.01
    inverses[:n_topics] = 1 / (sums[:n_topics] + 0.7)
    return {
        "tokens": tokens,
        "topics": topics,
        "uniforms": rng.random(400),
        "weights": np.zeros(400, np.float32),
        "word_topics": word_topics,
        "document_topics": document_topics,
        "topic_sums": sums,
        "inverses": inverses,
        "alpha": alpha,
    }


@pytest.mark.parametrize("n_topics", [1, 3, 16, 33])
def test_kernel_and_numpy_draw_the_same_bits(n_topics: int) -> None:
    kernels = [topic_kernel.sample, topic_kernel.sample_in_numpy]
    compiled = topic_kernel.sampler()  # numba's, where it is installed
    results = []
    for kernel in [*kernels, compiled]:
        arrays = random_tokens(n_topics)
        for _ in range(3):
            kernel(*arrays.values(), *[np.float32(0.1), 0.7])  # type: ignore[arg-type]  # by order
        results.append(arrays)
    for other in results[1:]:
        for name, values in results[0].items():
            np.testing.assert_array_equal(values, other[name])
    assert results[0]["topics"].max() < n_topics  # none beyond the last


def deals(step: Sequence[Task[Argument]] | Flight[Argument] | Mark) -> Sequence[Task[Argument]]:
    assert not isinstance(step, Flight | Mark)
    return step


def test_st4_each_turn_deals_every_bucket_once_and_a_pass_every_pair() -> None:
    program = topics(corpus(), 4, n_blocks=3)
    steps = program.schedule()
    rounds = [next(steps), *(steps.send([np.ones(2)] * 3) for _ in range(5))]
    a, b, c = slice(0, 4 * 14), slice(4 * 14, 4 * 27), slice(4 * 27, 4 * 40)
    assert [[task.takes["words"] for task in deals(tasks)] for tasks in rounds] == [
        [a, b, c],
        [b, c, a],
        [c, a, b],
    ] * 2  # pass 0, and one more
    kept = deals(steps.send([np.ones(2)] * 3))
    assert [task.argument.alpha is None for task in kept] == [False, True, True]
    mark = steps.send([np.zeros(2)] * 3)
    assert isinstance(mark, Mark)
    assert mark.end is Reason.MAX_ITERATIONS


def test_st4_words_are_dealt_in_turn_by_falling_frequency() -> None:
    counts = corpus()
    program = topics(counts, 4, n_blocks=3)
    ranked = np.argsort(-counts.sum(axis=0), kind="stable")
    assert program.row_of[ranked[:6]].tolist() == [0, 14, 27, 1, 15, 28]


def test_st4_tables_count_every_token_after_each_round_and_match_its_blocks() -> None:
    counts = corpus()
    program = topics(counts, 4, n_blocks=3, max_iter=2)
    blocks: dict[int, Block] = {}

    class Kept:
        n_blocks, tables = program.n_blocks, program.tables
        types, keeps_state = program.types, program.keeps_state
        bounds, checksum, data = program.bounds, program.checksum, program.data
        schedule, push, pulls = program.schedule, program.push, program.pulls

        def load(self, block: int) -> Block:
            blocks[block] = program.load(block)
            return blocks[block]

    _, tables = run(Kept())
    words = tables["words"].reshape(-1, 4)
    np.testing.assert_array_equal(words.sum(axis=0), tables["sums"])
    np.testing.assert_array_equal(words.sum(axis=1)[program.row_of], counts.sum(axis=0))
    of_documents = np.concatenate([block.document_topics for block in blocks.values()])
    np.testing.assert_array_equal(of_documents.sum(axis=1), counts.sum(axis=1))
    np.testing.assert_array_equal(of_documents[:, :4].sum(axis=0), tables["sums"])


def test_st4_tasks_that_change_few_counts_add_only_those() -> None:
    program = topics(corpus(), 4, n_blocks=3)
    block, sums = program.load(0), np.zeros(4)
    n_tokens = len(block.tokens)
    bounds = block.buckets[:2].copy()
    for n in (n_tokens, 3):  # of bucket 0: all, and three
        block.buckets[:2] = bounds[0], min(bounds[1], bounds[0] + n)
        taken = {"words": np.zeros(4 * 14), "sums": sums}
        pushed = program.push(block, Sample(0, 0, program.alpha, program.checksum), taken)
        rows, values = pushed.adds["words"]
        assert isinstance(rows, slice) == (n == n_tokens)
        table = np.zeros(4 * 40)
        table[rows] = values
        own = block.tokens[: block.buckets[1]], block.topics[: block.buckets[1]]
        expected = np.zeros((40, 4))
        np.add.at(expected, (own[0][:, 0], own[1]), 1)
        np.testing.assert_array_equal(table, expected.ravel())


def test_st4_same_bits_for_1_2_4_8_workers_and_again() -> None:
    counts = corpus()
    tables = [
        run(topics(counts, 4, n_blocks=8, max_iter=4), workers=workers)[1]["words"]
        for workers in (1, 1, 2, 4, 8)
    ]
    for other in tables[1:]:
        np.testing.assert_array_equal(tables[0], other)


@given(
    n_topics=st.one_of(st.integers(1, 40), st.sampled_from([2**13, 2**13 + 1, 2**20])),
    n=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_packed_topics_come_back_and_changes_of_them_are_exact(
    n_topics: int, n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before, after = rng.integers(0, n_topics, (2, n)).astype(np.int32)
    numbers, others = packed_topics(before, n_topics), packed_topics(after, n_topics)
    assert len(numbers) == -(-n // topics_per_number(n_topics))
    np.testing.assert_array_equal(unpacked_topics(numbers, n_topics, n), before)
    np.testing.assert_array_equal(numbers + (others - numbers), others)
    largest = packed_topics(np.full(60, n_topics - 1, np.int32), n_topics)
    assert largest.max() < 2**53


def test_a_hundred_topics_take_little_more_than_a_byte() -> None:
    assert [topics_per_number(n) for n in (1, 2, 100, 1024, 2**26, 2**27)] == [53, 53, 7, 5, 2, 1]


def resumed(
    program: Topics, tables: "dict[str, NDArray[np.float64]]", state: object
) -> "list[tuple[Mark, dict[str, NDArray[np.float64]]]]":
    """Run from a mark, with blocks as they are loaded; return all marks, and the tables then."""
    blocks = [program.load(block) for block in range(program.n_blocks)]
    steps, marks, reports = program.schedule(state), [], list[NDArray[np.float64]]()
    step = next(steps)
    while True:
        if isinstance(step, Mark):
            marks.append((step, {name: values.copy() for name, values in tables.items()}))
            if step.end is not None:
                return marks
        else:
            pushed = [
                program.push(
                    blocks[task.block],
                    task.argument,
                    {name: tables[name][rows] for name, rows in task.takes.items()},
                )
                for task in deals(step)
            ]
            for name, table in tables.items():
                adds = [one.adds[name] for one in pushed if name in one.adds]
                if adds:
                    add_up(table, adds, program.pulls.get(name, Pull()))
            reports = [one.report for one in pushed]
        step = steps.send(reports)


def test_from_any_mark_and_after_the_end_it_goes_on_with_the_same_bits() -> None:
    counts = np.concatenate([corpus(n_documents=9).toarray(), np.zeros((2, 40), int)])
    options: dict[str, object] = {"n_blocks": 3, "learn_alpha": True, "evaluate_every": 2}
    options |= {"held_out": corpus(n_documents=3, seed=1), "patience": 99}
    program = topics(counts, 4, max_iter=11, **options)
    marks = resumed(program, {name: t.copy() for name, t in program.tables.items()}, None)
    assert [mark.state is not None for mark, _ in marks] == [n in {4, 8, 11} for n in range(1, 12)]
    last, expected = marks[-1]
    assert last.n_updates == 11 * counts.sum()
    _, tables = run(program)
    learned = None
    for n_before in (4, 8, 6):
        if n_before == 6:  # a bound that was raised later
            shorter = topics(counts, 4, max_iter=6, **options)
            marks = resumed(shorter, {n: t.copy() for n, t in program.tables.items()}, None)
        mark, then = marks[n_before - 1]
        state = unpacked(packed(mark.state), Learned)
        others = resumed(topics(counts, 4, max_iter=11, **options), then, state)
        for name, values in expected.items():
            assert values.tobytes() == others[-1][1][name].tobytes() == tables[name].tobytes()
        learned = others[-1][0].state
        assert isinstance(learned, Learned)
        assert isinstance(last.state, Learned)
        assert list(learned.scores) == list(last.state.scores)
        assert list(learned.held_out_scores) == list(last.state.held_out_scores)
        np.testing.assert_array_equal(expected["priors"][:-1, 0], learned.alpha)


@pytest.mark.parametrize("name", ["counts", "held_out"])
def test_a_host_with_other_documents_is_refused(name: str) -> None:
    """Its draws changed the counts of words that it has, in the rows of others."""
    given = {"counts": corpus(), "held_out": corpus(seed=1)}
    changed = given[name].copy()
    changed.data[0] += 1
    program, other = (topics(n_topics=4, **one) for one in (given, {**given, name: changed}))
    (task, *_) = program._turn(0, 0, program.alpha, anew=True)
    with pytest.raises(SettingError, match="counts or held_out are others here: give all hosts"):
        other.push(other.load(0), task.argument, {})


def naive(
    counts: "sparse.csr_array[np.int64]", n_topics: int, n_passes: int, seed: int
) -> NDArray[np.float64]:
    """Collapsed Gibbs sampling as it is written down; the words' weights, (n_words, n_topics)."""
    rng = np.random.default_rng(seed)
    dense = counts.toarray()
    documents, words = (np.repeat(side, dense[dense > 0]) for side in np.nonzero(dense))
    z = rng.integers(0, n_topics, len(words))
    of_word, of_document = np.zeros((dense.shape[1], n_topics)), np.zeros((len(dense), n_topics))
    np.add.at(of_word, (words, z), 1)
    np.add.at(of_document, (documents, z), 1)
    for _ in range(n_passes):
        for place, (word, document) in enumerate(zip(words, documents, strict=True)):
            of_word[word, z[place]] -= 1
            of_document[document, z[place]] -= 1
            weights = (of_word[word] + 0.3) * (of_document[document] + 0.5)
            weights /= of_word.sum(axis=0) + 0.3 * len(of_word)
            z[place] = rng.choice(n_topics, p=weights / weights.sum())
            of_word[word, z[place]] += 1
            of_document[document, z[place]] += 1
    return np.asarray((of_word + 0.3) / (of_word.sum(axis=0) + 0.3 * len(of_word)))


def test_st4_rotation_predicts_held_out_words_as_well_as_a_naive_sampler() -> None:
    counts = corpus(n_documents=40)
    held_out = corpus(n_documents=100, seed=1)
    alpha = np.full(4, 0.5)
    rotated: list[float] = []
    in_flight: list[float] = []
    plain: list[float] = []
    for seed in range(3):  # the best of some, since a chain may stay in a lesser mode for long
        for scores, staleness in ((rotated, 0), (in_flight, 2)):
            program = topics(counts, 4, n_blocks=4, max_iter=15, seed=seed, staleness=staleness)
            weights = program.word_weights(run(program)[1])
            total, n_tokens = completion(held_out, weights, alpha)
            scores.append(total / n_tokens)
        total, n_tokens = completion(held_out, naive(counts, 4, 15, seed), alpha)
        plain.append(total / n_tokens)
    assert max(rotated) == pytest.approx(max(plain), rel=0.01)
    assert max(in_flight) == pytest.approx(max(plain), rel=0.01)


def test_random_numbers_are_of_seed_pass_document_and_position_only() -> None:
    lengths = np.array([3, 0, 5, 2])
    whole = token_keys(lengths, 7, 1)
    np.testing.assert_array_equal(whole[3:], token_keys(lengths[2:], 9, 1))
    assert len(set(whole.tolist())) == 10
    assert not set(whole.tolist()) & set(token_keys(lengths, 7, 2).tolist())
    numbers = np.concatenate(
        [uniforms(token_keys(np.full(300, 300), 0, 0), number) for number in range(3)]
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, 100, (0, 1))[0] / len(numbers)
    assert np.abs(shares - 0.01).max() < 5 * np.sqrt(0.01 / len(numbers))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(numbers[:90_000], numbers[90_000:180_000])[0, 1]) < 0.02


def test_fold_in_finds_the_maximum_of_the_posterior() -> None:
    weights = np.array([[0.7, 0.1], [0.2, 0.2], [0.1, 0.7]])
    alpha = np.array([0.5, 0.5])
    shares = fold_in(matrix([[5, 2, 1], [0, 0, 0]]), weights, alpha)
    grid = np.linspace(0.001, 0.999, 999)
    both = np.stack([grid, 1 - grid])
    log = np.array([5, 2, 1]) @ np.log(weights @ both) + alpha @ np.log(both)
    assert shares[0, 0] == pytest.approx(grid[log.argmax()], abs=2e-3)
    np.testing.assert_array_equal(shares[1], [0.5, 0.5])


def estimator(**options: object) -> "sandblaster.LatentDirichletAllocation":
    rest: dict[str, object] = {"n_components": 4, "n_blocks": 2, "max_iter": 15}
    rest |= {"topic_word_prior": 0.05, **options}
    return sandblaster.LatentDirichletAllocation(**rest)  # type: ignore[arg-type]  # by name


def test_estimator_finds_the_topics_of_separate_words() -> None:
    model = estimator(doc_topic_prior=0.1).fit(corpus())
    assert model.components_.shape == (4, 40)
    found = {tuple(np.sort(np.argsort(-topic)[:3] % 4)) for topic in model.components_}
    assert found == {(k, k, k) for k in range(4)}
    shares = model.transform(corpus(seed=1))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert (shares.max(axis=1) > 0.9).mean() > 0.5
    assert model.perplexity(corpus(seed=1)) < 0.5 * 40
    assert model.score(corpus(seed=1)) == -np.log(model.perplexity(corpus(seed=1)))


def test_dense_sparse_and_unsorted_counts_give_the_same_bits() -> None:
    counts = corpus()
    entries = counts.tocoo()
    twice = [np.concatenate([side, side[::-1]]) for side in entries.coords]
    halves = np.concatenate([entries.data - 1, np.ones_like(entries.data)])
    split = sparse.coo_array((halves.astype(np.int8), twice), shape=counts.shape)
    expected = estimator(max_iter=2).fit(counts).components_
    for other in (counts.toarray(), counts.toarray().astype(float), split, counts.tocsc()):
        np.testing.assert_array_equal(estimator(max_iter=2).fit(other).components_, expected)


def test_counts_that_are_given_in_parts_do_not_overflow() -> None:
    parts = sparse.coo_array((np.array([100, 100, 1], np.int8), ([0, 0, 0], [0, 0, 1])))
    assert estimator(n_blocks=1).program(parts).counts.toarray().tolist() == [[200, 1]]


def test_documents_without_words_change_nothing_but_their_own_row() -> None:
    counts = corpus().toarray()
    counts[-1] = 0
    model = estimator(max_iter=2).fit(counts)
    assert model.components_.sum() == pytest.approx(counts.sum() + 4 * 40 * 0.05)
    np.testing.assert_allclose(model.transform(counts)[-1], 0.25)


def test_few_documents_or_words_are_as_many_blocks() -> None:
    assert sandblaster.LatentDirichletAllocation(2).program(np.ones((9, 3))).n_blocks == 3
    assert sandblaster.LatentDirichletAllocation(2).program(np.ones((99, 99))).n_blocks == 8


def test_sampling_ends_when_scores_rise_no_more() -> None:
    model = estimator(max_iter=150, tol=0.01).fit(corpus())
    assert 10 < model.n_iter_ < 150
    assert len(model.scores_) == model.n_iter_


def test_sampling_ends_when_held_out_documents_score_no_better() -> None:
    model = estimator(max_iter=150, tol=-1, evaluate_every=3, patience=2)
    model.fit(corpus(), held_out=corpus(seed=1))
    numbers, scores = zip(*model.held_out_scores_, strict=True)
    assert numbers == tuple(range(3, model.n_iter_ + 1, 3))
    assert max(scores[-2:]) <= max(scores[:-2])
    assert scores[-1] == pytest.approx(model.score(corpus(seed=1)))


def test_the_learned_prior_is_the_most_likely_one() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet([2.0, 0.5, 0.1], 60)
    numbers = np.array([rng.multinomial(25, share) for share in shares], np.int32)
    program = topics(np.full((60, 5), 5), 3)
    block = program.load(0)
    block.document_topics[:, :3] = numbers

    def score(alpha: NDArray[np.float64]) -> float:
        parts = gammaln(numbers + alpha).sum() - 60 * gammaln(alpha).sum()
        return float(parts + 60 * (gammaln(alpha.sum()) - gammaln(alpha.sum() + 25)))

    alpha = program.alpha
    for _ in range(30):
        steps, reports = program._fitted(alpha), None
        while True:
            try:
                tasks = next(steps) if reports is None else steps.send(reports)
            except StopIteration as end:
                alpha = end.value
                break
            reports = [program.push(block, task.argument, {}).report for task in deals(tasks)]
    for topic in range(3):
        for factor in (0.9, 1.1):
            other = alpha.copy()
            other[topic] *= factor
            assert score(other) < score(alpha)


def test_an_estimator_learns_its_prior() -> None:
    model = estimator(max_iter=10, learn_doc_topic_prior=True).fit(corpus())
    assert len(set(model.doc_topic_prior_)) == 4


def test_it_is_a_step_of_scikit_learns_pipelines() -> None:
    texts = ["ring ring shard", "word topic word", "shard ring", "topic topic word"]
    model = clone(estimator(n_components=2, doc_topic_prior=0.1, max_iter=50))
    shares = make_pipeline(CountVectorizer(), model).fit_transform(texts)
    assert np.argmax(shares, axis=1).tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_parameters_are_those_of_init() -> None:
    model = sandblaster.LatentDirichletAllocation(7, tol=0.1)
    assert model.get_params()["n_components"] == 7
    assert model.set_params(max_iter=3).get_params()["max_iter"] == 3
    assert "n_components=7" in repr(model)
    with pytest.raises(SettingError, match=r"no parameter 'max_iters': .*'max_iter'"):
        model.set_params(max_iters=3)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([[1, -2]], {}, "a count of X, -2.0, is negative; give counts of words"),
        ([[1, 0.5]], {}, "a count of X, 0.5, is no whole number; give counts of words"),
        ([[1, 3e9]], {}, "a count of X, 3000000000.0, is too large; give counts of words"),
        ([[1, np.nan]], {}, "X contains NaN or infinity; leave these entries out"),
        ([1, 2], {}, f"X has 1 dimensions, not 2. {RESHAPE}"),
        ([["a"]], {}, "X is of <U1; use numbers"),
        (
            np.zeros((0, 3)),
            {},
            "X has 0 sample(s) (shape=(0, 3)) while a minimum of 1 is required.",
        ),
        (np.zeros((3, 3)), {}, "X has no words; give documents with at least one"),
        (np.ones((3, 9)), {"n_blocks": 4}, "n_blocks is 4, X has 3 documents; use n_blocks=3"),
        (np.ones((9, 3)), {"n_blocks": 4}, "n_blocks is 4, X has 3 words; use n_blocks=3"),
        ([[1]], {"n_components": 0}, "n_components is 0; use a whole number, 1 or more"),
        ([[1]], {"max_iter": 2.5}, "max_iter is 2.5; use a whole number, 1 or more"),
        ([[1]], {"random_state": -1}, "random_state is -1; use a whole number, 0 or more"),
        ([[1]], {"topic_word_prior": 0}, "topic_word_prior is 0; use a number above 0"),
        (
            [[1]],
            {"learn_doc_topic_prior": "no"},
            "learn_doc_topic_prior is 'no'; use true or false",
        ),
        ([[1]], {"doc_topic_prior": 1e-9}, "doc_topic_prior is 1e-09; use 1e-06 to 1e+06"),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    counts: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingError) as refused:
        estimator(**{"n_blocks": 1, **options}).fit(counts)
    assert str(refused.value) == f"LatentDirichletAllocation: {message}"


def test_what_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has no topics yet; call fit first"):
        estimator().transform([[1]])
    model = estimator(max_iter=1).fit(corpus())
    with pytest.raises(SettingError, match=r"X has 3 features, .* 40 .*: use the same vocabulary"):
        model.transform(np.ones((2, 3)))
    with pytest.raises(SettingError, match="too few words to score; give more"):
        model.score(np.zeros((2, 40)))
    with pytest.raises(SettingError, match="held_out has too few words to score; give more"):
        estimator(max_iter=10).fit(corpus(), held_out=np.zeros((2, 40)))
