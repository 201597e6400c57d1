"""Whether a job can go on with a run, and how.

As it was, it goes on exactly where it stood (`legacy`). With other numbers of shards or
replicas it goes on too: its snapshots are cut anew (`cuts`, `recutting`), and if the
replicas are others, each begins after the same share of its own part of the data
(`data.subset`). With another model, rule or algorithm it does not go on, nor, once
anything was trained, with other data: then neither values nor places would mean what
they did.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np

from distbelief.config import toml
from distbelief.config.algorithms import coordinator_of
from distbelief.config.job import Job, Processes
from distbelief.config.load import load_job
from distbelief.core import files
from distbelief.data.sharding import fresh_positions
from distbelief.errors import JobError, RemoteProtocolError, StorageError
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.optimizers import StepCounts, UpdateRule
from distbelief.parameter_server.replication import shard_of
from distbelief.program.plan import Plan
from distbelief.roles.role import Snapshot
from distbelief.run.checkpoints import CheckpointStore, set_aside
from distbelief.run.directory import RunDirectory, Status
from distbelief.run.reshard import Resharder
from distbelief.run.summary import DataFacts, read_summary
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.view import JobView
from distbelief.worker.group import group_rank_of, member_name, rank_name


# Cuts: for how many shards and replicas the snapshots of a run are, of which data.
#
#     snapshots/cut.json, snapshots/shard-K/              as the run began
#     snapshots/cut-00012/cut.json, .../shard-K/          since it went on with others
#
# Rules:
#
# * The newest cut is in use; its number is that of its first snapshots.
# * A cut is whole or not there: it is written under a name that nobody reads, read back,
#   then renamed. Whatever ends it half-way leaves the run as it was.
# * The cuts before it stay as they are.

_FILE: Final = "cut.json"
_DIRECTORY: Final = re.compile(r"cut-(\d{1,18})")
_SNAPSHOT: Final = re.compile(r"/shard-(\d{1,18})/[^/]+\.safetensors$")


@final
class CheckpointSet(msgspec.Struct, frozen=True, kw_only=True):
    """Content of cut.json: what the snapshots beside it mean.

    Attributes:
        n_shards: Which together hold the model.
        n_replicas: Among which the data were divided.
        n_machines: Of each replica, by whose plan they are split; None if they are not.
        plan: Mark of who computes what in a replica that is split (`mark_of`).
        train: The training data, as far as anybody looked at them.
    """

    n_shards: Processes
    n_replicas: Processes
    n_machines: Processes | None = None
    plan: str | None = None
    train: DataFacts | None = None

    def is_cut_like(self, other: "CheckpointSet") -> bool:
        """Return whether each client of one finds in the other what it needs.

        A machine that holds other tensors than before does not, though its name is the
        same: shards count for each client how far it has come.
        """
        has_other_plan = None not in {self.plan, other.plan} and self.plan != other.plan
        return self.numbers == other.numbers and not has_other_plan

    @property
    def numbers(self) -> tuple[int, int, int | None]:
        """Of shards, of replicas, and of the machines of each."""
        return self.n_shards, self.n_replicas, self.n_machines

    @property
    def replicas(self) -> list[str]:
        """The names of the roles that lead a replica, or are one."""
        if self.n_machines is None:
            return [f"replica-{r}" for r in range(self.n_replicas)]
        return [rank_name(r, 0) for r in range(self.n_replicas)]

    def clients(self, places: Mapping[str, int]) -> dict[str, int]:
        """Return the place of each client, given that of each of `replicas`."""
        if self.n_machines is None:
            return dict(places)
        return {
            rank_name(r, machine): places[name]
            for r, name in enumerate(self.replicas)
            for machine in range(self.n_machines)
        }


def mark_of(plan: Plan) -> str:
    """Return the same for all plans by which machines hold the same."""
    placed = [[name, plan.placements[name]] for name in sorted(plan.placements)]
    return hashlib.blake2b(msgspec.json.encode(placed), digest_size=8).hexdigest()


def newest_checkpoint_set(run: RunDirectory) -> tuple[Path, CheckpointSet | None]:
    """Return the cut in use: its directory, and what it is; None of a new run.

    Raises:
        JobFileError: the run's job file, of which an old run's cut is known, is wrong.
        StorageError: the file that tells of it is damaged, or cannot be true; or all
            that was saved is gone.
    """
    made = max(_directories(run.snapshots), default=None)
    directory = run.snapshots if made is None else made[1]
    file = directory / _FILE
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        if run.job_file.is_file() and not any(directory.glob("*/*.safetensors")):
            raise StorageError(
                f"{directory} holds nothing of this run, which has begun: put it back, "
                "or begin anew with --from-scratch (from_scratch=True)"
            ) from None
        return directory, _cut_of_job(run)
    except OSError as error:
        raise files.explained(error, file, doing="read") from error
    cut = checkpoint_set_in(content, file, run)
    beyond = _shards_beyond(directory, cut.n_shards)
    if beyond:
        names = ", ".join(beyond)
        raise _distrusted(
            file, run, f"n_shards is {cut.n_shards}, but there are snapshots of {names}"
        )
    return directory, cut


def checkpoint_set_in(content: bytes, file: Path, run: RunDirectory) -> CheckpointSet:
    """Return the cut that stands in cut.json.

    Args:
        content: Of the file.
        file: For messages.
        run: Likewise.

    Raises:
        StorageError: it is damaged.
    """
    try:
        return msgspec.json.decode(content, type=CheckpointSet)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _distrusted(file, run, str(error)) from None


def write_checkpoint_set(directory: Path, cut: CheckpointSet) -> None:
    """Say what the snapshots in this directory are.

    Raises:
        StorageError: it cannot be written.
    """
    files.write(directory / _FILE, msgspec.json.encode(cut))


@contextmanager
def making_checkpoint_set(
    run: RunDirectory, number: int, cut: CheckpointSet
) -> Iterator[tuple[Path, Path]]:
    """Make a new cut in a `with` block; it is in use once the block has ended well.

    Args:
        run: Whose it is.
        number: Above that of every cut and every snapshot before.
        cut: What it is.

    Yields:
        Where the block is to write its snapshots, and where they will be found.

    Raises:
        StorageError: it cannot be written; then the one before stays in use.
    """
    final_place = _directory(run.snapshots, number)
    place = final_place.with_suffix(files.TEMPORARY)
    try:
        for left in run.snapshots.glob(f"cut-*{files.TEMPORARY}"):
            shutil.rmtree(left)
        place.mkdir(parents=True)
        yield place, final_place
        write_checkpoint_set(place, cut)  # this forces the directory to the disk, too
        place.rename(final_place)
        files.force(run.snapshots)
    except OSError as error:
        raise files.explained(error, place, doing="write") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _distrusted(file: Path, run: RunDirectory, why: str) -> StorageError:
    return StorageError(
        f"{file} is damaged ({why}): without it nobody knows what the snapshots beside "
        f"it are of. If [cluster] in {run.job_file} has the numbers of shards and "
        f"replicas that the run had last, remove {file.name}, and those count"
    )


def _shards_beyond(directory: Path, n_shards: int) -> list[str]:
    """Return the shards with snapshots here that a cut of so many does not have."""
    found = {int(m[1]) for p in directory.glob("*/*") if (m := _SNAPSHOT.search(str(p)))}
    return [f"shard-{k}" for k in sorted(found) if k >= n_shards]


def _directory(snapshots: Path, number: int) -> Path:
    return snapshots / f"cut-{number:05d}"


def _directories(snapshots: Path) -> Iterator[tuple[int, Path]]:
    if not snapshots.is_dir():
        return
    for path in snapshots.iterdir():
        found = _DIRECTORY.fullmatch(path.name)
        if found is not None and path.is_dir():
            yield int(found[1]), path


def _cut_of_job(run: RunDirectory) -> CheckpointSet | None:
    """Return the cut of a run that was made when nobody wrote it down."""
    if not run.job_file.is_file():
        return None
    cluster = load_job(run.job_file).cluster
    train = None
    try:
        summary = read_summary(run)
    except StorageError:
        summary = None  # it is only a second source
    if summary is not None:
        train = summary.train
    return CheckpointSet(n_shards=cluster.shards, n_replicas=cluster.replicas, train=train)


# What former lives of a run left behind.
#
# A run goes on from the newest whole snapshot of each shard by itself. They need not be
# of one moment: shards never were (DB-5). The place of each replica in its data is the
# least that any shard knows of it.

MEND: Final = (
    "Mend that (permissions, or files from a backup), or begin anew: --from-scratch "
    "(from_scratch=True) keeps these files aside"
)
_SIZE_MAX: Final = 1 << 62
"""More elements than any shard has."""


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
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

    before: PreviousTotals = field(default_factory=PreviousTotals)
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


def read_previous_run(
    run: RunDirectory, store: CheckpointStore, *, n_shards: int, coordinator: str | None = None
) -> PreviousRun:
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
    return PreviousRun(
        before=before,
        incarnation=incarnation,
        label=label,
        restored=restored,
        missing=tuple(missing),
        trained=any(n for of_one in known for n in of_one.values())
        or (coordinator is not None and bool(restored)),
        told=told,
    )


def _of_coordinator(store: CheckpointStore, coordinator: str | None) -> int:
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
) -> tuple[PreviousTotals, tuple[str, ...]]:
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
        return PreviousTotals(samples=samples, clocks=clocks, pushes_lost=lost), told
    view = status.view
    if len(clocks) < n_shards or view.samples != sum(samples.values()):
        view = replace(view, loss=None, metric=None, held_out_loss=None)
    lost = view.pushes_lost
    if lost is not None:
        lost += _newly_lost(view, clocks, n_shards=n_shards)
    before = PreviousTotals(
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


def _newly_lost(view: JobView, clocks: Mapping[str, int], *, n_shards: int) -> int:
    """Return how many pushes were last seen in shards' values, and are not restored.

    Clocks of another number of shards are of other values: then nobody can say.
    """
    shards = {shard_of(r.name) for r in view.roles if r.name.startswith("shard-")}
    if len(shards) != n_shards:
        return 0
    return max(0, view.pushes_applied - min(clocks.values(), default=0))


def _replica(client: str) -> str:
    """Return the role that leads the replica which this client is of; "" if none."""
    place = group_rank_of(client)
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
        return StepCounts.read(np.array(words, np.int64), size=_SIZE_MAX).n_pushes
    except (msgspec.MsgspecError, RemoteProtocolError, OverflowError):
        return clock  # written before clients could hold parts


def _clients(snapshot: Snapshot) -> dict[str, _Client]:
    try:
        return msgspec.json.decode(snapshot.facts.get("clients", "{}"), type=dict[str, _Client])
    except msgspec.MsgspecError:
        return {}  # the shard itself will say what is wrong with it


Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run that a job can go on with.

    Attributes:
        legacy: What is left of it.
        store: The snapshots of its shards, cut as the job wants them.
        told: What the user should know of it, a line each.
    """

    legacy: PreviousRun
    store: CheckpointStore
    told: tuple[str, ...] = ()


_CHANGED: Final = {
    "model": "[model]: the snapshots are of another model",
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


def resume_run(
    job: Job,
    run: RunDirectory,
    *,
    layout: Layout,
    train: DataFacts,
    report: Report,
    plan: Plan | None = None,
) -> Resumed:
    """Make this run, new or not, one that the job can go on with.

    Args:
        job: The job; `check_same` has nothing against it.
        run: The run, whose job file still is that of its last life.
        layout: Of the model on the job's shards.
        train: The training data.
        report: Told of each damaged snapshot.
        plan: By which each replica is split over machines; None if they are not.

    Raises:
        JobError: the data are others, or what would have to be cut anew is not there.
        StorageError: the run's files cannot be read or written; it is as it was.
    """
    directory, was = newest_checkpoint_set(run)
    now = CheckpointSet(
        n_shards=job.cluster.shards,
        n_replicas=job.cluster.replicas,
        n_machines=None if plan is None else plan.cluster.n_machines,
        plan=None if plan is None else mark_of(plan),
        train=train,
    )
    was = was or now
    store = CheckpointStore(directory, report=report)
    coordinator = coordinator_of(job)
    told = () if coordinator is None else _set_aside(store, was)
    legacy = read_previous_run(run, store, n_shards=was.n_shards, coordinator=coordinator)
    told += legacy.told
    if legacy.trained:
        _check_data(job, run, was=was.train, now=train)
    if coordinator is not None and was.n_shards == now.n_shards:
        was = now  # replicas that are driven have no places of their own
    if not was.is_cut_like(now):
        if any(store.labels(f"shard-{k}") for k in range(was.n_shards)):
            change = _Change(job=job, run=run, was=was, now=now, n_samples=train.n_samples)
            resumed = change.recut(legacy, store, layout=layout, report=report)
            return replace(resumed, told=told + resumed.told)
        # Of what was never saved, anything can be made.
        legacy = read_previous_run(run, store, n_shards=now.n_shards, coordinator=coordinator)
    write_checkpoint_set(directory, now)
    told += tuple(_told_of_seed(job, run)) if legacy.trained else ()
    if legacy.restored and legacy.missing:
        names = ", ".join(legacy.missing)
        line = (
            f"{names}: no whole snapshot in {directory}, so it begins anew, and every "
            "replica at the beginning of its data"
        )
        told = (*told, line)
    return Resumed(legacy=legacy, store=store, told=told)


def begin_anew(job: Job, run: RunDirectory) -> str:
    """Put aside what a run has saved; return what the user should know of that.

    Raises:
        StorageError: it cannot be moved.
    """
    # Snapshots last: a run that has any left has not begun anew.
    place = run.put_aside(run.status_file, run.metrics_file, run.snapshots)
    cluster = job.cluster
    cut = CheckpointSet(n_shards=cluster.shards, n_replicas=cluster.replicas)
    write_checkpoint_set(run.snapshots, cut)
    return f"begins anew; what was saved before is in {place}"


def _set_aside(store: CheckpointStore, was: CheckpointSet) -> tuple[str, ...]:
    """Set aside the snapshots that do not belong to what all shards have."""
    try:
        return set_aside(store, [f"shard-{k}" for k in range(was.n_shards)])
    except StorageError as error:
        raise StorageError(f"{error}. {MEND}") from error


@final
@dataclass(frozen=True, kw_only=True)
class _Change:
    """Of the numbers of shards and replicas."""

    job: Job
    run: RunDirectory
    was: CheckpointSet
    now: CheckpointSet
    n_samples: int  # of the training data

    def recut(
        self, legacy: PreviousRun, store: CheckpointStore, *, layout: Layout, report: Report
    ) -> Resumed:
        """Cut the snapshots anew; return the run that goes on with those."""
        self._check(legacy, store)
        rule: object = getattr(self.job.algorithm, "rule", None)
        if not isinstance(rule, UpdateRule):
            raise self._refusal(
                f"those of algorithm {self.job.algorithm_name!r} cannot be cut anew"
            )
        recutting = Resharder(
            source=store,
            old=Layout.of(layout.tensors, n_shards=self.was.n_shards, dtype=layout.spec.dtype),
            new=layout,
            rule=rule,
            incarnation=legacy.incarnation,
        )
        places = self._places(legacy.before.samples)
        with making_checkpoint_set(self.run, legacy.label, self.now) as (written, kept):
            fresh = CheckpointStore(written, report=report)
            clients = self.now.clients(places)
            recutting.write(fresh, label=f"{legacy.label:05d}", samples=clients)
            read_back = read_previous_run(self.run, fresh, n_shards=self.now.n_shards)
            if read_back.missing or read_back.before.samples != places:
                raise StorageError(
                    f"what was cut anew cannot be read back from {written}: do not "
                    "trust this disk. The run is as it was"
                )
        return Resumed(
            legacy=read_back,
            store=CheckpointStore(kept, report=report),
            told=tuple(self._told(sum(places.values()), kept)),
        )

    def _check(self, legacy: PreviousRun, store: CheckpointStore) -> None:
        if legacy.missing:
            names = ", ".join(legacy.missing)
            raise self._refusal(
                f"there is no whole one of {names} in {store.directory}. Put it back, "
                f"or go on with {_numbers(self.was)}, where {names} begins anew"
            )

    def _refusal(self, why: str) -> JobError:
        return JobError(
            f"--resume {self.run.path}: its snapshots cannot be cut for {_numbers(self.now)}: {why}"
        )

    def _places(self, samples: Mapping[str, int]) -> dict[str, int]:
        """Return where each replica begins in its data."""
        n_replicas = self.now.n_replicas
        names = self.now.replicas
        if self.was.n_replicas == n_replicas:
            return {
                name: samples.get(former, 0)
                for name, former in zip(names, self.was.replicas, strict=True)
            }
        positions = fresh_positions(
            sum(samples.values()), n_samples=self.n_samples, n_replicas=n_replicas
        )
        return dict(zip(names, positions, strict=True))

    def _told(self, samples: int, directory: Path) -> Iterator[str]:
        was, now = self.was, self.now
        if was.n_shards != now.n_shards:
            yield (
                f"shards: {was.n_shards} before, {now.n_shards} now; snapshots are cut "
                f"anew in {directory}, and the old ones stay where they are"
            )
        if was.n_machines != now.n_machines:
            yield (
                f"machines of each replica: {was.n_machines or 1} before, "
                f"{now.n_machines or 1} now; each goes on where it was in its data"
            )
        elif was.plan != now.plan and was.n_machines:
            yield (
                "plan: another one than before; each machine goes on where its replica "
                "was in its data"
            )
        if was.n_replicas != now.n_replicas:
            yield (
                f"replicas: {was.n_replicas} before, {now.n_replicas} now; of the "
                f"{samples:,} samples so far each counts its share as read in its new "
                "part of the data, so in this pass some are read twice and some not"
            )
        elif samples:
            yield from _told_of_seed(self.job, self.run)


def _check_data(job: Job, run: RunDirectory, *, was: DataFacts | None, now: DataFacts) -> None:
    """Refuse data in which the places of the replicas would mean something else."""
    earlier = load_job(run.job_file).data.train
    kept = was or now
    knows_marks = None not in {kept.fingerprint, now.fingerprint}
    pairs: list[tuple[object, object]] = [
        (earlier, job.data.train),
        (f"{kept.n_samples:,} samples", f"{now.n_samples:,} samples"),
        (f"fingerprint {kept.fingerprint}", f"fingerprint {now.fingerprint}"),
    ]
    for of, to in pairs if knows_marks else pairs[:-1]:
        if of == to:
            continue
        mend = "Leave the data as they were, or begin a new run"
        if run.model_file.is_file():
            mend += f" (with model.initial={run.model_file}, from what was learnt)"
        raise JobError(
            f"--resume {run.path}: [data.train] has changed, and the places of the "
            f"replicas in it would be of other samples: it was {_shown(of)}, now "
            f"{_shown(to)}. {mend}"
        )


def _told_of_seed(job: Job, run: RunDirectory) -> Iterator[str]:
    """Tell of another order in which each replica reads its part of the data."""
    earlier = load_job(run.job_file)
    was, now = (getattr(of.algorithm, "seed", None) for of in (earlier, job))
    if was != now:
        yield (
            f"[algorithm] seed: {was} before, {now} now; replicas keep their places in "
            "another order of the samples, so in this pass some are read twice and "
            "some not"
        )


def _shown(part: object) -> str:
    if isinstance(part, str):
        return part
    return toml.excerpt(msgspec.to_builtins(part), n_max=200)


def _numbers(cut: CheckpointSet) -> str:
    machines = f" of {cut.n_machines} machines" if cut.n_machines else ""
    return f"{cut.n_shards} shards and {cut.n_replicas} replicas{machines}"


def _of(job: Job, key: str) -> object:
    match key:
        case "model":
            return job.model
        case "rule":
            return getattr(getattr(job.algorithm, "rule", None), "name", None)
        case _:
            return job.algorithm_name
