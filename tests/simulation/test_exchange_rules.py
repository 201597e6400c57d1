"""The papers' rules on waits, rounds and local steps, by key: what a few workers do.

SSP-  bounded staleness (Ho et al. 2013)       PA-  parameter averaging (DL4J)
DP-   Dpplee3                                  HG-  Hogwild (Niu et al. 2011)
X-    checks across systems                    E    invariants of an exchange
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import distbelief
from distbelief.config.presets import PRESETS, expand
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy, Round
from distbelief.parameter_server.rules import UpdateRule
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Fault, Kill, Pause, Slow
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.serve.loops import Server
from tests.simulation import test_downpour as td, test_local_steps as tl
from tests.simulation.exchanges import FIRST, end, lose_first, quartet
from tests.simulation.invariants import shard_in
from tests.simulation.marks import Marks
from tests.simulation.scene import sends
from tests.simulation.workers import STEP, Worker


FOR_EVER: Seconds = 1e6
ADD = distbelief.SGD(learning_rate=1.0)
ASYNCHRONOUS = ExchangePolicy(send="delta")
STEP_SECONDS: Seconds = STEP.flops / 1e10


def ssp(staleness: int) -> ExchangePolicy:
    return ExchangePolicy(send="delta", staleness=staleness)


def rounds(quorum: float = 1.0, grace_seconds: Seconds = 0.0) -> ExchangePolicy:
    return ExchangePolicy(
        send="delta",
        staleness=0 if quorum == 1.0 else None,
        round=Round(quorum=quorum, grace_seconds=grace_seconds),
        weight="mean",
    )


def slow(factor: float) -> Fault:
    return Slow(at=0.0, role=FIRST, factor=factor, seconds=FOR_EVER)


class Begins:
    """When each worker begins its ticks."""

    def __init__(self, scene: Marks) -> None:
        self.at: defaultdict[Address, list[Seconds]] = defaultdict(list)
        self._scene = scene
        scene.cluster.observe(self._see)

    def _see(self, happening: HandledEvent) -> None:
        role = happening.role
        if isinstance(role, Worker) and role.begun > len(self.at[happening.name]):
            self.at[happening.name].append(self._scene.now)

    def longest(self, *, after: Seconds = 0.0) -> Seconds:
        """Return the longest time from one tick to the next one, of all but the first worker."""
        return max(
            later - max(earlier, after)
            for name, times in self.at.items()
            if name != FIRST
            for earlier, later in pairwise(times)
            if later > after
        )


def run(policy: ExchangePolicy, *faults: Fault, n_wanted: int = 8) -> tuple[Begins, Seconds]:
    """Run to the end of all workers but the first one, if there are faults."""
    scene = quartet(policy, *faults, n_wanted=n_wanted)
    begins = Begins(scene)
    end(scene, but=FIRST if faults else None)
    return begins, scene.now


# ------------------------------------------------------------ bounded staleness


def test_a_push_names_the_tick_that_it_ends() -> None:
    """SSP-2: an update committed at clock c is timestamped c, on every shard."""
    scene = quartet(ssp(1), slow(3.0))
    ticks: defaultdict[tuple[Address, Address], dict[int, object]] = defaultdict(dict)

    def see(happening: HandledEvent) -> None:
        for shard, push in sends(happening, pf.Push):
            ticks[happening.name, shard].setdefault(push.sequence, push.tick)

    scene.cluster.observe(see)
    end(scene)
    assert len(ticks) == 8
    assert all(list(told.values()) == list(range(1, 9)) for told in ticks.values())


def test_a_worker_reads_once_its_floor_is_high_enough_and_is_told_at_once() -> None:
    """SSP-6: a read at clock c waits for the clock c - s. SSP-7: the shard answers that.

    It answers as soon as the slowest has ticked: no worker asks again in between.
    """
    staleness = 2
    scene = quartet(ssp(staleness), slow(5.0))
    begins, rises, n_floors = Begins(scene), [0.0], 0

    def see(happening: HandledEvent) -> None:
        nonlocal n_floors
        role, now = happening.role, scene.now
        shard = shard_in(role)
        if shard is not None and shard._sessions.floor.value > len(rises) - 1:
            rises.append(now)
        n_floors += len([*sends(happening, pf.Floor)])
        if isinstance(role, Worker) and any(sends(happening, pf.Fetch)):
            links = role.client._links.values()
            assert all((x.ticks.floor or 0) >= role.client.tick - staleness for x in links)

    scene.cluster.observe(see)
    end(scene)
    assert n_floors >= 3 * 2 * 4  # three that wait, two shards, some ticks
    for name in scene.workers[1:]:
        for tick, at in enumerate(begins.at[name]):
            if tick > staleness and at > 0.5 * begins.at[FIRST][-1]:
                assert at - rises[tick - staleness] < 2e-3, (name, tick)


def test_staleness_0_keeps_step_and_without_a_bound_nobody_waits() -> None:
    """SSP-5: s = 0 is BSP, s = infinity is asynchronous."""
    together, _ = run(ssp(0), slow(5.0))
    for tick in range(1, 8):
        # The slowest has ended its step of this tick before anybody begins the next one.
        first = min(times[tick] for times in together.at.values())
        assert first - together.at[FIRST][tick - 1] > 5.0 * STEP_SECONDS
    _, alone = run(ASYNCHRONOUS)
    _, beside = run(ASYNCHRONOUS, slow(50.0))
    assert beside <= 1.05 * alone


def test_the_staleness_ladder_trades_progress_of_a_step_for_steps_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X-2: steps a second rise with s, progress of a step falls; no gap is above s.

    Four workers of uneven speed each draw the values to a place of their own: a convex problem,
    with the mean of the places as its solution.
    """
    seconds, errors = [], []
    for staleness in (0, 1, 3, None):
        policy = ExchangePolicy(send="delta", staleness=staleness)
        parameters = [nn.Parameter(torch.zeros(8)) for _ in range(4)]
        places = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        server = Server(parameters[:1], rule=ADD, n_shards=1, n_loops=4, policy=policy)
        gaps: list[float] = []

        def loop(
            me: int,
            server: Server = server,
            parameters: Sequence[nn.Parameter] = parameters,
            gaps: list[float] = gaps,
            places: torch.Tensor = places,
        ) -> Callable[[], None]:
            parameter = parameters[me]
            exchange = server.exchange(monkeypatch, torch.optim.SGD([parameter], lr=0.22))
            draw = np.random.default_rng(me)

            def run() -> None:
                for _ in range(10):
                    parameter.grad = parameter.detach() - places[me]
                    server.compute(float(draw.exponential(0.1)))
                    exchange.step()
                    gaps.append(exchange.counters().get("clock_gap", 0.0))
                exchange.finish()

            return run

        server.run_together(*map(loop, range(4)))
        assert max(gaps) <= (math.inf if staleness is None else staleness)
        seconds.append(server.simulation.now)
        errors.append(float((server.values()[0] - places.mean(0)).norm()))
    assert seconds == sorted(seconds, reverse=True)
    assert errors == sorted(errors)
    assert seconds[0] > 1.3 * seconds[-1]
    assert errors[-1] > 2.0 * errors[0]


# ----------------------------------------------------------------------- deaths


@pytest.mark.parametrize("policy", [DOWNPOUR, ASYNCHRONOUS], ids=["downpour", "dpplee3"])
def test_without_waits_the_death_of_a_worker_delays_nobody(policy: ExchangePolicy) -> None:
    """X-4, DP-4, DB-12: nobody hears of it, and the others end as if nothing had been."""
    _, alone = run(policy)
    _, seconds = run(policy, Kill(at=0.032, role=FIRST))
    assert seconds <= alone + STEP_SECONDS


@pytest.mark.parametrize("policy", [ssp(0), ssp(2), rounds()], ids=["bsp", "ssp", "rounds"])
def test_workers_wait_for_a_dead_one_until_it_is_removed(policy: ExchangePolicy) -> None:
    """X-4: s ticks after the death of an SSP worker the others block, unless it is removed.

    So do those of a round (of Horovod, DiLoCo); nothing that they have done is taken back.
    """
    scene = quartet(policy)
    scene.cluster.run(until=0.032)
    n_ended = scene.worker(FIRST).client.tick
    scene.cluster.kill(FIRST)
    scene.cluster.run(until=1.0)
    others = [scene.worker(name) for name in scene.workers[1:]]
    assert 0 < n_ended < 5
    ahead = (policy.staleness or 0) + 1  # the tick begun last, ended or not
    assert {worker.begun - n_ended for worker in others} == {ahead}
    lose_first(scene, at=1.0)
    end(scene, but=FIRST)
    assert {worker.begun for worker in others} == {8}


@pytest.mark.parametrize(
    "fault", [Kill(at=0.03, role=FIRST), Pause(at=0.03, role=FIRST, seconds=3)]
)
def test_with_a_quorum_nobody_waits_longer_than_the_grace(fault: Fault) -> None:
    """X-4, AD-4: with three of four, whether or not anybody hears of the death."""
    grace = 0.05
    undisturbed, _ = run(rounds(quorum=0.75, grace_seconds=grace))
    begins, _ = run(rounds(quorum=0.75, grace_seconds=grace), fault)
    assert begins.longest(after=0.03) < undisturbed.longest() + grace + 1e-3
    assert begins.longest(after=0.03) > grace  # it did wait for the one that is late


@pytest.mark.parametrize("preset", ["diloco", "dl4j-averaging", "ssp", "local", "dpplee3-asgd"])
def test_a_replica_killed_in_mid_round_redoes_at_most_its_local_steps(preset: str) -> None:
    """X-4, HV-3: at most `every` steps; the other replica redoes none."""
    table = {"preset": preset, "loss": td.COUNTING.loss, "batch_size": 4, "max_steps": 30}
    exchange = {"every": 6, "numbers": "float32"}
    settings = msgspec.convert(expand({**table, "exchange": exchange}), DownpourSettings)
    settings = msgspec.structs.replace(settings, blocking=True)
    undisturbed = td.Cluster(td.COUNTING, settings, n_replicas=2)
    undisturbed.run()
    kill = Kill(at=0.5 * undisturbed.ended_at, role=Address("replica-0"), restart_after=0.01)
    cluster = td.Cluster(td.COUNTING, settings, n_replicas=2, faults=[kill])
    lives: dict[tuple[Address, int], Callable[[], int]] = {}

    def see(happening: HandledEvent) -> None:
        if happening.name in cluster.replicas:
            counters = happening.role.program.counters  # type: ignore[attr-defined]
            lives[happening.name, happening.incarnation] = lambda: counters.steps

    cluster.cluster.observe(see)
    cluster.run()
    assert len(lives) == 3
    for index, name in enumerate(cluster.replicas):
        n_steps = sum(steps() for (one, _), steps in lives.items() if one == name)
        n_kept = int(cluster.status(name)["samples"]) // 4
        redone = n_steps - n_kept
        assert redone == 0 if index else 0 < redone <= 6


# ------------------------------------------------------- rounds and their members


def test_a_worker_without_data_is_not_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """PA-3: the sum is divided by the count of results, not by that of workers."""
    policy = ExchangePolicy(send="delta", staleness=0, round=Round(), weight="mean")
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(3)]
    server = Server(parameters[:1], rule=ADD, n_loops=3, policy=policy)

    def loop(me: int, n_steps: int) -> Callable[[], None]:
        exchange = server.exchange(monkeypatch, torch.optim.SGD([parameters[me]], lr=1.0))

        def run() -> None:
            for _ in range(n_steps):
                server.compute(0.1)
                parameters[me].grad = torch.full((8,), -1.0 - me)
                exchange.step()
            exchange.finish()

        return run

    server.run_together(loop(0, 4), loop(1, 4), loop(2, 0))
    assert server.values()[0].tolist() == [4 * 1.5] * 8


# Without rounds, a worker that has pushed nothing yet is taken for one like the first.
@pytest.mark.parametrize(("in_rounds", "total"), [(True, 4.0), (False, 3.5)])
def test_a_push_of_no_samples_does_not_count(
    monkeypatch: pytest.MonkeyPatch, total: float, *, in_rounds: bool
) -> None:
    """PA-3: by samples, a worker whose part is empty moves nothing and holds nothing back.

    Regression: it counted as one of a single sample.
    """
    round_ = Round() if in_rounds else None
    policy = ExchangePolicy(send="delta", staleness=0, round=round_, weight="samples")
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    server = Server(parameters[:1], rule=ADD, n_loops=2, policy=policy)

    def loop(me: int) -> Callable[[], None]:
        exchange = server.exchange(monkeypatch, torch.optim.SGD([parameters[me]], lr=1.0))

        def run() -> None:
            for _ in range(4):
                server.compute(0.1)
                parameters[me].grad = torch.full((8,), -1.0 + me)
                exchange.step(samples=1 - me)
            exchange.finish()

        return run

    server.run_together(loop(0), loop(1))
    assert server.values()[0].tolist() == [total] * 8


# ------------------------------------------------------------------ local steps


@pytest.mark.parametrize("frequency", [3, 2 * 15])
def test_a_push_follows_so_many_batches_or_epochs(frequency: int) -> None:
    """DP-3: after `frequency_num` batches. DP-2: after 2 epochs, of 15 batches each."""
    settings = tl.job(frequency, blocking=True, max_steps=60)
    cluster = td.Cluster(td.LEARNING, settings)
    pushed: dict[int, int] = {}
    fetched: list[int] = []

    def see(happening: HandledEvent) -> None:
        for _, push in sends(happening, pf.Push):
            pushed[push.sequence] = push.samples
        if happening.name in cluster.replicas:
            counters = happening.role.program.counters  # type: ignore[attr-defined]
            if counters.fetches > len(fetched):
                fetched.append(counters.steps)

    cluster.cluster.observe(see)
    cluster.run()
    ends = list(range(frequency, 61, frequency))
    assert list(pushed.values()) == [4 * end for end in ends]
    assert fetched == [0, *ends[:-1]]


@pytest.mark.parametrize(
    "rule",
    [distbelief.SGD(learning_rate=0.5), distbelief.Adagrad(learning_rate=0.5)],
    ids=lambda rule: rule.name,
)
def test_disjoint_supports_give_the_result_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, rule: UpdateRule
) -> None:
    """HG-1: workers that touch elements of their own, in any mixture of their steps, to the bit.

    The shards apply one push after the other, so dense updates are never torn, either.
    """
    found = []
    for in_turn in (True, False):
        parameters = [nn.Parameter(torch.ones(40)) for _ in range(4)]
        server = Server(parameters[:1], rule=rule, n_loops=4)

        def loop(
            me: int, server: Server = server, parameters: Sequence[nn.Parameter] = parameters
        ) -> Callable[[], None]:
            optimizer = server.optimizer(monkeypatch, [parameters[me]])
            draw = torch.Generator().manual_seed(me)
            support = torch.zeros(40)
            support[me::4] = 1.0

            def run() -> None:
                for _ in range(6):
                    server.compute(float(torch.rand((), generator=draw)) * 0.1)
                    values = parameters[me].detach()
                    parameters[me].grad = support * values * torch.rand(40, generator=draw)
                    optimizer.step()
                optimizer.finish()

            return run

        loops = [loop(me) for me in range(4)]
        if in_turn:
            for each in loops:
                each()
        else:
            server.run_together(*loops)
        found.append(server.values()[0])
    assert torch.equal(*found)
    assert (found[0] < 1.0).all()


# ------------------------------------------------------------------- all presets

_PLAIN = {"name": "sgd", "learning_rate": 0.1}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_without_its_difference_is_sgd_on_the_union_of_the_batches(name: str) -> None:
    """X-1: one worker, or a round of means; s = 0; one step; plain optimizers; no codec."""
    table = expand({"preset": name, "loss": td.LEARNING.loss, "batch_size": 4, "max_steps": 30})
    table.pop("lockfree", None)
    is_delta = "inner" in table
    exchange = {**cast("dict[str, object]", table.get("exchange", {}))}
    exchange |= {"every": 1, "staleness": 0, "numbers": "float32", "push": None}
    exchange |= {"route": "server", "fetch": None}
    if exchange.get("round") is not None:
        exchange |= {"round": {}, "weight": "mean"}
    table |= {"exchange": exchange, "blocking": True}
    table |= {"rule": {**_PLAIN, "learning_rate": 1.0} if is_delta else _PLAIN}
    table |= {"inner": {"name": "SGD", "lr": 0.1}} if is_delta else {}
    settings = msgspec.convert(table, DownpourSettings)
    n_replicas = 3 if settings.exchange.round else 1
    cluster = td.Cluster(td.LEARNING, settings, n_replicas=n_replicas, n_shards=2)
    cluster.run()
    union = td.downpour(max_steps=30)
    expected = tl.reference(union, task=td.LEARNING, n_replicas=n_replicas)
    for key, value in cluster.values().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def test_preset_downpour_is_what_there_is_without_one() -> None:
    """E13: the same settings, so the same bits; `test_golden` compares those of former versions."""
    given = {"loss": "mse", "batch_size": 4}
    preset = msgspec.convert(expand({**given, "preset": "downpour"}), DownpourSettings)
    rule = {"name": "adagrad", "learning_rate": 0.02}
    assert preset == msgspec.convert({**given, "rule": rule}, DownpourSettings)
    assert preset.exchange == DOWNPOUR
    assert not preset.exchange.counts_ticks
