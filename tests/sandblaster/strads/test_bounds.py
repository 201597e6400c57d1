"""A run that has ended goes on with other bounds; and what is sent stays small."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np
import pytest
from scipy import sparse

from distbelief.parameter_server.rows import Values
from sandblaster import LatentDirichletAllocation, MatrixFactorization
from sandblaster.optimizers import base
from sandblaster.optimizers.termination import Reason
from sandblaster.strads import descent
from sandblaster.strads.columns import Matrix, checked_matrix
from sandblaster.strads.descent import Descent
from sandblaster.strads.losses import Squares
from sandblaster.strads.method import AnyProgram, Scheduled, Span, task_content
from sandblaster.strads.program import Mark, Pushed, Steps, Task, packed, run, unpacked


Bounds = tuple[int, float]
Make = Callable[[int, float], AnyProgram]

RNG = np.random.default_rng(5)
X = RNG.normal(size=(80, 60)) + 0.5 * RNG.normal(size=(80, 1))
Y = X[:, ::5].sum(axis=1) + 0.1 * RNG.normal(size=80)
RATINGS = sparse.csr_array(np.where(RNG.random((30, 20)) < 0.4, RNG.normal(size=(30, 20)), 0.0))


def lasso(max_iter: int, tol: float, n_blocks: int = 3) -> AnyProgram:
    x = checked_matrix(X, user="test")
    return Descent(
        x, Y, Squares(), alphas=[0.05], n_blocks=n_blocks, tolerance=tol, max_iterations=max_iter
    )


def factors(max_iter: int, tol: float) -> AnyProgram:
    model = MatrixFactorization(3, biases=True, max_iter=max_iter, tol=tol, n_blocks=4)
    return model.program(RATINGS)


def ended(program: AnyProgram, state: bytes | None = None) -> tuple[Mapping[str, Values], Mark]:
    """Run a program, from a state; return the tables, and the mark at which it has ended."""
    whole, marks = program.schedule, list[Mark]()

    def schedule() -> Steps[object, object, object]:
        assert program.types is not None
        at = None if state is None else unpacked(state, program.types.state)
        steps = whole(at)
        step = next(steps)
        while True:
            if isinstance(step, Mark):
                marks.append(step)
            reply = yield step
            try:
                step = steps.send(reply)
            except StopIteration as end:
                return cast("object", end.value)

    program.schedule = schedule  # type: ignore[method-assign, assignment]
    _, tables = run(program)
    return tables, marks[-1]


def gone_on(few: AnyProgram, more: AnyProgram) -> tuple[Mapping[str, Values], Mark]:
    tables, mark = ended(few)
    more.tables = tables
    return ended(more, packed(mark.state))


@pytest.mark.parametrize(
    ("make", "few", "more"),
    [
        (lasso, (3, 1e-9), (50, 1e-9)),  # a higher bound
        (lasso, (3, 1e-9), (4, 1e-9)),  # one pass more
        (lasso, (50, 1e-3), (50, 1e-9)),  # a smaller tolerance
        (factors, (4, -1.0), (9, -1.0)),
        (factors, (8, -1.0), (12, -1.0)),
    ],
)
def test_other_bounds_go_on_with_the_bits_of_one_run(make: Make, few: Bounds, more: Bounds) -> None:
    expected, end = ended(make(*more))
    found, mark = gone_on(make(*few), make(*more))
    assert {name: rows.tobytes() for name, rows in found.items()} == {
        name: rows.tobytes() for name, rows in expected.items()
    }
    assert (mark.end, mark.objective, mark.n_updates) == (end.end, end.objective, end.n_updates)


def test_factors_go_on_after_any_pass() -> None:
    """They begin anew there, from tables: the same up to rounding."""
    expected, _ = ended(factors(9, -1.0))
    found, mark = gone_on(factors(6, -1.0), factors(9, -1.0))
    assert mark.end is Reason.MAX_ITERATIONS
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("make", "few"), [(lasso, (3, 1e-9)), (factors, (6, -1.0))])
def test_the_same_bounds_change_nothing(make: Make, few: Bounds) -> None:
    before, _ = ended(make(*few))
    after, _ = gone_on(make(*few), make(*few))
    for name, rows in before.items():
        assert after[name].tobytes() == rows.tobytes()


@pytest.mark.parametrize("make", [partial(lasso, 5, 1e-9), partial(factors, 5, -1.0)])
def test_bounds_are_arguments_of_the_factories(make: Callable[[], AnyProgram]) -> None:
    assert {"max_iter", "tol"} <= {*make().bounds}


HELD_OUT = checked_matrix(X[60:], user="test"), Y[60:]


def path(patience: int, held_out: "tuple[Matrix, Values]" = HELD_OUT) -> Descent:
    x = checked_matrix(X[:60], user="test")
    shares = np.geomspace(1.0, 1e-3, 20).tolist()
    return Descent(
        x, Y[:60], Squares(), alphas=shares, relative=True, n_blocks=3, held_out=held_out,
        patience=patience, keeps_best=True,
    )  # fmt: skip


def test_a_path_that_ran_out_of_patience_goes_on_with_more() -> None:
    """Its tables are those of its best model then: it first returns to the last one."""
    short, _ = ended(path(1))
    assert 1 < np.count_nonzero(short["path"][:, 0]) < 20
    expected, _ = ended(path(20))
    found, mark = gone_on(path(1), path(20))
    assert np.count_nonzero(found["path"][:, 0]) == 20
    assert mark.end is not Reason.HELD_OUT
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-9, atol=1e-12)
    again, mark = gone_on(path(1), path(1))
    assert (mark.end, again["path"].tobytes()) == (Reason.HELD_OUT, short["path"].tobytes())


def test_other_data_have_another_checksum() -> None:
    """A job resumes only with the same: held-out losses were those of the old predictor."""
    x, y = HELD_OUT
    sparse_x = sparse.csc_array(np.eye(20, 60))
    others = [(x, y + 1), (2 * x, y), (sparse_x, y), (sparse.csc_array(np.eye(20, 60, k=1)), y)]
    assert len({path(1, pair).checksum for pair in [HELD_OUT, *others]}) == 5
    few = RATINGS.copy()
    few.data[0] += 1
    shifted = RATINGS[:, ::-1]
    programs: list[AnyProgram] = [
        MatrixFactorization(3).program(one) for one in (RATINGS, few, shifted)
    ]
    programs += [LatentDirichletAllocation(3).program(abs(one) > 0) for one in (RATINGS, shifted)]
    assert len({one.checksum for one in programs}) == 5


def test_a_job_whose_objective_is_not_finite_has_failed() -> None:
    """It said that the number of iterations had reached its bound."""
    program = lasso(3, 1e-9)

    def schedule(_: object = None) -> Steps[object, object, object]:
        yield Mark(objective=float("nan"), n_updates=1, state=None, end=Reason.MAX_ITERATIONS)
        return None

    program.schedule = schedule  # type: ignore[method-assign, assignment]
    steps = Scheduled(program).steps()
    assert isinstance(next(steps), base.IterationDone)
    with pytest.raises(StopIteration) as end:
        steps.send(())
    assert cast("base.Result", end.value.value).reason is Reason.NOT_FINITE


# --- what is sent ---


def test_a_path_returns_to_many_variables_in_several_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = ended(path(1))
    monkeypatch.setattr(descent, "_N_CLOSED", 2)
    parts, _ = ended(path(1))
    assert np.count_nonzero(whole["coefficients"]) > 2
    for name, rows in whole.items():
        np.testing.assert_allclose(parts[name], rows, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n_blocks", [1, 3])
def test_many_variables_of_a_block_take_several_rounds(
    monkeypatch: pytest.MonkeyPatch, n_blocks: int
) -> None:
    expected, end = ended(lasso(80, 1e-9, n_blocks))
    monkeypatch.setattr(descent, "_N_OF_TASK", 5)
    # So many are not compared: one block after the other.
    monkeypatch.setattr(descent, "_N_COMPARED_MAX", 10)
    program = lasso(80, 1e-9, n_blocks)
    counts: list[int] = []
    push = program.push

    def see(block: object, argument: object, taken: Mapping[str, Values]) -> Pushed[object]:
        pushed = push(block, argument, taken)
        sizes = [len(getattr(one, "ids", ())) for one in (argument, pushed.report)]
        counts.append(max(sizes))
        return pushed

    monkeypatch.setattr(program, "push", see)
    found, mark = ended(program)
    assert max(counts) == 5
    assert mark.end is end.end is Reason.CONVERGED_GAP
    assert mark.objective == pytest.approx(end.objective, rel=1e-8)
    np.testing.assert_allclose(found["coefficients"], expected["coefficients"], atol=1e-4)


def test_rows_of_many_runs_are_sent_by_their_ends() -> None:
    ranks = np.arange(100)[:, None] * 1_000_000
    rows = (ranks + np.arange(5000)).ravel()
    task: Task[object] = Task(block=0, argument=None, takes={"rows": rows})
    assert len(task_content(task, {"rows": 100_000_000})) < base.N_BYTES_MAX / 100
    span = Span.of(rows, 100_000_000)
    np.testing.assert_array_equal(span.rows, rows)


@pytest.mark.parametrize("rows", [[], [7], [0, 1, 2], [5, 3, 4], [9, 1, 2, 8], [2, 1, 0]])
def test_any_rows_come_as_they_are(rows: list[int]) -> None:
    given = np.array(rows, np.int64)
    np.testing.assert_array_equal(Span.of(given, 10).rows, given)
