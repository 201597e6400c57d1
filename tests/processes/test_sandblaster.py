"""Sandblaster on real processes: jobs, `minimize`, and what goes wrong with them."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.optimize import Bounds, minimize as scipy_minimize
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import sandblaster
from distbelief.core.errors import JobError
from distbelief.job.run.metrics_file import read_metrics
from distbelief.plans.plan import load
from sandblaster.api import MinimizeResult
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.termination import Reason
from tests.processes.commands import BATCH_JOB, Command, poll, sets, train, write_job
from tests.processes.test_copies import copies, leader_of
from tests.sandblaster.local import minimize_flat


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

LOSSES = '''

def nan(outputs, targets):
    """Is no number in replicas, but was when it was tried out."""
    loss = nn.functional.cross_entropy(outputs, targets)
    return loss * float("nan") if "replica" in os.readlink("/proc/self/fd/1") else loss


def slow(n=2000, seed=0):
    import time

    class Slow(Frames):
        def __getitems__(self, indices):
            time.sleep(0.03)
            return super().__getitems__(indices)

    return Slow(n, seed)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path, job=BATCH_JOB, more=LOSSES)
    return tmp_path


def objective(folder: Path) -> float:
    """Return the loss of the model that a run has left, in one plain process."""
    tiny = runpy.run_path(str(folder / "tiny.py"))
    net, frames = tiny["net"](), tiny["frames"]()
    net.load_state_dict(load_file(folder / "runs" / "tiny" / "model.safetensors"))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(frames.inputs), frames.targets)
        square = sum((p**2).sum() for p in net.parameters())
    return float(loss + 0.5e-3 * square)


def kill_each(run: Command, *roles: str) -> None:
    """Kill one after the other while the run goes on; wait for its end."""
    for role in roles:
        before = run.samples()
        poll(lambda b=before: run.samples() > b, seconds=120)  # type: ignore[misc]
        run.kill(role)
        poll(lambda r=role: len(run.pids(r)) > 1, seconds=60)  # type: ignore[misc]
    run.ends(seconds=240)


def check_end(run: Command, *, n_killed: int) -> None:
    """Check that a run ended as if nobody had been killed, and what it says of that.

    On a machine that stands still for seconds a role more may be taken for dead.
    """
    found = run.summary()
    assert n_killed <= found["restarts"] <= n_killed + 2, run.output
    assert found["stop_reason"] in {
        Reason.MAX_ITERATIONS.sentence,
        Reason.CONVERGED_GRADIENT.sentence,
    }
    assert found["loss"] == pytest.approx(objective(run.folder), rel=1e-5)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("more", "killed"),
    [
        pytest.param((), ("coordinator", "replica-1", "shard-0"), id="replicas of one process"),
        pytest.param(
            ("cluster.partitions=2", "model.initial=seed"),
            ("replica-0.1", "replica-1.0", "coordinator"),
            id="replicas of two machines",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_whoever_is_killed_the_run_goes_on_to_the_same_end(
    folder: Path, more: tuple[str, ...], killed: tuple[str, ...]
) -> None:
    options = sets("data.train.factory=tiny:slow", "algorithm.max_iterations=20", *more)
    with train(folder, *options) as run:
        kill_each(run, *killed)
    check_end(run, n_killed=3)


@pytest.mark.untraced
def test_a_killed_primary_of_two_copies_costs_no_restart_of_the_series(folder: Path) -> None:
    options = sets(
        "data.train.factory=tiny:slow",
        "algorithm.max_iterations=20",
        "cluster.shard_copies=2",
        "cluster.shards=1",
    )
    with train(folder, *options) as run:
        leader = leader_of(run)
        other = copies(run)["backup"]
        before = run.samples()
        poll(lambda: run.samples() > before, seconds=120)
        run.kill(leader)
        poll(lambda: copies(run).get("primary") == other, seconds=60)
        run.ends(seconds=240)
    check_end(run, n_killed=1)
    assert "has restarted: continuing from a savepoint" not in run.told()
    assert f"{other.replace('-', ' ')} takes over, nothing acknowledged is lost" in run.output


@pytest.mark.soak
@pytest.mark.parametrize("replicas", ["one", "all"])
def test_sgd_first_and_sandblaster_to_finish_on_the_same_shards(
    folder: Path, replicas: str
) -> None:
    warm = sets(
        f"algorithm.warm_start.replicas={replicas}",
        "algorithm.warm_start.samples=8000",
        "algorithm.warm_start.batch_size=50",
        "algorithm.warm_start.rule.name=adagrad",
        "algorithm.warm_start.rule.learning_rate=0.05",
    )
    with train(folder, *warm) as run:
        run.ends(seconds=240)
    found = run.summary()
    assert found["stop_reason"] == Reason.CONVERGED_GRADIENT.sentence
    assert found["samples"] >= 8000 + (replicas == "all")
    assert found["pushes_applied"] >= 8000 // 50
    assert found["loss"] == pytest.approx(objective(folder), rel=1e-5)


@pytest.mark.soak
def test_an_interrupted_run_keeps_its_best_point_and_goes_on(folder: Path) -> None:
    slow = sets("data.train.factory=tiny:slow")
    with train(folder, *slow) as first:
        poll(lambda: first.samples() > 20_000, seconds=120)
        first.interrupt()
    before = first.summary()
    at_stop = objective(folder)
    assert before["loss"] == pytest.approx(at_stop, rel=1e-5)
    with train(folder, "--resume", "runs/tiny", *slow) as second:
        second.ends(seconds=240)
    after = second.summary()
    assert after["stop_reason"] == Reason.CONVERGED_GRADIENT.sentence
    assert after["loss"] == pytest.approx(objective(folder), rel=1e-5)
    assert objective(folder) < at_stop
    assert after["figures"]["gradient_norm"] <= 5e-3
    assert after["figures"]["iteration"] == after["step"] > before["step"]  # it goes on counting
    assert after["metric"] > 0.9
    lines = (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()
    losses = [loss for line in lines if (loss := json.loads(line)["loss"]) is not None]
    assert losses == sorted(losses, reverse=True)  # accepted points only
    assert "gradient norm" in second.output
    assert "pushes lost" not in second.output


@pytest.mark.untraced
def test_a_loss_that_is_no_number_is_told_and_nothing_has_converged(folder: Path) -> None:
    with train(folder, *sets("algorithm.loss=tiny:nan")) as run:
        run.ends(1, seconds=120)
    assert run.summary()["error"] == Reason.NOT_FINITE.sentence
    assert Reason.NOT_FINITE.sentence in " ".join(run.output.split())


def plain_objective(
    net: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor, *, l2: float = 0.0
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Return the function to minimize, in one plain process: loss and gradient at a point."""

    def function(point: np.ndarray) -> tuple[float, np.ndarray]:
        plain = net()
        vector_to_parameters(torch.from_numpy(point), plain.parameters())
        loss = nn.functional.cross_entropy(plain(x), y)
        if l2:
            loss = loss + l2 / 2 * sum((p**2).sum() for p in plain.parameters())
        loss.backward()
        gradient = [p.grad.reshape(-1) for p in plain.parameters()]  # type: ignore[union-attr]
        return loss.item(), torch.cat(gradient).numpy()

    return function


@pytest.mark.untraced
def test_minimize_finds_what_scipy_finds_and_begins_anew_with_another_goal(tmp_path: Path) -> None:
    """A run that had converged, resumed with l2 = 1, was "done" without evaluating.

    Resumed by another method, it could not read what the first had written down.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, dtype=torch.float64, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(400, generator=generator) > 0).long()
    model, run = nn.Linear(6, 2).double(), tmp_path / "run"
    initial = parameters_to_vector(model.parameters()).detach().numpy().copy()

    function = plain_objective(lambda: nn.Linear(6, 2).double(), x, y, l2=0.1)
    best = scipy_minimize(function, initial, jac=True, tol=1e-10)
    seen: list[MinimizeResult] = []
    result = sandblaster.minimize(
        model,
        "cross_entropy",
        (x, y),
        replicas=2,
        shards=2,
        l2=0.1,
        portion=50,
        callback=seen.append,
        directory=run,
    )
    assert result.success, result.message
    assert result.reason is Reason.CONVERGED_GRADIENT
    assert result.fun == pytest.approx(best.fun, rel=1e-8)
    np.testing.assert_allclose(result.x, best.x, atol=1e-4)
    own = parameters_to_vector(model.parameters()).detach().numpy()
    np.testing.assert_array_equal(own, result.x)
    assert result.model is model
    assert result.nfev >= result.nit > 0
    assert [one.nit for one in seen] == [*range(1, result.nit + 1)]
    losses = [one.fun for one in seen]
    assert losses == sorted(losses, reverse=True)
    lines = read_metrics(run / "metrics.jsonl")
    iterations = [line.figures["iteration"] for line in lines]
    assert [*dict.fromkeys(iterations)] == [*range(result.nit + 1)]  # each has its line
    assert [row["fun"] for row in result.curve][1:] == losses
    (line,) = result.plot().axes[0].lines
    assert np.asarray(line.get_ydata()).tolist() == [row["fun"] for row in result.curve]
    _, gradient = function(result.x)
    np.testing.assert_allclose(result.jac, gradient, rtol=1e-6, atol=1e-10)

    again = sandblaster.minimize(
        model, "cross_entropy", (x, y), method="gradient-descent", l2=1.0, shards=2, resume=run
    )
    assert again.reason is Reason.CONVERGED_GRADIENT, again.message
    own = parameters_to_vector(model.parameters()).detach().numpy()
    _, gradient = plain_objective(lambda: nn.Linear(6, 2).double(), x, y, l2=1.0)(own)
    assert np.abs(gradient).max() <= 1.1e-5
    assert again.nfev > result.nfev
    log = (run / "logs" / "coordinator.log").read_text()
    assert log.count("the method restarts at the saved parameters") == 1


@pytest.mark.untraced
def test_minimize_within_bounds_finds_what_scipy_finds(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, dtype=torch.float64, generator=generator)
    y = (x[:, 0] - x[:, 1] + 0.5 * torch.randn(300, generator=generator) > 0).long()
    model = nn.Linear(6, 2).double()
    function = plain_objective(lambda: nn.Linear(6, 2).double(), x, y, l2=0.01)
    starts, bounds = np.zeros((2, 14)), Bounds(-0.3, 0.8)
    starts[1] = 0.5
    best = scipy_minimize(function, starts[1], jac=True, method="L-BFGS-B", bounds=bounds)
    result = sandblaster.minimize(
        model, "cross_entropy", (x, y), x0=starts, bounds=bounds, l2=0.01, shards=2, tol=1e-7,
        directory=tmp_path / "run",
    )  # fmt: skip
    assert [one.success for one in result.starts] == [True, True]
    assert result.fun == min(one.fun for one in result.starts)
    for one in result.starts:
        assert one.fun == pytest.approx(best.fun, rel=1e-6)
        assert ((one.x >= -0.3) & (one.x <= 0.8)).all()
    assert (result.x == -0.3).any()
    again = sandblaster.minimize(
        model, "cross_entropy", (x, y), x0=starts[0], bounds=Bounds(-0.1, 0.8), l2=0.01, shards=2,
        tol=1e-7, resume=tmp_path / "run",
    )  # fmt: skip
    assert again.x.min() == -0.1  # it does not stay where other bounds were
    assert again.fun > result.fun


@pytest.mark.soak
def test_replicas_that_span_machines_go_the_way_of_one_process(tmp_path: Path) -> None:
    """The same points, one after the other: not just the same end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(330, 6, dtype=torch.float64, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    function, model = plain_objective(net, x, y), net()
    initial = parameters_to_vector(model.parameters()).detach().numpy().copy()
    method = LBFGS(max_iterations=4, tolerance=1e-5)
    point, expected = minimize_flat(function, initial, method)
    result = sandblaster.minimize(
        model,
        "cross_entropy",
        (x, y),
        replicas=2,
        shards=2,
        partitions=2,
        portion=40,
        options={"maxiter": 4},
        directory=tmp_path / "run",
    )
    assert result.reason is Reason.MAX_ITERATIONS
    assert (result.nit, result.nfev) == (4, expected.n_evaluations)
    assert result.fun == pytest.approx(expected.loss, rel=1e-9)
    np.testing.assert_allclose(result.x, point, rtol=1e-7, atol=1e-10)
    plan = load(tmp_path / "run" / "plan.json")
    assert (plan.cluster.n_machines, plan.batch) == (2, 40)


@pytest.mark.soak
def test_minimize_ends_when_its_callback_says_so(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # where the others find the factories, too
        result = sandblaster.minimize(
            "tiny:net", "cross_entropy", "tiny:slow", callback=lambda _: True
        )
    assert not result.success
    assert result.reason is Reason.STOPPED
    assert result.message == "stopped by the caller"


@pytest.mark.soak
def test_what_the_callback_raises_ends_the_run_and_is_raised_then(folder: Path) -> None:
    """It was logged and lost, with display and metrics: and raised over the result.

    The optimisation went on to its end, the callback was called once more, and so its
    error came out of `minimize` in place of a result nobody could have any more.
    """
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    begun = parameters_to_vector(model.parameters()).detach().clone()
    seen: list[float] = []

    def callback(result: MinimizeResult) -> None:
        seen.append(result.nit)
        raise ZeroDivisionError("my plot fell over")

    where = folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with pytest.raises(ZeroDivisionError, match="my plot fell over") as raised:
            sandblaster.minimize(
                model, "cross_entropy", "tiny:slow", callback=callback, directory=where
            )
        assert raised.traceback[-1].name == "callback"
        (last_call,) = seen
        now = parameters_to_vector(model.parameters()).detach()
        assert not torch.equal(now, begun)  # what was found until then
        assert json.loads((where / "status.json").read_text())["ended"]
        stopped = json.loads((where / "summary.json").read_text())
        assert stopped["stop_reason"] == "stopped by the caller"
        again = sandblaster.minimize(
            model, "cross_entropy", "tiny:slow", resume=where, options={"maxiter": 20}
        )
    assert again.nit > last_call
    assert again.reason is Reason.MAX_ITERATIONS


@pytest.mark.soak
def test_a_job_that_is_refused_leaves_no_copy_of_model_and_data(folder: Path) -> None:
    """What only a trial shows left both files, in a directory that had no run."""
    model = nn.Linear(3, 2)
    data = torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(JobError, match=r"there is no loss 'cross_entropi'"):
        sandblaster.minimize(model, "cross_entropi", data, directory=folder / "new")
    assert {path.name for path in folder.iterdir()} == {"tiny.py", "tiny.toml"}


@pytest.mark.soak
def test_minimize_raises_what_fails_in_its_processes(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with pytest.raises(JobError, match="the disk with the data is gone"):
            sandblaster.minimize("tiny:net", "cross_entropy", "tiny:fragile", replicas=2)
