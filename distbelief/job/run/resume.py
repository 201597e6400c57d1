"""Resumes a run, also with other numbers of shards and replicas.

Unchanged, a run resumes exactly where it stood. With other shards its checkpoints are resharded.
With other replicas, each begins after the same share of its own part (`start_positions`).
Where samples are dealt, what some shard has not applied is dealt next, to any replicas.
A changed model, rule or algorithm is rejected, and so are other data once anything was trained.

    snapshots/cut.json, snapshots/shard-K/              checkpoint set of the run's start
    snapshots/cut-00012/cut.json, .../shard-K/          after resuming with other numbers

With [cluster] checkpoints, the folders shard-K are elsewhere, under the same names; snapshots/place
says where. cut.json stays here.

The set with the highest number is in use; the number is that of its first checkpoints. A new set is
written under a temporary name, read back, then renamed, so a crash leaves the run as it was.
"""

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.config import toml
from distbelief.config.algorithms import coordinator_of, facts_of
from distbelief.config.job import Job, Processes
from distbelief.config.load import load_job
from distbelief.core import files
from distbelief.core.errors import JobError, RemoteProtocolError, StorageError
from distbelief.core.spans import NOTHING, Spans, in_all_parts, of_part
from distbelief.core.tensor_files import TensorFile
from distbelief.core.vectors import Vector
from distbelief.job.run.checkpoints import CheckpointStore, set_aside
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.folders import absolute, folder_at
from distbelief.job.run.summary import DataFacts
from distbelief.parameter_server.checkpoint import reshard, restore, take
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard_config import ShardConfig, shard_of
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.plans.plan import Plan
from distbelief.protocol import SessionRecord
from distbelief.protocol.role import Snapshot
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.view import JobView
from distbelief.task.data import are_alike, start_positions
from distbelief.task.imports import own_arguments
from distbelief.task.task import ModelSpec
from distbelief.worker.group import EVALUATORS, group_rank_of, member_name, rank_name


_FILE: Final = "cut.json"
_DIRECTORY: Final = re.compile(r"cut-(\d{1,18})")
_SNAPSHOT: Final = re.compile(r"/shard-(\d{1,18})/[^/]+\.safetensors$")


@final
class CheckpointSet(msgspec.Struct, frozen=True, kw_only=True):
    """Content of cut.json: which shards and replicas the checkpoints beside it are for."""

    n_shards: Processes  # shards that together hold the model
    n_replicas: Processes  # replicas among which the data were divided
    # Ranks of each replica, or of each in turn; None if replicas are not split
    n_machines: Processes | tuple[Processes, ...] | None = None
    plan: str | None = None  # hash of the placements in split replicas (`mark_of`)
    train: DataFacts | None = None  # the training data, as far as known

    def __post_init__(self) -> None:
        if self.ranks and len(self.ranks) != self.n_replicas:
            raise ValueError(f"n_machines is {self.n_machines} for {self.n_replicas} replicas")

    @property
    def ranks(self) -> tuple[int, ...]:
        n = self.n_machines or ()
        return n if isinstance(n, tuple) else (n,) * self.n_replicas

    def has_same_clients(self, other: "CheckpointSet") -> bool:
        """Return whether each client of one finds in the other what it needs.

        A rank that holds other tensors than before does not, though its name is the same: shards
        count progress per client.
        """
        plans = {self.plan, other.plan} - {None}
        bare, other_bare = (
            msgspec.structs.replace(cut, plan=None, train=None) for cut in (self, other)
        )
        return bare == other_bare and len(plans) <= 1

    @property
    def replicas(self) -> list[str]:
        if self.n_machines is None:
            return [f"replica-{r}" for r in range(self.n_replicas)]
        return [rank_name(r, 0) for r in range(self.n_replicas)]

    @override
    def __str__(self) -> str:
        ranks = f" of {_ranks(self)} ranks" if self.n_machines else ""
        return f"{self.n_shards} shards and {self.n_replicas} replicas{ranks}"

    def clients(self, places: Mapping[str, int]) -> dict[str, int]:
        """Return the data position of each client, given that of each of `replicas`."""
        if self.n_machines is None:
            return dict(places)
        numbered = enumerate(zip(places.values(), self.ranks, strict=True))
        return {rank_name(r, m): place for r, (place, n) in numbered for m in range(n)}


def _ranks(cut: CheckpointSet) -> str:
    n = cut.n_machines or 1
    return ", ".join(map(str, n)) if isinstance(n, tuple) else str(n)


def mark_of(plan: Plan) -> str:
    """Return a hash that is equal for plans with equal placements."""
    placed = [[name, plan.placements[name]] for name in sorted(plan.placements)]
    return hashlib.blake2b(msgspec.json.encode(placed), digest_size=8).hexdigest()


def checkpoint_set_of(job: Job, train: DataFacts, plans: Sequence[Plan]) -> CheckpointSet:
    """Return the set of a job with these plans of its replicas; none if they are not split."""
    ranks = tuple(plan.cluster.n_machines for plan in plans)
    return CheckpointSet(
        n_shards=job.cluster.shards,
        n_replicas=job.cluster.n_replicas,
        n_machines=ranks[0] if len({*ranks}) == 1 else ranks or None,
        plan=",".join(dict.fromkeys(map(mark_of, plans))) or None,
        train=train,
    )


def formed_before(job: Job, run: RunDirectory, counts: Collection[int]) -> tuple[int, ...]:
    """Return the ranks of replicas that were formed in a previous session; () if none were.

    JobError if the run has other replicas, or of numbers of ranks that are not in `counts`.
    """
    directory, was = newest_checkpoint_set(run)
    if was is None:
        return ()
    store = store_of(run, directory, report=lambda _: None)
    if not any(store.labels(f"shard-{k}") for k in range(was.n_shards)):
        return ()
    is_other = was.n_replicas != job.cluster.n_replicas or not was.ranks
    if is_other or not {*was.ranks} <= {*counts}:
        raise JobError(
            f"--resume {run.path}: [cluster] partitions = {job.cluster.partitions_text} forms "
            f"replicas of a new run only, and this one has {was}: use partitions = [...] with "
            "the ranks of each replica"
        )
    return was.ranks


def newest_checkpoint_set(run: RunDirectory) -> tuple[Path, CheckpointSet | None]:
    """Return directory and content (None: new run) of the checkpoint set, or raise StorageError."""
    found = [(match, path) for path in run.snapshots.glob("cut-*/") if (match := _of_set(path))]
    directory = max(found, default=(0, run.snapshots))[1]
    file = directory / _FILE
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        if not run.job_file.is_file():
            return directory, None
        raise _damaged(file, "it is missing") from None
    except OSError as error:
        raise files.explained(error, file, doing="read") from error
    cut = checkpoint_set_in(content, file)
    shards = [m[1] for p in directory.glob("*/*") if (m := _SNAPSHOT.search(str(p)))]
    beyond = sorted({int(k) for k in shards if int(k) >= cut.n_shards})
    if beyond:
        names = ", ".join(f"shard-{k}" for k in beyond)
        raise _damaged(file, f"n_shards is {cut.n_shards}, but there are checkpoints of {names}")
    return directory, cut


def _of_set(path: Path) -> int:
    match = _DIRECTORY.fullmatch(path.name)
    return 0 if match is None else int(match[1])


def checkpoint_set_in(content: bytes, file: Path) -> CheckpointSet:
    """Decode the content of cut.json; `file` is for messages."""
    try:
        return msgspec.json.decode(content, type=CheckpointSet)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(file, str(error)) from None


def _damaged(file: Path, why: str) -> StorageError:
    return StorageError(
        f"{file} is damaged ({why}): restore it, use the version that wrote it, or start again "
        "with --from-scratch (from_scratch=True)"
    )


def write_checkpoint_set(directory: Path, cut: CheckpointSet) -> None:
    files.write(directory / _FILE, msgspec.json.encode(cut))


@contextmanager
def making_checkpoint_set(
    run: RunDirectory, number: int, cut: CheckpointSet
) -> Iterator[tuple[Path, Path]]:
    """Make a checkpoint set, used if the block ends well; yield its place during and after it."""
    final_place = run.snapshots / f"cut-{number:05d}"
    place = final_place.with_suffix(files.TEMPORARY)
    try:
        for left in run.snapshots.glob(f"cut-*{files.TEMPORARY}"):
            shutil.rmtree(left)
        place.mkdir(parents=True)
        yield place, final_place
        write_checkpoint_set(place, cut)  # this syncs the directory, too
        place.rename(final_place)
        files.force(run.snapshots)
    except OSError as error:
        raise files.explained(error, place, doing="write") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _choose_place(job: Job, run: RunDirectory) -> None:
    """Note where the checkpoints of a new run are, if not in its directory."""
    if job.cluster.checkpoints is None:
        return
    # A folder of its own, as a run directory is: two runs of a job share nothing.
    name = f"{run.path.name}-{secrets.token_hex(4)}"
    place = f"{absolute(job.cluster.checkpoints).rstrip('/')}/{name}"
    CheckpointStore(folder_at(place), report=print).begin()
    files.write(run.place_file, place.encode())


def store_of(
    run: RunDirectory, directory: Path, *, report: Callable[[str], None]
) -> CheckpointStore:
    """Return the checkpoints of the set whose cut.json is in this directory."""
    try:
        place = run.place_file.read_text()
    except FileNotFoundError:
        return CheckpointStore(directory, report=report)
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {run.place_file}: {error}. {FIX}") from error
    within = "" if directory == run.snapshots else f"/{directory.name}"
    return CheckpointStore(folder_at(f"{place}{within}"), report=report, elsewhere=True)


FIX: Final = (
    "Fix that (permissions, or files from a backup), or start again: --from-scratch "
    "(from_scratch=True) keeps these files aside"
)
_SIZE_MAX: Final = 1 << 62  # more elements than any shard has


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    before: PreviousTotals = field(default_factory=PreviousTotals)  # totals
    incarnation: int = 1  # above all that any checkpoint contains
    label: int = 1  # number of the next checkpoint
    # Shards that have a checkpoint, with its label
    restored: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # shards that have none
    trained: bool = False  # whether any checkpoint contains a push
    notes: tuple[str, ...] = ()  # lines for the user


DEALT: Final = "dealt"  # stands for all replicas, where samples are dealt
_SECOND: Final = 2  # label of the second round of checkpoints


class _Client(msgspec.Struct, frozen=True, kw_only=True):
    """A client in a shard's checkpoint (`parameter_server.checkpoint`)."""

    incarnation: int
    samples: int


def read_previous_run(
    run: RunDirectory,
    store: CheckpointStore,
    *,
    n_shards: int,
    coordinator: str | None = None,
    in_ring: bool = False,  # replicas took the same steps, and one of them told the shards
) -> PreviousRun:
    """Return what the previous sessions left in this run directory.

    Each shard resumes from its newest intact checkpoint. A replica resumes at the lowest position
    in its data that any shard knows; a coordinator that drives the shards counts the samples.
    """
    first = _coordinator_incarnation(store, coordinator)
    incarnation, label = first, 1
    restored: dict[str, str] = {}
    missing: list[str] = []
    lost: list[str] = []  # error of each shard that cannot resume
    clocks: dict[str, int] = {}
    known: list[dict[str, int]] = []  # samples of each client, of each checkpoint
    applied: list[Spans] = []  # where samples are dealt: those that each checkpoint has
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
        clients = _clients(snapshot)
        known.append({client: c.samples for client, c in clients.items()})
        applied.append(_applied(snapshot))
        own = int(snapshot.facts.get("incarnation", "0"))
        incarnation = max([incarnation, own + 1, *(c.incarnation + 1 for c in clients.values())])
    if label > _SECOND:  # only a kill in the first round leaves shards without a checkpoint
        lost += [f"{name} has no checkpoint in {store.place}" for name in missing]
    if lost:
        raise StorageError(f"{'; '.join(dict.fromkeys(lost))}. {FIX}")
    # A coordinator without a journal has not begun: in a warm start replicas count their samples.
    if coordinator is not None and first > 1:
        samples = {coordinator: 0}
        with suppress(StorageError):
            status = None if missing else run.read_status()
            # As last shown; the coordinator itself reports the exact number when it begins.
            samples[coordinator] = 0 if status is None else status.view.samples
    else:
        replicas = {_replica(name) for of_one in known for name in of_one}
        samples = {
            name: 0 if missing else min(_position(of_one, name) for of_one in known)
            for name in sorted(replicas - {""})
        }
        if in_ring:
            samples = dict.fromkeys(samples, max(samples.values(), default=0))
        if any(applied):
            common = reduce(and_, map(in_all_parts, applied))
            samples = {DEALT: 0 if missing else common.n_positions}
    before, notes = _previous_totals(run, samples, clocks, n_shards=n_shards)
    return PreviousRun(
        before=before,
        incarnation=incarnation,
        label=label,
        restored=restored,
        missing=tuple(missing),
        trained=any(n for of_one in known for n in of_one.values())
        or (coordinator is not None and bool(restored)),
        notes=notes,
    )


def _coordinator_incarnation(store: CheckpointStore, coordinator: str | None) -> int:
    try:
        snapshot = None if coordinator is None else store.newest(coordinator)
    except StorageError as error:
        raise StorageError(
            f"{error}. {FIX}. Or move {store.place}/{coordinator} away: then the run resumes "
            "from the parameters of its shards, and the method starts again there"
        ) from None
    return 1 if snapshot is None else 1 + int(snapshot.facts.get("incarnation", "0"))


def _previous_totals(
    run: RunDirectory, samples: Mapping[str, int], clocks: Mapping[str, int], *, n_shards: int
) -> tuple[PreviousTotals, tuple[str, ...]]:
    status: Status | None = None
    notes: tuple[str, ...] = ()
    try:
        status = run.read_status()
    except StorageError as error:
        notes = (f"{error}; time, steps and lost pushes of previous sessions are unknown",)
    if status is None:
        # It holds metrics only; the state to resume from is in the checkpoints.
        unknown = JobView(pushes_lost=None if clocks else 0)
        return PreviousTotals(view=unknown, samples=samples, clocks=clocks), notes
    view = status.view
    # Loss and metric are of values that no shard has, if a checkpoint is missing or does not
    # cover all samples that were counted.
    if len(clocks) < n_shards or view.samples != sum(samples.values()):
        view = msgspec.structs.replace(
            view, loss=None, metric=None, metrics={}, held_out_loss=None, evaluations_without_gain=0
        )
    # Clocks of another number of shards count other pushes.
    shards = {shard_of(r.name) for r in view.roles if r.name.startswith("shard-")}
    if view.pushes_lost is not None and len(shards) == n_shards:
        unsaved = max(0, view.pushes_applied - min(clocks.values(), default=0))
        view = msgspec.structs.replace(view, pushes_lost=view.pushes_lost + unsaved)
    return PreviousTotals(view=view, samples=samples, clocks=clocks), ()


def _replica(client: str) -> str:
    place = group_rank_of(client)
    if place is None:
        return client if client.startswith("replica-") else ""
    return member_name(place.group, 0) if place.replica is not None else ""


def _position(samples: Mapping[str, int], replica: str) -> int:
    # Not every shard has a part of every rank, but each has one of every replica.
    return min((n for client, n in samples.items() if _replica(client) == replica), default=0)


def _pushes(snapshot: Snapshot) -> int:
    text = snapshot.facts.get("clock", "")
    try:
        words = msgspec.json.decode(snapshot.facts.get("steps", ""), type=list[int])
        return StepCounts.read(np.array(words, np.int64), size=_SIZE_MAX).n_pushes
    except (msgspec.MsgspecError, RemoteProtocolError, OverflowError):
        return int(text) if text.isdecimal() else 0  # an old format, without partial clients


def _applied(snapshot: Snapshot) -> Spans:
    try:
        ends = msgspec.json.decode(snapshot.facts.get("applied", "[]"), type=list[int])
    except msgspec.MsgspecError:
        return NOTHING  # the shard itself will report the error
    return Spans.from_wire(ends)


def _clients(snapshot: Snapshot) -> dict[str, _Client]:
    try:
        return msgspec.json.decode(snapshot.facts.get("clients", "{}"), type=dict[str, _Client])
    except msgspec.MsgspecError:
        return {}  # the shard itself will report the error


Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    previous: PreviousRun  # its state
    store: CheckpointStore  # the checkpoints of its shards, for the job's numbers
    notes: tuple[str, ...] = ()  # lines for the user


def check_same(job: Job, earlier: Job, *, directory: str) -> None:
    """Reject changes that do not fit the checkpoints."""
    was, now = (
        {
            "[model]: the checkpoints are of another model": (
                earlier.model == job.model or _bound(each.model, facts.bounds)
            ),
            "[algorithm] rule: its state in the checkpoints is of another kind": (
                facts.rule and facts.rule.name
            ),
            "[algorithm] name: the checkpoints are another algorithm's": each.algorithm_name,
            "[algorithm] order: it says where in the data the run has come to": (
                "dealt" if facts.epochs else "parts"
            ),
            "[algorithm.exchange] route: in a ring replicas have the rule's state, not shards": (
                "ring" if facts.in_ring else "server"
            ),
            "[cluster] checkpoints: they are where they were": each.cluster.checkpoints,
        }
        for each, facts in ((one, facts_of(one)) for one in (earlier, job))
    )
    for why in was:
        if was[why] != now[why]:
            raise JobError(
                f"--resume {directory}: the run cannot resume with a changed {why} "
                f"(it was {was[why]}, now {now[why]}). Undo the change, or start a new run"
            )


def _bound(model: ModelSpec, bounds: Collection[str]) -> ModelSpec:
    own = own_arguments(model.factory, model.arguments)
    kept = {name: value for name, value in own.items() if name not in bounds}
    return msgspec.structs.replace(model, arguments=kept)


def _check_best(job: Job, run: RunDirectory, store: CheckpointStore, *, judged_by: str) -> None:
    """Reject best values that others cannot be compared with, whichever session kept them."""
    best = None
    with suppress(StorageError):  # the evaluator says what is wrong with the file
        best = store.newest(EVALUATORS) if job.output.keep == "best" else None
    was = None if best is None else best.facts.get("judged_by", "")
    if was is not None and was != judged_by:
        raise JobError(
            f"--resume {run.path}: the best values so far were judged by "
            f"{_difference(was, judged_by)}. Undo the change, use [output] keep = 'last', or move "
            f"{run.best_file} and {store.place}/{EVALUATORS} away: then the best are kept from here"
        )


def _difference(was: str, now: str) -> str:
    before, after = (
        msgspec.json.decode(text or "{}", type=dict[str, object]) for text in (was, now)
    )
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    return ", ".join(
        f"another {key} ({_plain(before.get(key))}, now {_plain(after.get(key))})"
        for key in changed
    )


def _plain(value: object) -> str:
    return "none" if value is None else toml.excerpt(value, n_max=200)


def start_from_scratch(job: Job, run: RunDirectory) -> str:
    """Move aside everything that a run has saved; return a line for the user."""
    # Checkpoints last: while any are left, the run can still resume.
    place = run.put_aside(
        run.status_file, run.metrics_file, run.best_file, run.ema_file, run.snapshots
    )
    cluster = job.cluster
    cut = CheckpointSet(n_shards=cluster.shards, n_replicas=cluster.n_replicas)
    _choose_place(job, run)
    write_checkpoint_set(run.snapshots, cut)
    return f"starting from scratch; earlier files are in {place}"


def resume_run(
    job: Job,
    run: RunDirectory,
    *,
    layout: Layout,
    train: DataFacts,
    report: Report,
    plans: Sequence[Plan] = (),  # of each replica, if replicas are split
    judged_by: str = "",  # what its metrics are of (`task.judged_by`)
) -> Resumed:
    """Prepare a run, new or not, so that the job can start in it.

    The job has passed `check_same`; the run's job file is still that of its last session. JobError
    if the data have changed, or what best values were judged by, or a checkpoint to reshard is
    missing; StorageError if the run's files cannot be read or written; the run is unchanged.
    """
    directory, was = newest_checkpoint_set(run)
    now = checkpoint_set_of(job, train, plans)
    if was is None:
        was = now
        _choose_place(job, run)
    elif job.cluster.checkpoints is not None and not run.place_file.exists():
        raise _damaged(run.place_file, "it is missing")
    store = store_of(run, directory, report=report)
    _check_best(job, run, store, judged_by=judged_by)
    coordinator, in_ring = coordinator_of(job), facts_of(job).in_ring
    notes: tuple[str, ...] = ()
    if coordinator is not None:
        try:
            notes = set_aside(store, [f"shard-{k}" for k in range(was.n_shards)])
        except StorageError as error:
            raise StorageError(f"{error}. {FIX}") from error
    previous = read_previous_run(
        run, store, n_shards=was.n_shards, coordinator=coordinator, in_ring=in_ring
    )
    notes += previous.notes + _loss_note(job, run, previous)
    known = previous.before.view
    if known.n_evaluations and known.judged_by != judged_by:
        what = _difference(known.judged_by, judged_by)
        notes += (f"the best metric and [stop] patience begin anew: they were of {what}",)
    if previous.trained:
        _check_data(job, run, was=was.train or train, now=train)
        if train.has_parts and was.n_replicas != now.n_replicas:
            raise JobError(
                f"--resume {run.path}: [data.train] makes a part for each replica, and there were "
                f"{was.n_replicas} of them, now {now.n_replicas}: use as many as before"
            )
    if coordinator is not None and was.n_shards == now.n_shards:
        was = now  # under a coordinator replicas have no data positions
    if not was.has_same_clients(now):
        if any(store.labels(f"shard-{k}") for k in range(was.n_shards)):
            resumed = _reshard(job, run, was, now, previous=previous, store=store, layout=layout)
            return replace(resumed, notes=notes + resumed.notes)
        # Nothing was saved yet, so any numbers will do.
        previous = read_previous_run(run, store, n_shards=now.n_shards, coordinator=coordinator)
    write_checkpoint_set(directory, now)
    notes += tuple(_seed_note(job, run)) if previous.trained else ()
    if previous.restored and previous.missing:
        names = ", ".join(previous.missing)
        line = (
            f"{names}: no intact checkpoint in {store.place}, so it starts from scratch, and "
            "every replica at the beginning of its data"
        )
        notes = (*notes, line)
    return Resumed(previous=previous, store=store, notes=notes)


def _reshard(
    job: Job,
    run: RunDirectory,
    was: CheckpointSet,
    now: CheckpointSet,
    *,
    previous: PreviousRun,
    store: CheckpointStore,
    layout: Layout,
) -> Resumed:
    rule = facts_of(job).rule
    why, names = "", ", ".join(previous.missing)
    if names:
        why = (
            f"there is no intact one of {names} in {store.place}. Restore it, "
            f"or resume with {was}, where {names} starts from scratch"
        )
    elif rule is None:
        why = f"algorithm {job.algorithm_name!r} does not support resharding"
    if why or rule is None:
        raise JobError(f"--resume {run.path}: its checkpoints cannot be resharded for {now}: {why}")
    assert now.train is not None
    samples = previous.before.samples
    # Of dealt samples, they are how many each replica has read: its schedule goes on.
    if was.n_replicas == now.n_replicas and DEALT not in samples:
        starts = tuple(samples.get(name, 0) for name in was.replicas)
    else:
        starts = start_positions(
            sum(samples.values()), n_samples=now.train.n_samples, n_replicas=now.n_replicas
        )
    places = dict(zip(now.replicas, starts, strict=True))
    old = Layout.of(layout.tensors, n_shards=was.n_shards, dtype=layout.spec.dtype)
    with making_checkpoint_set(run, previous.label, now) as (written, kept):
        kept_store = store_of(run, kept, report=store.report)
        # Files elsewhere cannot be renamed together: they count once cut.json is in its place.
        is_here = not run.place_file.exists()
        fresh = CheckpointStore(written, report=store.report) if is_here else kept_store
        if not is_here:
            kept_store.begin()
        last = previous.incarnation - 1
        clients = tuple(
            SessionRecord(name=name, incarnation=last, samples=n)
            for name, n in now.clients(places).items()
        )
        label = f"{previous.label:05d}"
        n_parts = max(now.ranks, default=1)
        reshard_all(
            store,
            fresh,
            old=old,
            new=layout,
            rule=rule,
            label=label,
            clients=clients,
            n_parts=n_parts,
        )
        if (best := store.newest(EVALUATORS)) is not None:
            fresh.save(EVALUATORS, best)
        read_back = read_previous_run(run, fresh, n_shards=now.n_shards)
        expected = samples if DEALT in samples else places
        if read_back.missing or read_back.before.samples != expected:
            raise StorageError(
                f"resharded checkpoints cannot be read back from {fresh.place}: check "
                "the disk. The run is unchanged"
            )
    return Resumed(
        previous=read_back,
        store=kept_store,
        notes=tuple(_notes(job, run, was, now, samples=samples, directory=kept_store.place)),
    )


def reshard_all(
    source: CheckpointStore,
    target: CheckpointStore,
    *,
    old: Layout,
    new: Layout,
    rule: UpdateRule,
    label: str,
    clients: tuple[SessionRecord, ...],
    n_parts: int = 1,
) -> None:
    """Write the newest checkpoints of the old shards as those of the new ones, with these clients.

    `n_parts` is the number of ranks of a replica. All clients have the newest incarnation so far.
    Little more than one old and one new shard is in memory at a time.
    """
    last = clients[0].incarnation
    opened: list[TensorFile] = []
    clocks: list[int] = []
    steps: list[StepCounts] = []
    applied: list[Spans] = []
    for k in range(old.n_shards):
        snapshot = source.newest(f"shard-{k}")
        if snapshot is None:
            raise StorageError(f"{source.place} has no intact shard-{k}")
        config = ShardConfig(index=k, layout=old, rule=rule)
        state = restore(snapshot, config=config, incarnation=last + 1)
        # Values are read again, in parts: not all of them are in memory at once.
        clocks.append(state.clock)
        steps.append(state.steps)
        applied.append(in_all_parts(state.applied))
        opened.append(source.file(f"shard-{k}", snapshot.label))

    def read(shard_index: int, array: str, start: int, stop: int) -> Vector:
        try:
            return opened[shard_index].array(array, start, stop)
        except OSError as error:
            raise StorageError(f"checkpoints cannot be read again: {error}") from error

    for k in range(new.n_shards):
        state = reshard(
            old, new, k, rule=rule, clocks=clocks, steps=steps, applied=applied, read=read
        )
        parts = range(n_parts)
        spans = Spans(of_part(span, part) for span in state.applied for part in parts)
        state = replace(state, incarnation=last, clients=clients, applied=spans)
        config = ShardConfig(index=k, layout=new, rule=rule)
        target.save(f"shard-{k}", take(label, state, config=config))
        del state  # free them before the next one is made


def _notes(
    job: Job,
    run: RunDirectory,
    was: CheckpointSet,
    now: CheckpointSet,
    *,
    samples: Mapping[str, int],
    directory: str,
) -> Iterator[str]:
    if was.n_shards != now.n_shards:
        yield (
            f"shards: {was.n_shards} before, {now.n_shards} now; checkpoints are resharded "
            f"into {directory}, and the old ones are kept"
        )
    if was.n_machines != now.n_machines:
        yield (
            f"ranks of each replica: {_ranks(was)} before, {_ranks(now)} now; each replica keeps "
            "its position in its data"
        )
    elif was.plan != now.plan and was.n_machines:
        yield "plan: another one than before; each replica keeps its position in its data"
    if was.n_replicas != now.n_replicas and DEALT in samples:
        yield f"replicas: {was.n_replicas} before, {now.n_replicas} now"
    elif was.n_replicas != now.n_replicas:
        n_samples = sum(samples.values())
        yield (
            f"replicas: {was.n_replicas} before, {now.n_replicas} now; each skips its share "
            f"of the {n_samples:,} samples so far in its new part of the data, so in this "
            "pass some are read twice and some not"
        )
    elif any(samples.values()):
        yield from _seed_note(job, run)


def _check_data(job: Job, run: RunDirectory, *, was: DataFacts, now: DataFacts) -> None:
    read, reads = load_job(run.job_file).data.train, job.data.train
    pairs: list[tuple[object, object]] = [
        ("", "") if read == reads else (read.source, reads.source),
        (f"{was.n_samples:,} samples", f"{now.n_samples:,} samples"),
        (was.order or "shuffled", now.order or "shuffled"),
        (f"fingerprint {was.fingerprint}", f"fingerprint {now.fingerprint}"),
    ]
    knows_marks = None not in {was.fingerprint, now.fingerprint}
    pairs = pairs if knows_marks else pairs[:-1]
    if not are_alike(was.marks or None, now.marks or None):
        pairs.append((f"{was.n_samples:,} samples", f"{now.n_samples:,} others"))
    for of, to in pairs:
        if of != to:
            fix = "Restore the data, or start a new run"
            if run.model_file.is_file() and not facts_of(job).bounds:  # programs have own values
                fix += f" (with model.initial={run.model_file} to keep what was learned)"
            # The replicas' positions in the data would be of other samples.
            raise JobError(
                f"--resume {run.path}: [data.train] has changed: it was {_shown(of)}, now "
                f"{_shown(to)}. {fix}"
            )


def _shown(part: object) -> str:
    return part if isinstance(part, str) else toml.excerpt(msgspec.to_builtins(part), n_max=200)


def _loss_note(job: Job, run: RunDirectory, previous: PreviousRun) -> tuple[str, ...]:
    was, now = load_job(run.job_file).loss if previous.trained else job.loss, job.loss
    note = f"[algorithm] loss: {was} before, {now} now; what was learned goes on"
    return () if was == now else (note,)


def _seed_note(job: Job, run: RunDirectory) -> Iterator[str]:
    was, now = (facts_of(of).seed for of in (load_job(run.job_file), job))
    if was != now:
        yield (
            f"[algorithm] seed: {was} before, {now} now; replicas keep their positions in another "
            "order of the samples, so in this pass some are read twice and some not"
        )
