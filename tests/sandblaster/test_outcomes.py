"""How runs of a whole cluster end: each outcome has a message, and none hangs."""

import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from distbelief import protocol as wire
from distbelief.core.errors import DistBeliefError
from distbelief.parameter_server.shard import Shard
from distbelief.protocol import role as rl
from distbelief.protocol.vector_commands import Axpy, Copy, Dot, Fill
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import DiskFull, Kill, Slow
from distbelief.task.losses import Loss
from sandblaster.chunks import COORDINATOR
from sandblaster.coordinator.coordinator import Coordinator, _check
from sandblaster.coordinator.work_queue import SeriesCounters, WorkQueue
from sandblaster.coordinator.workers import CoordinatorConfig, WorkerPool
from sandblaster.optimizers import base
from sandblaster.optimizers.termination import Reason
from tests.simulation.sandblasts import Sandblast, logistic, play, undisturbed
from tests.simulation.scene import sends


SHARDS = (rl.Address("shard-0"), rl.Address("shard-1"))
SMALL = Sandblast(n_replicas=2)


def ended(run: Sandblast, *, within: float = 60.0) -> str | None:
    """Let the coordinator end; return why, if not as planned."""
    run.cluster.run_until(lambda: COORDINATOR in run.cluster.halted, within=within)
    return run.cluster.halted[COORDINATOR]


def finished(run: Sandblast) -> wire.Finished:
    run.wait(0.1)
    return run.told(wire.Finished)[0]


@dataclass(frozen=True)
class Scripted:
    """An algorithm of these requests, one after the other; it keeps the replies."""

    requests: tuple[base.Request, ...]
    replies: list[base.Reply]

    def steps(self, state: str | None = None) -> Generator[base.Request, base.Reply, base.Result]:
        """Yield them."""
        self.replies.clear()
        for request in self.requests:
            self.replies.append((yield request))
        return base.Result(
            reason=Reason.CONVERGED_GRADIENT,
            iteration=0,
            n_evaluations=0,
            loss=0.0,
            gradient_norm=0.0,
            step_length=0.0,
            state=state or "",
            vectors=(),
        )


# ------------------------------------------------------------------------- good ends


@pytest.mark.each_value
@pytest.mark.parametrize("hosts", ["one", "own"])
@pytest.mark.parametrize("window_chunks", [1, 64])
def test_a_run_ends_where_one_replica_alone_ends(hosts: str, window_chunks: int) -> None:
    run = play(Sandblast(hosts=hosts, window_chunks=window_chunks))
    last = run.coordinator.metrics.iterated
    assert last is not None
    assert run.checker.n_sealed == last.n_evaluations
    assert finished(run).counters["iteration"] == 3.0
    update = [event.message for event in run.cluster.sent_to(rl.SUPERVISOR)]
    steps = [message.step for message in update if isinstance(message, wire.Progress)]
    assert steps == [0, 1, 2, 3]


def test_nothing_starts_before_start_training() -> None:
    run = replace(SMALL, await_begin=True)
    run.cluster.run(until=1.0)
    assert run.coordinator.status()[0] == "waiting for begin"
    for name in (COORDINATOR, *run.replicas):
        run.tell(name, wire.StartTraining())
    assert ended(run) is None
    assert run.bits == undisturbed(SMALL.chunk_sizes, 2)[0]


def test_a_coordinator_stopped_before_it_starts_ends_at_once() -> None:
    run = replace(SMALL, await_begin=True)
    run.cluster.run(until=0.1)
    run.tell(COORDINATOR, wire.Stop(reason="enough"))
    assert ended(run) is None


@pytest.mark.parametrize("during", [wire.Commit, wire.Execute])
def test_a_run_that_is_stopped_leaves_the_last_accepted_point(during: type) -> None:
    """Not the trial point that is evaluated, nor the point that it is moving to."""
    run = replace(SMALL)
    accepted: list[bytes] = []
    tasks: list[wire.Task] = []
    run.cluster.run_until(lambda: len(run.checker.losses) == 2)
    shards = [run.cluster.role(name) for name in SHARDS]
    for shard in shards:
        assert isinstance(shard, Shard)
        algebra = shard._commands._vector_store
        accepted.append(algebra.export(("parameters",))["parameters"].tobytes())
    run.cluster.observe(
        lambda happening: tasks.extend(
            command.task for _, command in sends(happening, wire.ShardCommand)
        )
    )
    run.cluster.run_until(lambda: any(isinstance(task, during) for task in tasks), within=1.0)
    run.tell(COORDINATOR, wire.Stop(reason="enough"))
    assert ended(run) is None
    assert run.coordinator.reason is Reason.STOPPED
    for shard, parameters in zip(shards, accepted, strict=True):
        assert isinstance(shard, Shard)
        n = len(parameters) // 8
        assert shard.values.vector[:n].tobytes() == parameters
        assert not shard._commands.is_driven
    for name in run.replicas:
        run.tell(name, wire.Stop(reason="enough"))
    run.cluster.run_until(lambda: all(name in run.cluster.halted for name in run.replicas))


def test_a_run_that_is_stopped_while_a_shard_comes_back_leaves_a_point() -> None:
    """The coordinator ended without one, and the shards refused the last snapshot.

    "a coordinator drives this shard: ask it to save": a job whose time was over 0.5 s
    after a shard had been killed failed by that.
    """
    kill = Kill(at=0.1, role=SHARDS[0], restart_after=0.01)
    run = replace(SMALL, saves=(0.03,), faults=(kill,))
    run.cluster.run_until(lambda: run.coordinator.status()[1]["series"] == 4098.0)
    run.tell(COORDINATOR, wire.Stop(reason="enough"))
    assert ended(run) is None
    assert run.coordinator.reason is Reason.STOPPED
    for name in SHARDS:
        shard = run.cluster.role(name)
        assert isinstance(shard, Shard)
        assert not shard._commands.is_driven


def test_all_at_once_may_die_after_a_save_and_the_end_is_the_same() -> None:
    everybody = (COORDINATOR, *SMALL.shards, *SMALL.replicas)
    kills = tuple(Kill(at=0.14, role=role, restart_after=0.05) for role in everybody)
    scene = replace(SMALL, saves=(0.06,), faults=kills)
    run = replace(scene)
    run.play()
    assert [saved.error for saved in run.checker.saved] == [None]
    assert run.bits == undisturbed(scene.chunk_sizes, 2)[0]


def test_a_run_without_its_history_warns() -> None:
    kill = Kill(at=0.1, role=SHARDS[0], restart_after=0.01)
    run = replace(SMALL, saves=(0.03,), faults=(kill,))
    update: list[str] = []
    run.cluster.observe(
        lambda happening: update.extend(
            action.text for action in happening.actions if isinstance(action, rl.Report)
        )
    )
    run.play()
    assert [text for text in update if "only parameters could be restored" in text]


def test_a_failed_checkpoint_is_reported_and_the_run_continues() -> None:
    scene = replace(SMALL, saves=(0.02, 0.03), faults=(DiskFull(at=0.01, seconds=0.1),))
    run = replace(scene)
    run.play()
    errors = [saved.error for saved in run.checker.saved]
    assert errors
    assert all(errors)
    assert run.bits == undisturbed(scene.chunk_sizes, 2)[0]


@pytest.mark.parametrize(
    ("role", "error"), [("shard-1", "shard 1: no space left"), (COORDINATOR, "no space left")]
)
def test_a_checkpoint_that_one_disk_has_not_taken_has_failed(role: str, error: str) -> None:
    run = replace(SMALL, saves=(0.05,))

    def failing(whole: Callable[..., Sequence[rl.Action]]) -> object:
        def handle(self: object, event: rl.Event, now: float) -> Sequence[rl.Action]:
            if (
                isinstance(event, rl.Persisted)
                and self is run.cluster.role(rl.Address(role))
                and not run.checker.saved  # then its disk has space again, for the end
            ):
                event = rl.Persisted(label=event.label, error="no space left")
            return whole(self, event, now)

        return handle

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Shard, Coordinator):
            patch.setattr(kind, "handle", failing(kind.handle))
        run.play()
    assert [saved.error for saved in run.checker.saved] == [error]


def test_a_save_waits_for_the_journal_and_the_end_waits_for_it_too() -> None:
    slow = Slow(at=0.0, role=COORDINATOR, factor=3e3, seconds=60.0)
    run = play(replace(SMALL, saves=(0.05,), faults=(slow,)))
    assert [saved.error for saved in run.checker.saved] == [None]


def test_an_end_whose_journal_no_disk_takes_is_a_failure_and_reached_again() -> None:
    """It ended as if all were well, and could not be resumed."""
    run = replace(SMALL, faults=(DiskFull(at=0.01, seconds=11.0),))
    run.cluster.run(until=12.0)
    assert "make room on its disk" in (run.cluster.halted[COORDINATOR] or "")
    run.cluster.restart(COORDINATOR)
    run.play()
    assert run.bits == undisturbed(SMALL.chunk_sizes, 2)[0]


def test_a_save_that_comes_too_late_is_not_taken() -> None:
    """The supervisor sees the end, and may save the shards."""
    run = replace(SMALL)
    run.cluster.run_until(lambda: len(run.checker.losses) == 4)
    run.tell(COORDINATOR, wire.SaveCheckpoint(label="00009"))
    assert ended(run) is None
    assert run.checker.saved == []
    assert list(run.coordinator.handle(rl.TimerFired(name="coordinator:tick"), 9.0)) == []


def test_a_replica_that_restarts_at_once_has_lost_its_chunks() -> None:
    role = SMALL.replicas[0]
    kills = tuple(Kill(at=0.01 + 0.013 * k, role=role, restart_after=1e-3) for k in range(6))
    for hosts in ("one", "own"):
        run = play(replace(SMALL, faults=kills, hosts=hosts))
        assert run.checker.sights["replicas restarted"] == 6
        assert run.coordinator.status()[1]["wasted"] > 0


def test_a_coordinator_that_restarts_goes_on_counting() -> None:
    """Samples did; what was wasted, and whose time went where, was that of its last incarnation."""
    role = SMALL.replicas[0]
    kills = [Kill(at=0.01 + 0.013 * k, role=role, restart_after=1e-3) for k in range(6)]
    kills.append(Kill(at=0.13, role=COORDINATOR, restart_after=0.01))
    run = replace(SMALL, faults=tuple(kills))
    run.cluster.run_until(lambda: run.cluster.now > 0.12)
    first = run.coordinator
    run.play()
    assert run.coordinator is not first
    before, after = first.status()[1], run.coordinator.status()[1]
    assert after["wasted"] >= before["wasted"] > 0
    assert after["samples"] > before["samples"] > 0
    spent = [sum(of.metrics.shares.seconds.values()) for of in (first, run.coordinator)]
    assert spent[1] > spent[0] > 0


def test_an_evaluation_begins_beyond_all_tokens_before_it() -> None:
    """A push of the evaluation before that comes late must not be taken for one of this."""
    run, used, n_begun = replace(SMALL), {0}, 0

    def see(happening: HandledEvent) -> None:
        nonlocal n_begun
        message = happening.event.message if isinstance(happening.event, rl.Received) else None
        match message.task if isinstance(message, wire.ShardCommand) else None:
            case wire.BeginEvaluation(first_commit_token=first):
                assert first > max(used)
                n_begun += 1
            case wire.Commit(chunks=chunks):
                used.update(one.commit_token for one in chunks)
            case _:
                pass

    run.cluster.observe(see)
    run.play()
    assert n_begun > 3


def test_a_shard_that_counts_otherwise_is_named() -> None:
    config = CoordinatorConfig(chunk_sizes=SMALL.chunk_sizes)
    queue = WorkQueue(config, pool=WorkerPool(config), n_examples=4, counters=SeriesCounters())
    answers = [wire.CommandDone(series=1, number=1, n_chunks=n) for n in (1, 2)]
    with pytest.raises(DistBeliefError, match="shard 1 counts 2 chunks of 0 examples"):
        _check(answers, queue)


def test_more_saves_than_can_wait_are_refused() -> None:
    run = replace(SMALL)
    run.cluster.run(until=0.01)
    for index in range(10):
        for _ in range(2):
            run.tell(COORDINATOR, wire.SaveCheckpoint(label=f"{index:05d}"))
    run.cluster.run(until=0.02)
    assert ["request them less often" in (s.error or "") for s in run.checker.saved] == [True] * 4


def test_requests_are_answered_by_what_all_shards_measured() -> None:
    replies: list[base.Reply] = []
    done = base.IterationDone(
        iteration=1,
        n_evaluations=2,
        loss=0.5,
        gradient_norm=0.1,
        step_length=1.0,
        state="x",
        vectors=("parameters",),
    )
    requests: tuple[base.Request, ...] = (
        base.VectorOps(commands=(Fill(target="ones", a=1.0), Dot(x="ones", y="ones"))),
        base.Evaluate(
            point="parameters",
            gradient="g",
            before=(Dot(x="ones", y="ones"),),
            after=(
                Copy(target="trial", x="parameters"),
                Axpy(target="trial", a=-1.0, x="g"),
                Dot(x="g", y="g"),
            ),
        ),
        base.Evaluate(point="trial", gradient="g"),
        done,
        done,
    )
    scene = replace(SMALL, method=Scripted(requests, replies))
    run = replace(scene)
    assert ended(run) is None
    n_parameters, first, second, stops, _ = replies
    assert n_parameters == (6.0,)
    assert isinstance(first, base.Evaluation)
    assert isinstance(second, base.Evaluation)
    assert first.loss == pytest.approx(math.log(2))
    assert first.scalars[0] == 6.0
    assert first.scalars[1] > 0
    assert second.loss < first.loss
    assert stops is False


# -------------------------------------------------------------------------- bad ends


def not_a_number(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return NaN, and a gradient of NaN."""
    return logistic(outputs, targets) * math.nan


def not_a_scalar(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return one number for each example."""
    return (outputs[:, 0] - targets) ** 2


def infinite_slope(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a number whose gradient is not finite."""
    del targets
    return (outputs - outputs.detach()).abs().sqrt().mean() + outputs.mean() * 0.0


@pytest.mark.parametrize("loss", [not_a_number, infinite_slope])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_and_says_where(loss: Loss) -> None:
    run = replace(SMALL, loss=loss)
    assert ended(run) is None
    assert run.coordinator.reason is Reason.NOT_FINITE
    texts = [report.text for _, report in run.cluster.reports]
    assert any("positions" in text and "not finite" in text for text in texts)


def test_a_loss_that_is_not_a_scalar_ends_with_an_error() -> None:
    run = replace(SMALL, loss=not_a_scalar)
    run.cluster.run_until(lambda: "replica-0" in run.cluster.halted)
    error = run.cluster.halted[rl.Address("replica-0")]
    assert error is not None
    assert error.startswith("JobError")
    assert "loss" in error


def scripted(request: base.Request) -> dict[str, object]:
    return {"method": Scripted((request,), [])}


KILLS = tuple(Kill(at=0.03, role=role) for role in SMALL.replicas)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"faults": (Kill(at=0.06, role=SHARDS[1]),), "silence_seconds_max": 2.0},
            "^PeerLostError: shard-1 has not answered",
        ),
        ({"faults": KILLS, "starved_seconds_max": 3.0}, "no replica has reported"),
        (scripted(base.VectorOps(commands=(Dot(x="nobody", y="nobody"),))), "shard-.*'nobody'"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(changes: dict[str, Any], text: str) -> None:
    error = ended(replace(SMALL, **changes))
    assert error is not None
    assert re.search(text, error)


def test_a_superseded_coordinator_ends() -> None:
    run = replace(SMALL)
    run.cluster.run(until=0.05)
    first = run.cluster.role(COORDINATOR)
    assert isinstance(first, Coordinator)
    ends: list[rl.Role] = []
    run.cluster.observe(
        lambda happening: (
            ends.append(happening.role)
            if happening.name == COORDINATOR and first._has_ended
            else None
        )
    )
    run.cluster._driver.start(COORDINATOR)
    assert ended(run) is None
    assert run.cluster.role(COORDINATOR) is not first
    assert run.bits == undisturbed(SMALL.chunk_sizes, 2)[0]


def test_nothing_else_can_be_pushed_while_a_coordinator_drives() -> None:
    run = replace(SMALL, latency_seconds=1e-3)
    run.cluster.run(until=0.05)
    stranger = rl.Address("stranger")
    push = wire.Push(sequence=1, term=1, fetched_clock=0, n_gradients=1, samples=1)
    run.tell(SHARDS[0], push, sender=stranger)
    run.tell(SHARDS[0], wire.SaveCheckpoint(label="00001"))
    run.cluster.run(until=0.1)
    (answer,) = (event.message for event in run.cluster.sent_to(stranger))
    assert isinstance(answer, wire.SessionRefused)
    assert answer.for_good
    (saved,) = run.checker.saved
    assert saved.error is not None
    assert "ask it to save" in saved.error


def test_a_link_that_is_slow_makes_no_difference() -> None:
    scene = replace(SMALL, latency_seconds=0.03)
    assert play(scene).coordinator.reason is not None
