"""Snapshots that belong together: where a coordinator drives the shards.

Shards that are pushed to need not be saved at one moment (DB-5). Those that a
coordinator drives hold parts of one point: only snapshots of one label fit together. A
round that was cut short leaves some that nobody can use.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from distbelief import files
from distbelief.errors import StorageError
from distbelief.job.directory.store import SnapshotStore


SET_ASIDE: Final = ".incomplete"


def agreed_label(store: SnapshotStore, shards: Sequence[str]) -> str | None:
    """Return the newest label of which every shard has a whole snapshot."""
    shared = set(store.labels(shards[0])).intersection(*(store.labels(name) for name in shards[1:]))
    for label in reversed(store.labels(shards[0])):
        if label in shared and all(store.is_whole(name, label) for name in shards):
            return label
    return None


def set_aside(store: SnapshotStore, shards: Sequence[str]) -> tuple[str, ...]:
    """Rename what is newer than the newest that all shards have.

    Returns:
        What the user should know of that: a sentence, or none.

    Raises:
        StorageError: a file cannot be renamed, or there is nothing to go on from.
    """
    agreed = agreed_label(store, shards)
    lacking = {name: _newer(store, name, agreed) for name in shards}
    newer = {label for labels in lacking.values() for label in labels}
    if not newer:
        return ()
    newest = max(newer, key=lambda label: (len(label), label))
    faults = {name: store.fault(name, newest) for name in shards}
    without = ", ".join(
        f"{store.path(name, newest)} ({why})" for name, why in faults.items() if why
    )
    if agreed is None and not _is_first_round(store, lacking):
        raise StorageError(
            f"there is no snapshot in {store.directory} that all shards have whole; "
            f"of the newest: {without}"
        )
    for name, labels in lacking.items():
        for label in labels:
            path = store.path(name, label)
            try:
                path.rename(path.with_name(f"{path.name}{SET_ASIDE}"))
            except OSError as error:
                raise files.explained(error, path, doing="rename") from error
    found = (
        "it was the first, so the run begins anew"
        if agreed is None
        else f"the run goes on from {agreed}, the newest that all have"
    )
    told = (
        f"snapshot {newest} is not whole: {without}, and those of the other shards are "
        f"of no use without: {found}; what is newer stays in {store.directory}, as "
        f"*{SET_ASIDE}"
    )
    return (told,)


def _is_first_round(store: SnapshotStore, labels: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a kill in the first round left these, and nothing is damaged."""
    return all(
        label.isdigit() and int(label) == 1 and store.is_whole(name, label)
        for name, of_one in labels.items()
        for label in of_one
    )


def _newer(store: SnapshotStore, name: str, agreed: str | None) -> list[str]:
    """Return the labels of one shard that are newer than what all have."""
    labels = store.labels(name)
    return labels if agreed is None else labels[labels.index(agreed) + 1 :]
