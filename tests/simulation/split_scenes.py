"""Scenes of a small Sandblaster cluster with model-parallel replicas.

drawn(seed)     whatever a seed stands for
directed        a fault at a named place
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from distbelief.protocol import Assignment, Message, PushChunk
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import CutOff, Kill, Pause, TornSnapshot
from distbelief.worker.group import rank_name
from sandblaster.chunks import COORDINATOR
from tests.simulation.random_faults import random_faults
from tests.simulation.scene import heard
from tests.simulation.split_sandblasts import SplitSandblast


HORIZON: Seconds = 0.1  # by then everything has healed
LEADER, WORKER = rank_name(0, 0), rank_name(0, 1)


def hit(scene: SplitSandblast, *, with_shards: bool) -> Sequence[Address]:
    """Return the roles that faults may hit."""
    return [*scene.replicas, COORDINATOR, *(scene.shards if with_shards else [])]


def drawn(seed: int) -> SplitSandblast:
    stream = np.random.default_rng([seed, 0x5917])
    scene = SplitSandblast(
        seed=seed,
        plan_seed=int(stream.integers(4)),
        n_machines=int(stream.integers(1, 4)),
        n_shards=int(stream.integers(1, 4)),
        n_replicas=int(stream.integers(1, 4)),
        micro_batches=int(stream.choice([1, 1, 2])),
        backups=bool(stream.random() < 0.8),
        hosts=str(stream.choice(["one", "own"])),
        latency_seconds=float(stream.choice([2e-5, 2e-4, 2e-3])),
    )
    roles = hit(scene, with_shards=bool(stream.random() < 0.3))
    intensity = float(stream.uniform(0.2, 1.2))
    faults = random_faults(seed, roles, horizon=HORIZON, intensity=intensity)
    # A disk that loses a snapshot of one shard only ends the run.
    kept = tuple(
        fault
        for fault in faults
        if not isinstance(fault, TornSnapshot) or fault.role not in scene.shards
    )
    return replace(scene, faults=kept)


def play(scene: SplitSandblast, *, within: Seconds = 300.0) -> SplitSandblast:
    """SplitSandblast a scene under every check; return the run."""
    plain = scene.undisturbed  # first, because the run itself may be broken on purpose
    run = replace(scene)
    run.play(within=within)
    incarnation = run.cluster.incarnation
    run.checker.sights["machines restarted"] = sum(incarnation(r) - 1 for r in scene.replicas)
    run.checker.sights["shards restarted"] = sum(incarnation(s) - 1 for s in scene.shards)
    if run.checker.sights["shards restarted"]:
        assert run.checker.losses[-1] <= plain.checker.losses[0]
    else:
        alone = incarnation(COORDINATOR) == 1
        assert run.bits_of(buffers=alone) == plain.bits_of(buffers=alone), (
            "it has ended somewhere else"
        )
        assert set(run.checker.losses) <= set(plain.checker.losses), "losses of another run"
    return run


# ---------------------------------------------------------------------------- directed


def moment(scene: SplitSandblast, receiver: Address, kind: type[Message]) -> Seconds:
    """Return when this role first gets a message of this kind."""

    def happens(happening: HandledEvent) -> bool:
        return happening.name == receiver and heard(happening.event, kind) is not None

    return scene.moments(happens)[0]


@cache
def dies_with_its_part() -> SplitSandblast:
    """A rank of the only replica dies as it may push its part of a sum."""
    scene = SplitSandblast(n_replicas=1, hosts="own")
    at = moment(scene, WORKER, PushChunk) + 1e-6
    return replace(scene, faults=(Kill(at=at, role=WORKER, restart_after=0.01),))


@cache
def stands_still() -> SplitSandblast:
    """A rank pauses for a minute; the other replica could do its chunks."""
    scene = SplitSandblast(backups=False)
    at = moment(scene, LEADER, Assignment) + 1e-4
    return replace(scene, faults=(Pause(at=at, role=WORKER, seconds=60.0),))


@cache
def not_told_to_push() -> SplitSandblast:
    """The first push request of the only replica is lost."""
    scene = SplitSandblast(n_replicas=1)
    at = moment(scene, WORKER, PushChunk) - 1e-5
    cut = CutOff(at=at, a=LEADER, b=WORKER, seconds=2e-5, loses=True, one_way=True)
    return replace(scene, faults=(cut,))


@cache
def half_pushed() -> SplitSandblast:
    """A rank's push reaches one of its shards, and the other much later."""
    scene = SplitSandblast(hosts="own")
    at = moment(scene, WORKER, PushChunk) - 1e-5
    cut = CutOff(at=at, a=WORKER, b=scene.shards[1], seconds=0.2, loses=True)
    return replace(scene, faults=(cut,))
