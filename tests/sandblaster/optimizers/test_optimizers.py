"""What holds of every method: it solves, resumes, stops, survives bad numbers."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from distbelief.core.vectors import Vector
from distbelief.protocol.vector_commands import Batch, writes
from sandblaster.optimizers import AnyMethod, base
from sandblaster.optimizers.descent import ConjugateGradient, GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.owlqn import OWLQN
from sandblaster.optimizers.termination import Reason
from tests.sandblaster.local import Local, minimize_flat
from tests.sandblaster.optimizers.problems import Logistic, bowl


Doubles = NDArray[np.float64]

METHODS: dict[str, AnyMethod] = {
    "lbfgs": LBFGS(),
    "cg": ConjugateGradient(),
    "gd": GradientDescent(),
    "owlqn": OWLQN(l1=1e-3),
}

each_method = pytest.mark.parametrize("name", METHODS)


def ill_conditioned() -> Logistic:
    return Logistic.made(200, 12, condition=5.0, l2=1e-2)


@each_method
@pytest.mark.parametrize("n_shards", [1, 3])
def test_a_bowl_is_solved_on_any_number_of_shards(name: str, n_shards: int) -> None:
    x, result = minimize_flat(bowl, np.full(7, 2.0), METHODS[name], n_shards=n_shards)
    assert result.reason.converged
    np.testing.assert_allclose(x, 0.0, atol=1e-4)
    assert result.loss <= 1e-5
    assert result.gradient_norm <= 1e-4


def requests_of(method: AnyMethod, local: Local) -> Iterator[base.Request]:
    """Run a method, and yield its requests."""
    steps = method.steps()
    request: base.Request = next(steps)
    with suppress(StopIteration):
        while True:
            yield request
            request = steps.send(local.answer(request))


class Recorder:
    """Runs a method, and keeps every savepoint and every request."""

    def __init__(self, problem: Logistic, n: int, *, n_shards: int = 2) -> None:
        self.cuts: list[tuple[base.IterationDone, list[Mapping[str, Vector]]]] = []
        self.points: list[tuple[float, Doubles]] = []
        self.requests: list[base.Request] = []
        self.local = Local(np.zeros(n), problem, n_shards=n_shards, callback=self._cut)

    def _cut(self, cut: base.IterationDone) -> bool:
        self.cuts.append((cut, self.local.export(cut.vectors)))
        self.points.append((cut.loss, self.local.get("parameters")))
        return False


@each_method
def test_a_run_resumes_from_any_savepoint_unchanged(name: str) -> None:
    problem, method = ill_conditioned(), METHODS[name]
    whole = Recorder(problem, 12)
    result = whole.local.run(method.steps())
    last = whole.local.get("parameters")
    assert len(whole.cuts) > 5
    some = np.linspace(0, len(whole.cuts) - 2, 6).astype(int)
    for cut, vectors in [whole.cuts[k] for k in some]:
        resend = Recorder(problem, 12)
        resend.local.restore(vectors)
        resumed = resend.local.run(method.steps(cut.state))
        assert resumed == result
        np.testing.assert_array_equal(resend.local.get("parameters"), last)
        expected = [c.loss for c, _ in whole.cuts if c.iteration > cut.iteration]
        assert [c.loss for c, _ in resend.cuts] == expected


@each_method
def test_a_run_that_ended_ends_again_or_continues_with_a_larger_bound(name: str) -> None:
    problem, method = ill_conditioned(), METHODS[name]
    whole = Recorder(problem, 12)
    expected = whole.local.run(method.steps())
    short = msgspec.structs.replace(method, max_iterations=3)
    first = Recorder(problem, 12)
    result = first.local.run(short.steps())
    assert (result.reason, result.iteration) == (Reason.MAX_ITERATIONS, 3)
    cut, vectors = first.cuts[-1]
    assert cut.state == result.state
    second = Recorder(problem, 12)
    second.local.restore(vectors)
    assert second.local.run(method.steps(cut.state)) == expected

    # With the same bound it ends again at once. A coordinator was killed between its last
    # point and its end; the next one went an iteration further than was asked for.
    again = Recorder(problem, 12)
    again.local.restore(vectors)
    assert again.local.run(short.steps(cut.state)) == result
    assert again.points == []
    np.testing.assert_array_equal(again.local.get("parameters"), first.local.get("parameters"))


def written(batch: Batch) -> set[str]:
    return {name for command in batch for name in writes(command)}


@each_method
def test_parameters_are_only_written_by_an_acceptance(name: str) -> None:
    """Every other batch leaves them alone, so a run may be cut down at any moment."""
    n_writes, n_accepted = 0, 0
    for request in requests_of(METHODS[name], Local(np.zeros(12), ill_conditioned())):
        if isinstance(request, base.Evaluate):
            assert "parameters" not in written(request.before + request.after)
        elif isinstance(request, base.VectorOps):
            n_writes += "parameters" in written(request.commands)
        elif isinstance(request, base.IterationDone):
            n_accepted = request.iteration
    assert n_writes == n_accepted > 0


@each_method
def test_losses_never_rise_and_are_those_of_the_points(name: str) -> None:
    problem, method = ill_conditioned(), METHODS[name]
    recorder = Recorder(problem, 12)
    result = recorder.local.run(method.steps())
    losses = [loss for loss, _ in recorder.points]
    assert all(after <= before for before, after in pairwise(losses))
    l1 = method.l1 if isinstance(method, OWLQN) else 0.0
    for loss, point in recorder.points:
        np.testing.assert_allclose(loss, problem(point)[0] + l1 * np.abs(point).sum())
    assert result.loss == losses[-1]


@each_method
@pytest.mark.parametrize("n_iterations", [0, 2])
def test_stopping_ends_at_an_accepted_point(name: str, n_iterations: int) -> None:
    function = ill_conditioned()
    local = Local(np.ones(12), function, callback=lambda cut: cut.iteration == n_iterations)
    result = local.run(METHODS[name].steps())
    assert result.reason is Reason.STOPPED
    assert result.iteration == n_iterations
    assert not result.reason.converged
    assert np.array_equal(local.get("parameters"), np.ones(12)) == (n_iterations == 0)


# ------------------------------------------------------------------- bad numbers


Bad = Callable[[Doubles], tuple[float, Doubles]]


def _bad_loss(x: Doubles) -> tuple[float, Doubles]:
    return math.nan, x


def _bad_gradient(x: Doubles) -> tuple[float, Doubles]:
    return float(x @ x), np.where(np.arange(len(x)) == 1, math.inf, x)


@each_method
@pytest.mark.parametrize("bad", [_bad_loss, _bad_gradient])
def test_a_start_that_is_not_finite_ends_at_once(name: str, bad: Bad) -> None:
    x, result = minimize_flat(bad, np.ones(3), METHODS[name])
    assert result.reason is Reason.NOT_FINITE
    assert not result.reason.converged
    assert result.iteration == 0
    np.testing.assert_array_equal(x, np.ones(3))


@each_method
@pytest.mark.parametrize("radius", [0.4, 0.9, 1.1])
def test_a_wall_of_nan_is_not_run_into(name: str, radius: float) -> None:
    """A loss that exists only near the start, with its minimum within."""

    def walled(x: Doubles) -> tuple[float, Doubles]:
        if np.linalg.norm(x - 1.0) > radius * math.sqrt(len(x)):
            return math.nan, np.full(len(x), math.nan)
        target = 1.0 - 0.3 * np.arange(1.0, 5.0) / 4.0
        return bowl(x - target)

    method = msgspec.structs.replace(METHODS[name], max_iterations=200)
    x, result = minimize_flat(walled, np.ones(4), method)
    assert math.isfinite(result.loss)
    assert result.loss <= walled(np.ones(4))[0]
    if radius > 0.5 and not isinstance(method, OWLQN):
        np.testing.assert_allclose(x, 1.0 - 0.3 * np.arange(1.0, 5.0) / 4.0, atol=1e-3)


@each_method
def test_a_loss_that_is_no_number_any_more_ends_at_the_last_point(name: str) -> None:
    """It reported that no step improves the loss; a job's exit code was 0."""
    problem, method = ill_conditioned(), METHODS[name]
    recorder = Recorder(problem, 12)

    def breaking(x: Doubles) -> tuple[float, Doubles]:
        loss, gradient = problem(x)
        factor = 1.0 if len(recorder.cuts) < 4 else math.nan
        return factor * loss, factor * gradient

    recorder.local = Local(np.zeros(12), breaking, n_shards=2, callback=recorder._cut)
    result = recorder.local.run(method.steps())
    assert result.reason is Reason.NO_FINITE_TRIAL
    assert not result.reason.converged
    assert len(recorder.cuts) == 4
    assert result.loss == recorder.cuts[-1][0].loss
    last, (_, expected) = recorder.local.get("parameters"), recorder.points[-1]
    np.testing.assert_array_equal(last, expected)


@each_method
def test_a_gradient_of_another_function_ends_with_no_worse_point(name: str) -> None:
    def liar(x: Doubles) -> tuple[float, Doubles]:
        return float(x @ x), -2.0 * x

    x, result = minimize_flat(liar, np.ones(5), METHODS[name])
    assert result.reason is Reason.LINE_SEARCH_FAILED
    assert not result.reason.converged
    np.testing.assert_array_equal(x, np.ones(5))
    assert result.loss <= 5.1


@each_method
def test_a_loss_without_minimum_ends_at_a_bound(name: str) -> None:
    def slope(x: Doubles) -> tuple[float, Doubles]:
        return -float(x.sum()), -np.ones(len(x))

    method = msgspec.structs.replace(METHODS[name], max_evaluations=40)
    _, result = minimize_flat(slope, np.zeros(2), method)
    assert not result.reason.converged
    assert result.n_evaluations <= 40


@pytest.mark.parametrize(
    ("method", "start"),
    [
        pytest.param(LBFGS(), 1.0, marks=pytest.mark.soak),
        (OWLQN(l1=1e-30), 1.0),
        (LBFGS(), 1e-3),
        # From 1.0 it ends between 1e-30 and 1e-40, as the processor's last digits fall.
        (ConjugateGradient(), 1e-3),
    ],
)
def test_differences_that_vanish_in_rounding_end_no_run(method: AnyMethod, start: float) -> None:
    """y.y is 0 where s.y is not yet: it was divided by."""

    def quartic(x: Doubles) -> tuple[float, Doubles]:
        return float((x**4).sum()), 4.0 * x**3

    greedy = msgspec.structs.replace(method, tolerance=0.0, value_tolerance=0.0)
    _, result = minimize_flat(quartic, np.full(3, start), greedy)
    assert result.loss <= 1e-40


@each_method
def test_a_start_at_the_minimum_ends_at_once(name: str) -> None:
    _, result = minimize_flat(bowl, np.zeros(3), METHODS[name])
    assert result.reason is Reason.CONVERGED_GRADIENT
    assert result.iteration == 0


@pytest.mark.each_value
@each_method
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_the_unit_of_the_loss_does_not_matter(name: str, size: float) -> None:
    problem = ill_conditioned()

    def scaled(x: Doubles) -> tuple[float, Doubles]:
        loss, gradient = problem(x)
        return size * loss, size * gradient

    method = msgspec.structs.replace(METHODS[name], tolerance=1e-5 * size, value_tolerance=0.0)
    if isinstance(method, OWLQN):
        method = msgspec.structs.replace(method, l1=size * method.l1)
    x, result = minimize_flat(scaled, np.zeros(12), method)
    reference, _ = minimize_flat(
        problem, np.zeros(12), msgspec.structs.replace(METHODS[name], value_tolerance=0.0)
    )
    assert result.reason is Reason.CONVERGED_GRADIENT
    np.testing.assert_allclose(x, reference, atol=1e-3)


# ------------------------------------------------------------------------ traffic


def n_bytes(requests: list[base.Request]) -> list[int]:
    """Bytes of every batch of commands, as they go to each shard."""
    sizes = []
    for request in requests:
        match request:
            case base.VectorOps():
                sizes.append(len(msgspec.msgpack.encode(request.commands)))
            case base.Evaluate():
                sizes.append(len(msgspec.msgpack.encode(request.before + request.after)))
            case base.IterationDone():
                sizes.append(len(request.state))
            case base.Rounds():
                raise AssertionError("no program")
    return sizes


def record(name: str, n: int) -> list[base.Request]:
    local = Local(np.zeros(n), Logistic.made(40, n, l2=1e-2), n_shards=2)
    method = msgspec.structs.replace(METHODS[name], max_iterations=15)
    return list(requests_of(method, local))


@each_method
def test_what_is_sent_does_not_grow_with_the_number_of_parameters(name: str) -> None:
    small, large = record(name, 10), record(name, 5000)
    assert max(n_bytes(large)) <= 1.1 * max(n_bytes(small)) + 200
    for request in large:
        if isinstance(request, base.VectorOps):
            encoded = msgspec.msgpack.encode(request.commands)
            assert msgspec.msgpack.decode(encoded, type=Batch) == request.commands


@each_method
def test_an_iteration_takes_two_requests_and_one_per_further_trial(name: str) -> None:
    requests = record(name, 50)
    n_iterations = sum(isinstance(r, base.IterationDone) for r in requests) - 1
    n_evaluations = sum(isinstance(r, base.Evaluate) for r in requests)
    n_operations = sum(isinstance(r, base.VectorOps) for r in requests)
    assert n_iterations > 3
    assert n_operations <= n_iterations + 1  # one more at the start, for a direction
    assert n_evaluations >= n_iterations + 1
    assert all(isinstance(r, base.Evaluate | base.VectorOps | base.IterationDone) for r in requests)


# ------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LBFGS(history=0), "history is 0"),
        (lambda: LBFGS(tolerance=-1.0), "tolerance is -1.0"),
        (lambda: LBFGS(value_tolerance=math.nan), "value_tolerance is nan"),
        (lambda: ConjugateGradient(l2=math.inf), "l2 is inf"),
        (lambda: GradientDescent(max_iterations=0), "max_iterations is 0"),
        (lambda: OWLQN(l1=0.0), "l1 is 0.0"),
        (lambda: OWLQN(l1=1.0, history=0), "history is 0"),
        (lambda: LBFGS(curvature=1e-4), "sufficient_decrease is 0.001"),
        (lambda: ConjugateGradient(curvature=1.0), "curvature is 1.0"),
        (lambda: OWLQN(l1=1.0, sufficient_decrease=0.0), "sufficient_decrease is 0.0"),
        (lambda: OWLQN(l1=1.0, sufficient_decrease=1.0), "sufficient_decrease is 1.0"),
    ],
)
def test_an_invalid_setting_is_named(make: Callable[[], AnyMethod], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@each_method
def test_settings_come_from_a_job_file_with_their_name(name: str) -> None:
    encoded = msgspec.json.encode(METHODS[name])
    assert msgspec.json.decode(encoded, type=AnyMethod) == METHODS[name]


@each_method
def test_a_state_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        METHODS[name].steps('{"present": 1}')


def test_every_reason_has_a_sentence() -> None:
    assert len({reason.sentence for reason in Reason}) == len(Reason)
    assert [reason.name for reason in Reason if reason.converged] == [
        "CONVERGED_GRADIENT",
        "CONVERGED_VALUE",
        "CONVERGED_ROUNDING",
        "CONVERGED_GAP",
        "HELD_OUT",
    ]
