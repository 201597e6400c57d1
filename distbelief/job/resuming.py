"""What former lives of a run left behind, and whether a job can go on from it.

A run goes on from the newest whole snapshot of each shard by itself. They need not be
of one moment: shards never were (DB-5). The place of each replica in its data is the
least that any shard knows of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from distbelief.errors import JobError
from distbelief.job.figures import Before
from distbelief.job.run_directory import RunDirectory
from distbelief.job.sections import Job
from distbelief.job.store import SnapshotStore
from distbelief.roles import Snapshot


@dataclass(frozen=True, kw_only=True)
class Legacy:
    """What the next life of a run has to know of those before.

    Attributes:
        before: Figures.
        incarnation: Above all that were used, as far as any snapshot knows of them.
        label: Number of the next snapshot.
        restored: Shards that have a snapshot, with its label.
        missing: Shards that have none.
    """

    before: Before = field(default_factory=Before)
    incarnation: int = 1
    label: int = 1
    restored: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


class _Client(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard's snapshot tells of one client (`parameter_server.snapshots`)."""

    incarnation: int
    samples: int


_CHANGED: Final = {
    "model": "[model]: the snapshots are of another model",
    "replicas": "[cluster] replicas: each has its own part of the data",
    "shards": "[cluster] shards: the snapshots are cut for another number",
    "rule": "[algorithm] rule: its state in the snapshots is of another kind",
    "algorithm": "[algorithm] name: the snapshots are another algorithm's",
}


def check_same(job: Job, earlier: Job, *, directory: str) -> None:
    """Refuse to go on with what the snapshots do not fit.

    Raises:
        JobError: naming what has changed, and both values.
    """
    for key, why in _CHANGED.items():
        was, now = _of(earlier, key), _of(job, key)
        if was != now:
            raise JobError(
                f"--resume {directory}: the run cannot go on with a changed {why} "
                f"(it was {was}, now {now}). Leave it as it was, or begin a new run"
            )


def read_legacy(run: RunDirectory, store: SnapshotStore, *, n_shards: int) -> Legacy:
    """Return what the lives before left in this run directory."""
    incarnation, label = 1, 1
    restored: dict[str, str] = {}
    missing: list[str] = []
    samples: dict[str, int] = {}
    for name in (f"shard-{k}" for k in range(n_shards)):
        numbers = [int(text) for text in store.labels(name) if text.isdigit()]
        label = max([label, *(number + 1 for number in numbers)])
        snapshot = store.newest(name)
        if snapshot is None:
            missing.append(name)
            continue
        restored[name] = snapshot.label
        clients = _clients(snapshot)
        lives = [client.incarnation for client in clients.values()]
        lives.append(int(snapshot.facts.get("incarnation", "0")))
        incarnation = max([incarnation, *(life + 1 for life in lives)])
        for client, facts in clients.items():
            known = samples.get(client, facts.samples)
            samples[client] = min(known, facts.samples)
    replicas = {
        client: 0 if missing else n
        for client, n in samples.items()
        if client.startswith("replica-")
    }
    return Legacy(
        before=_before(run, replicas),
        incarnation=incarnation,
        label=label,
        restored=restored,
        missing=tuple(missing),
    )


def _before(run: RunDirectory, samples: Mapping[str, int]) -> Before:
    status = run.read_status()
    if status is None:
        return Before(samples=samples)
    view = status.view
    return Before(
        seconds=view.seconds,
        training_seconds=view.training_seconds,
        step=view.step,
        samples=samples,
        loss=view.loss,
        metric=view.metric,
        held_out_loss=view.held_out_loss,
        best_metric=view.best_metric,
        best_metric_seconds=view.best_metric_seconds,
        history=view.history,
    )


def _clients(snapshot: Snapshot) -> dict[str, _Client]:
    try:
        return msgspec.json.decode(
            snapshot.facts.get("clients", "{}"), type=dict[str, _Client]
        )
    except msgspec.MsgspecError:
        return {}  # the shard itself will say what is wrong with it


def _of(job: Job, key: str) -> object:
    match key:
        case "model":
            return job.model
        case "replicas":
            return job.cluster.replicas
        case "shards":
            return job.cluster.shards
        case "rule":
            return getattr(getattr(job.algorithm, "rule", None), "name", None)
        case _:
            return job.algorithm_name
