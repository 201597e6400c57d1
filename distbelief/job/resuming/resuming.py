"""Whether a job can go on with a run, and how.

As it was, it goes on exactly where it stood (`legacy`). With other numbers of shards or
replicas it goes on too: its snapshots are cut anew (`cuts`, `recutting`), and if the
replicas are others, each begins after the same share of its own part of the data
(`data.subset`). With another model, rule or algorithm it does not go on, nor, once
anything was trained, with other data: then neither values nor places would mean what
they did.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief.data.subset import fresh_positions
from distbelief.errors import JobError, StorageError
from distbelief.job.configuration import toml_text
from distbelief.job.configuration.algorithms import coordinator_of
from distbelief.job.configuration.jobfile import load_job
from distbelief.job.configuration.sections import Job
from distbelief.job.directory.agreement import set_aside
from distbelief.job.directory.run_directory import RunDirectory
from distbelief.job.directory.store import SnapshotStore
from distbelief.job.directory.summary import DataFacts
from distbelief.job.resuming.cuts import Cut, making_cut, mark_of, newest_cut, write_cut
from distbelief.job.resuming.legacy import MEND, Legacy, read_legacy
from distbelief.job.resuming.recutting import Recutting
from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.rules.update_rules import UpdateRule
from distbelief.program.plan import Plan


Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run that a job can go on with.

    Attributes:
        legacy: What is left of it.
        store: The snapshots of its shards, cut as the job wants them.
        told: What the user should know of it, a line each.
    """

    legacy: Legacy
    store: SnapshotStore
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


def take_up(
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
    directory, was = newest_cut(run)
    now = Cut(
        n_shards=job.cluster.shards,
        n_replicas=job.cluster.replicas,
        n_machines=None if plan is None else plan.cluster.n_machines,
        plan=None if plan is None else mark_of(plan),
        train=train,
    )
    was = was or now
    store = SnapshotStore(directory, report=report)
    coordinator = coordinator_of(job)
    told = () if coordinator is None else _set_aside(store, was)
    legacy = read_legacy(run, store, n_shards=was.n_shards, coordinator=coordinator)
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
        legacy = read_legacy(run, store, n_shards=now.n_shards, coordinator=coordinator)
    write_cut(directory, now)
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
    cut = Cut(n_shards=cluster.shards, n_replicas=cluster.replicas)
    write_cut(run.snapshots, cut)
    return f"begins anew; what was saved before is in {place}"


def _set_aside(store: SnapshotStore, was: Cut) -> tuple[str, ...]:
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
    was: Cut
    now: Cut
    n_samples: int  # of the training data

    def recut(
        self, legacy: Legacy, store: SnapshotStore, *, layout: Layout, report: Report
    ) -> Resumed:
        """Cut the snapshots anew; return the run that goes on with those."""
        self._check(legacy, store)
        rule: object = getattr(self.job.algorithm, "rule", None)
        if not isinstance(rule, UpdateRule):
            raise self._refusal(
                f"those of algorithm {self.job.algorithm_name!r} cannot be cut anew"
            )
        recutting = Recutting(
            source=store,
            old=Layout.of(layout.tensors, n_shards=self.was.n_shards, dtype=layout.spec.dtype),
            new=layout,
            rule=rule,
            incarnation=legacy.incarnation,
        )
        places = self._places(legacy.before.samples)
        with making_cut(self.run, legacy.label, self.now) as (written, kept):
            fresh = SnapshotStore(written, report=report)
            clients = self.now.clients(places)
            recutting.write(fresh, label=f"{legacy.label:05d}", samples=clients)
            read_back = read_legacy(self.run, fresh, n_shards=self.now.n_shards)
            if read_back.missing or read_back.before.samples != places:
                raise StorageError(
                    f"what was cut anew cannot be read back from {written}: do not "
                    "trust this disk. The run is as it was"
                )
        return Resumed(
            legacy=read_back,
            store=SnapshotStore(kept, report=report),
            told=tuple(self._told(sum(places.values()), kept)),
        )

    def _check(self, legacy: Legacy, store: SnapshotStore) -> None:
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
    return toml_text.excerpt(msgspec.to_builtins(part), n_max=200)


def _numbers(cut: Cut) -> str:
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
