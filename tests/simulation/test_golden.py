"""Sixty simulated runs, each against the figures that were recorded for it.

`make test` plays the first third of each family, `make soak` the others.

They show that a change which only moves and renames things changes nothing else. If
what the system does is meant to change, record anew, and say why:

    python -m tests.simulation.test_golden --record

No figure depends on what classes, fields, modules or log lines are called: headers of
messages, where such names travel, have no size here. Nor does any depend on real time
or the order of a set. The bits of trained values depend on the processor: they are
compared where every operation of the run rounds as it did where it was recorded, and
elsewhere the values are, within a tolerance.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from distbelief.config.job import StopTable
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.rules import SGD
from distbelief.protocol.role import Address, Computed, Role, Send
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Kill, Pause
from distbelief.simulation.network import Encoded
from distbelief.worker.group import rank_name
from sandblaster.chunks import COORDINATOR
from tests.simulation import sandblasts, scenarios, split_scenes
from tests.simulation.groups import Group
from tests.simulation.jobs import JobCluster, scattered
from tests.simulation.kernels import Operations, digest, rounding
from tests.simulation.random_faults import random_faults
from tests.simulation.test_downpour import downpour
from tests.simulation.test_machines import COUNTING, faults_of
from tests.simulation.workers import Unreadable


FILE = Path(__file__).with_name("golden.json")

Figures = dict[str, object]
"""What is recorded of a run; JSON knows every type in it.

values      SHA-256 of all parameters at the end, in the order of the layout: those of
            the copies that lead, or of a job's last snapshots
near        their norm, and three sums of them with drawn signs
pushes      applied by shards, both copies of each, in all their lives
fetches     read by clients, torn ones too
restarts    of each role that has had more lives than one
messages    sent
bytes       of arrays in messages
copied      bytes that clients have read and pushed, through shared memory as well
seconds     of virtual time until the last event, to the microsecond
"""


class Watch:
    """Sees every event of a cluster, and says at the end what there was."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._lives: dict[tuple[Address, int], Role] = {}
        self._n_fetches = 0
        self._seconds = 0.0
        cluster.observe(self._see)

    def _see(self, happening: HandledEvent) -> None:
        self._lives[happening.name, happening.incarnation] = happening.role
        self._seconds = self._cluster.now
        event = happening.event
        if isinstance(event, Computed) and isinstance(event.result, FetchResult):
            self._n_fetches += 1

    def figures(self, values: Vector) -> Figures:
        assert values.any(), "no role holds the values any more"
        traffic = self._cluster.traffic
        names = sorted({name for name, _ in self._lives})
        restarts = {name: self._cluster.incarnation(name) - 1 for name in names}
        return {
            "values": hashlib.sha256(values.tobytes()).hexdigest(),
            "near": near(values),
            "pushes": self._sum("pushes_applied", of_shards=True),
            "fetches": self._n_fetches,
            "restarts": {name: n for name, n in restarts.items() if n},
            "messages": traffic.messages,
            "bytes": int(traffic.n_bytes),
            "copied": self._sum("bytes_in", of_shards=False)
            + self._sum("bytes_out", of_shards=False),
            "seconds": round(self._seconds, 6),
        }

    def _sum(self, counter: str, *, of_shards: bool) -> int:
        """Return the sum of a counter over all lives of shards, or of the others."""
        return sum(
            int(role.status()[1].get(counter, 0))
            for (name, _), role in self._lives.items()
            if name.startswith("shard") == of_shards
        )


def near(values: Vector) -> list[float]:
    signs = np.random.default_rng(1).choice([-1.0, 1.0], size=(3, len(values)))
    exact = values.astype(np.float64)
    return [float(f"{x:.13g}") for x in (np.linalg.norm(exact), *(signs * exact).sum(axis=1))]


@contextmanager
def headers_without_size() -> Iterator[None]:
    """Let time and bytes be those of arrays alone: headers name classes and fields."""
    encode = Encoded.sent

    def sent(post: Encoded, action: Send, *, sender: Address, incarnation: int) -> object:
        payload = encode(post, action, sender=sender, incarnation=incarnation)
        post.size = 0, post.size[1]
        return payload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoded, "sent", sent)
        yield


# ---------------------------------------------------------------------------- families


def marks(seed: int) -> Figures:
    """Workers without a model, shards of one copy (even seeds) or two, any fault."""
    scenario = scenarios.scenario_of(seed)
    scenario.trace = "order"
    with scenarios.set_for(scenario):
        watch = Watch(scenario.cluster)
        scenario.run()
    shards = [scenario.shard(scenario.leader(index)) for index in range(scenario.n_shards)]
    vectors = [Unreadable.read(shard.values) for shard in shards]
    return watch.figures(torch.cat([*scattered(scenario.layout, vectors).values()]).numpy())


def marks_one_copy(index: int) -> Figures:
    return marks(2 * index)


def marks_two_copies(index: int) -> Figures:
    return marks(2 * index + 1)


def job(seed: int, *, n_copies: int) -> Figures:
    """A whole Downpour job; its supervisor restarts those that die."""
    run = JobCluster(
        stop=StopTable(samples=500),
        seed=seed,
        shard_copies=n_copies,
        warm_start_steps=5 * (seed % 2),
        host="" if seed % 4 == 1 else "host-0",
    )
    watch = Watch(run.cluster)
    roles = [*run.copies, *run.replicas, Address("evaluator")]
    faults = random_faults(seed, roles, horizon=8.0, intensity=0.4, restarts=False)
    victim = roles[seed % len(roles)]
    kill = Kill(at=2.0 + 0.2 * seed, role=victim)
    # Long enough for its second copy to take over; or to be ended, if it has none.
    seconds = 2.0 + 0.3 * seed if n_copies == 2 else 12.0
    pause = Pause(at=1.5 + 0.1 * seed, role=run.copies[0], seconds=seconds)
    for fault in (*faults, kill, *([pause] if seed % 4 >= 2 else [])):
        run.cluster.inject(fault)
    assert run.run(within=600.0) is None
    return watch.figures(torch.cat([*run.saved().values()]).numpy())


def job_one_copy(seed: int) -> Figures:
    return job(seed, n_copies=1)


def job_two_copies(seed: int) -> Figures:
    return job(seed, n_copies=2)


def split(seed: int) -> Figures:
    """A Downpour replica of two to four machines, of which one at least dies."""
    n_machines = 2 + seed % 3
    names = [rank_name(0, m) for m in range(n_machines)]
    victim = names[seed % n_machines]
    kill = Kill(at=0.002 + 0.001 * seed, role=victim, restart_after=0.05)
    run = Group(
        COUNTING,
        downpour(
            max_steps=30, loss=COUNTING.loss, rule=SGD(learning_rate=1.0), n_push=1 + seed // 3 % 2
        ),
        inputs=(200,),
        n_machines=n_machines,
        n_shards=1 + seed % 2,
        plan_seed=seed,
        host="host-0" if seed % 2 else "",
        seed=seed,
        faults=(*faults_of(seed, names), kill),
    )
    watch = Watch(run.cluster)
    run.run()
    return watch.figures(torch.cat([*run.values().values()]).numpy())


def lbfgs(seed: int, *, warm_steps: int = 0) -> Figures:
    """L-BFGS by whole replicas; replicas, shards or the coordinator die."""
    scene = sandblasts.drawn(seed)
    roles = [COORDINATOR, *scene.replicas, *scene.shards]
    kill = Kill(at=0.005 + 0.003 * seed, role=roles[seed % len(roles)], restart_after=0.01)
    faults = (*scene.faults, kill)
    run = replace(scene, faults=faults, warm_steps=warm_steps, trace="order")
    watch = Watch(run.cluster)
    run.play()
    return watch.figures(np.frombuffer(run.bits))


def lbfgs_after_downpour(seed: int) -> Figures:
    return lbfgs(seed, warm_steps=5)


def lbfgs_split(seed: int) -> Figures:
    """L-BFGS by replicas of several machines; these, shards or the coordinator die."""
    scene = split_scenes.drawn(seed)
    roles = [COORDINATOR, *scene.shards, *scene.replicas]
    kill = Kill(at=0.005 + 0.003 * seed, role=roles[seed % len(roles)], restart_after=0.01)
    run = replace(scene, faults=(*scene.faults, kill))
    watch = Watch(run.cluster)
    run.play()
    return watch.figures(np.frombuffer(run.bits_of(buffers=True)))


class Family(NamedTuple):
    play: Callable[[int], Figures]
    n_seeds: int
    tolerance: float  # of rounding; 0 for sums of whole numbers, which no processor rounds


FAMILIES = {
    "marks": Family(marks_one_copy, 7, tolerance=0.0),
    "marks-two-copies": Family(marks_two_copies, 9, tolerance=0.0),
    "downpour": Family(job_one_copy, 8, tolerance=3e-4),
    "downpour-two-copies": Family(job_two_copies, 8, tolerance=3e-4),
    "downpour-split": Family(split, 8, tolerance=0.0),
    "lbfgs": Family(lbfgs, 9, tolerance=1e-9),
    "lbfgs-after-downpour": Family(lbfgs_after_downpour, 5, tolerance=1e-9),
    "lbfgs-split": Family(lbfgs_split, 6, tolerance=1e-9),
}
CASES = [(name, seed) for name, f in FAMILIES.items() for seed in range(f.n_seeds)]


KEYS = [f"{family}-{seed}" for family, seed in CASES]


def played(family: str, seed: int) -> Figures:
    with headers_without_size():
        return FAMILIES[family].play(seed)


# ------------------------------------------------------------------------- the records


def operations(family: str, seed: int) -> set[str]:
    """Return those of a case that has been played before: what it keeps is there by now."""
    noted = Operations()
    with noted:
        played(family, seed)
    return noted.seen


def record() -> None:
    """Write down the figures of all cases, one line each, and how their operations round."""
    torch.set_num_threads(1)  # as in tests
    cases, kernels = [], []
    for key, case in zip(KEYS, CASES, strict=True):
        cases.append(f"  {json.dumps(key)}: {json.dumps(played(*case))}")
        if FAMILIES[case[0]].tolerance:
            seen = operations(*case)
            digests = digest(seen), digest(set(map(rounding, seen)))
            kernels.append(f"  {json.dumps(key)}: {json.dumps(digests)}")
    parts = [
        f'"{name}": {{\n' + ",\n".join(lines) + "\n}"
        for name, lines in (("cases", cases), ("kernels", kernels))
    ]
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def recorded() -> tuple[dict[str, Figures], dict[str, tuple[str, str]]]:
    """Return the figures of each case; digests of its operations, and of how they round."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content["cases"], content["kernels"]


def rounds_otherwise(family: str, seed: int) -> bool:
    """Return whether the operations of a case are those recorded, and round otherwise."""
    known, roundings = recorded()[1][f"{family}-{seed}"]
    seen = operations(family, seed)
    return digest(seen) == known and digest(set(map(rounding, seen))) != roundings


def marks_of(family: str, seed: int) -> list[pytest.MarkDecorator]:
    """Leave two thirds of each family to the soak; the first case of a split one is slow."""
    is_later = seed >= (FAMILIES[family].n_seeds + 2) // 3
    return [pytest.mark.soak] * is_later + [pytest.mark.slow] * ("split" in family)


PARAMETERS = [pytest.param(*case, marks=marks_of(*case)) for case in CASES]


@pytest.mark.parametrize(("family", "seed"), PARAMETERS, ids=KEYS)
def test_a_run_has_the_recorded_figures(family: str, seed: int) -> None:
    key = f"{family}-{seed}"
    expected, found = recorded()[0][key], played(family, seed)
    names = {*expected, *found} - {"near"}
    wrong = {name for name in names if found.get(name) != expected.get(name)}
    tolerance = FAMILIES[family].tolerance
    if tolerance and "values" in wrong and rounds_otherwise(family, seed):
        here, there = np.array(found["near"]), np.array(expected["near"])
        if (abs(here - there) <= tolerance * there[0]).all():
            wrong.remove("values")
    assert not wrong, "; ".join(
        f"{name} is {found.get(name)}, recorded {expected.get(name)}" for name in sorted(wrong)
    )


def kind_of(role: str) -> str:
    if "." in role:
        return "machine 0" if role.endswith(".0") else "another machine"
    return "second copy" if role.endswith("b") else role.partition("-")[0]


def test_roles_of_every_kind_have_died() -> None:
    cases = recorded()[0]
    assert list(cases) == KEYS
    died: dict[str, set[str]] = {}
    for key, figures in cases.items():
        restarts = figures["restarts"]
        assert isinstance(restarts, dict)
        died.setdefault(key.rpartition("-")[0], set()).update(map(kind_of, restarts))
    machines = {"machine 0", "another machine"}
    assert died == {
        "marks": {"shard", "worker"},
        "marks-two-copies": {"shard", "second copy", "worker"},
        "downpour": {"shard", "replica", "evaluator"},
        "downpour-two-copies": {"shard", "second copy", "replica", "evaluator"},
        "downpour-split": machines,
        "lbfgs": {"shard", "replica", "coordinator"},
        "lbfgs-after-downpour": {"shard", "replica", "coordinator"},
        "lbfgs-split": {"shard", "coordinator"} | machines,
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit(f"--record writes {FILE.name}; pytest compares with it")
    record()
