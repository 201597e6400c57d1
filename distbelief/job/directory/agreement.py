"""Snapshots that belong together: where a coordinator drives the shards.

Shards that are pushed to need not be saved at one moment (DB-5). Those that a
coordinator drives hold parts of one point: only snapshots of one label fit together. A
round that was cut short leaves some that nobody can use.
"""

from collections.abc import Sequence
from typing import Final

from distbelief import files
from distbelief.job.directory.store import SnapshotStore


SET_ASIDE: Final = ".incomplete"


def agreed_label(store: SnapshotStore, shards: Sequence[str]) -> str | None:
    """Return the newest label of which every shard has a whole snapshot."""
    shared = set(store.labels(shards[0])).intersection(
        *(store.labels(name) for name in shards[1:])
    )
    for label in reversed(store.labels(shards[0])):
        if label in shared and all(store.is_whole(name, label) for name in shards):
            return label
    return None


def set_aside(store: SnapshotStore, shards: Sequence[str]) -> str | None:
    """Rename what is newer than the newest that all shards have.

    Returns:
        The label that they have in common.

    Raises:
        StorageError: a file cannot be renamed.
    """
    agreed = agreed_label(store, shards)
    for name in shards:
        labels = store.labels(name)
        n_good = 0 if agreed is None else labels.index(agreed) + 1
        for label in labels[n_good:]:
            path = store.path(name, label)
            try:
                path.rename(path.with_name(f"{path.name}{SET_ASIDE}"))
            except OSError as error:
                raise files.explained(error, path, doing="rename") from error
    return agreed
