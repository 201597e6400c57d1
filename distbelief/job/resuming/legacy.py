"""What former lives of a run left behind.

A run goes on from the newest whole snapshot of each shard by itself. They need not be
of one moment: shards never were (DB-5). The place of each replica in its data is the
least that any shard knows of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from distbelief.errors import RemoteProtocolError, StorageError
from distbelief.job.directory.run_directory import RunDirectory, Status
from distbelief.job.directory.store import SnapshotStore
from distbelief.job.display.view import SupervisorView
from distbelief.job.supervision.figures import Before
from distbelief.parameter_server.copies.copies import shard_of
from distbelief.parameter_server.rules.steps import Steps
from distbelief.roles import Snapshot
from distbelief.runtime.machine.machine_names import member_name, place_of


MEND: Final = (
    "Mend that (permissions, or files from a backup), or begin anew: --from-scratch "
    "(from_scratch=True) keeps these files aside"
)
_SIZE_MAX: Final = 1 << 62
"""More elements than any shard has."""


@dataclass(frozen=True, kw_only=True)
class Legacy:
    """What the next life of a run has to know of those before.

    Attributes:
        before: Figures.
        incarnation: Above all that were used, as far as any snapshot knows of them.
        label: Number of the next snapshot.
        restored: Shards that have a snapshot, with its label.
        missing: Shards that have none.
        trained: Whether any push is in any of the snapshots.
        told: What the user should know of it, a line each.
    """

    before: Before = field(default_factory=Before)
    incarnation: int = 1
    label: int = 1
    restored: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    trained: bool = False
    told: tuple[str, ...] = ()


_SECOND: Final = 2  # label of the second round of snapshots


class _Client(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard's snapshot tells of one client (`parameter_server.snapshots`)."""

    incarnation: int
    samples: int


def read_legacy(
    run: RunDirectory, store: SnapshotStore, *, n_shards: int, coordinator: str | None = None
) -> Legacy:
    """Return what the lives before left in this run directory.

    Args:
        run: The run.
        store: The snapshots of its shards.
        n_shards: How many these are.
        coordinator: The role that drives them, if one does: it counts the samples.

    Raises:
        StorageError: a role has snapshots, or had some, and none can be gone on from.
    """
    incarnation, label = _of_coordinator(store, coordinator), 1
    restored: dict[str, str] = {}
    missing: list[str] = []
    lost: list[str] = []  # what is wrong, of each shard that cannot go on
    clocks: dict[str, int] = {}
    clients: list[dict[str, _Client]] = []  # of each snapshot
    for name in (f"shard-{k}" for k in range(n_shards)):
        try:
            numbers = [int(text) for text in store.labels(name) if text.isdigit()]
            label = max([label, *(number + 1 for number in numbers)])
            snapshot = store.newest(name)
        except StorageError as error:
            lost.append(str(error))
            continue
        if snapshot is None:
            missing.append(name)
            continue
        restored[name] = snapshot.label
        clocks[name] = _pushes(snapshot)
        clients.append(_clients(snapshot))
        lives = [client.incarnation for client in clients[-1].values()]
        lives.append(int(snapshot.facts.get("incarnation", "0")))
        incarnation = max([incarnation, *(life + 1 for life in lives)])
    if label > _SECOND:  # a kill in the first round leaves some shards without one
        lost += [f"{name} has no snapshot in {store.directory}" for name in missing]
    if lost:
        raise StorageError(f"{'; '.join(lost)}. {MEND}")
    known = [{name: c.samples for name, c in of_one.items()} for of_one in clients]
    replicas = {_replica(name) for of_one in known for name in of_one}
    samples = {
        name: 0 if missing else min(_place(of_one, name) for of_one in known)
        for name in sorted(replicas - {""})
    }
    if coordinator is not None:
        samples = {coordinator: 0 if missing else _samples_seen(run)}
    before, told = _before(run, samples, clocks, n_shards=n_shards)
    return Legacy(
        before=before,
        incarnation=incarnation,
        label=label,
        restored=restored,
        missing=tuple(missing),
        trained=any(n for of_one in known for n in of_one.values())
        or (coordinator is not None and bool(restored)),
        told=told,
    )


def _of_coordinator(store: SnapshotStore, coordinator: str | None) -> int:
    """Return a life above all that a coordinator has written of."""
    if coordinator is None:
        return 1
    try:
        snapshot = store.newest(coordinator)
    except StorageError as error:
        directory = store.directory / coordinator
        raise StorageError(
            f"{error}. {MEND}. Or move {directory} away: then the run goes on from "
            "the values of its shards, and the method begins anew there"
        ) from None
    return 1 if snapshot is None else 1 + int(snapshot.facts.get("incarnation", "0"))


def _samples_seen(run: RunDirectory) -> int:
    """Return how many samples there were, as far as was shown.

    The coordinator itself knows better, and says so when it begins.
    """
    try:
        status = run.read_status()
    except StorageError:
        return 0
    return 0 if status is None else status.view.samples


def _before(
    run: RunDirectory, samples: Mapping[str, int], clocks: Mapping[str, int], *, n_shards: int
) -> tuple[Before, tuple[str, ...]]:
    """Return the figures; losses and metric only if the snapshots answer for them.

    Also what the user should know of them.

    Where one is missing, or they are not of all samples that had been counted, no shard
    holds the values that were measured.
    """
    status: Status | None = None
    told: tuple[str, ...] = ()
    try:
        status = run.read_status()
    except StorageError as error:
        told = (f"{error}; time, steps and lost pushes of the lives before are unknown",)
    if status is None:
        # It holds figures only: what to go on with is in the snapshots.
        lost = None if clocks else 0
        return Before(samples=samples, clocks=clocks, pushes_lost=lost), told
    view = status.view
    if len(clocks) < n_shards or view.samples != sum(samples.values()):
        view = replace(view, loss=None, metric=None, held_out_loss=None)
    lost = view.pushes_lost
    if lost is not None:
        lost += _newly_lost(view, clocks, n_shards=n_shards)
    before = Before(
        seconds=view.seconds,
        training_seconds=view.training_seconds,
        step=view.step,
        samples=samples,
        clocks=clocks,
        pushes_applied=view.pushes_applied,
        pushes_lost=lost,
        pushes_refused=view.pushes_refused,
        bytes_in=view.bytes_in,
        bytes_out=view.bytes_out,
        restarts={role.name: role.restarts for role in view.roles if role.restarts},
        loss=view.loss,
        metric=view.metric,
        held_out_loss=view.held_out_loss,
        best_metric=view.best_metric,
        best_metric_seconds=view.best_metric_seconds,
        history=view.history,
    )
    return before, ()


def _newly_lost(view: SupervisorView, clocks: Mapping[str, int], *, n_shards: int) -> int:
    """Return how many pushes were last seen in shards' values, and are not restored.

    Clocks of another number of shards are of other values: then nobody can say.
    """
    shards = {shard_of(r.name) for r in view.roles if r.name.startswith("shard-")}
    if len(shards) != n_shards:
        return 0
    return max(0, view.pushes_applied - min(clocks.values(), default=0))


def _replica(client: str) -> str:
    """Return the role that leads the replica which this client is of; "" if none."""
    place = place_of(client)
    if place is None:
        return client if client.startswith("replica-") else ""
    return member_name(place.group, 0) if place.replica is not None else ""


def _place(samples: Mapping[str, int], replica: str) -> int:
    """Return where in its data a replica is, as far as one shard knows.

    Not every shard has something of every machine, but something of every replica.
    """
    known = [n for client, n in samples.items() if _replica(client) == replica]
    return min(known, default=0)


def _pushes(snapshot: Snapshot) -> int:
    """Return how many pushes are in these values."""
    text = snapshot.facts.get("clock", "")
    clock = int(text) if text.isdecimal() else 0
    try:
        words = msgspec.json.decode(snapshot.facts.get("steps", ""), type=list[int])
        return Steps.read(np.array(words, np.int64), size=_SIZE_MAX).n_pushes
    except (msgspec.MsgspecError, RemoteProtocolError, OverflowError):
        return clock  # written before clients could hold parts


def _clients(snapshot: Snapshot) -> dict[str, _Client]:
    try:
        return msgspec.json.decode(snapshot.facts.get("clients", "{}"), type=dict[str, _Client])
    except msgspec.MsgspecError:
        return {}  # the shard itself will say what is wrong with it
