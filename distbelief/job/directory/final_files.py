"""The files that a run leaves when it ends: its model, and its curve."""

from contextlib import nullcontext
from pathlib import Path

import torch

from distbelief.errors import StorageError
from distbelief.job.configuration.algorithms import coordinator_of
from distbelief.job.configuration.sections import Job
from distbelief.job.directory.agreement import agreed_label
from distbelief.job.directory.metrics import read_metrics
from distbelief.job.directory.model_file import write_model_file
from distbelief.job.directory.run_directory import RunDirectory
from distbelief.job.directory.store import SnapshotStore
from distbelief.parameter_server.layout.layout import Layout
from distbelief.runtime.task.task import build_model


def write_model(job: Job, run: RunDirectory, *, layout: Layout, store: SnapshotStore) -> None:
    """Write the trained model, from the newest whole snapshots of all shards.

    Raises:
        StorageError: why there is none.
    """
    shards = [f"shard-{k}" for k in range(layout.n_shards)]
    newest = {name: _newest(store, name) for name in shards}
    drives = coordinator_of(job) is not None
    if drives:  # then only one label is one point
        label = agreed_label(store, shards)
        newest = {name: None if label is None else store.path(name, label) for name in shards}
    snapshots = [path for path in newest.values() if path is not None]
    if len(snapshots) < layout.n_shards:
        names = ", ".join(name for name, found in newest.items() if found is None)
        moment = " of one moment" if drives else ""
        why = f"there is no whole snapshot of {names}{moment} in {store.directory}"
        if run.model_file.is_file():
            why += f", and {run.model_file} is of an earlier life"
        raise StorageError(why)
    with torch.device("meta") if job.cluster.is_split else nullcontext():
        like = build_model(job.model)
    write_model_file(run.model_file, layout, snapshots, like=like)


def draw_curve_of(run: RunDirectory, *, title: str) -> None:
    """Draw the curve of all that was measured.

    Raises:
        StorageError: it cannot be written.
    """
    # Only now: matplotlib takes a second.
    from distbelief.job.directory.curve import draw_curve  # noqa: PLC0415 -- seldom

    draw_curve(run.curve_file, read_metrics(run.metrics_file), title=title)


def _newest(store: SnapshotStore, shard: str) -> Path | None:
    """Return where its newest whole snapshot lies; its values are let go again."""
    snapshot = store.newest(shard)
    return None if snapshot is None else store.path(shard, snapshot.label)
