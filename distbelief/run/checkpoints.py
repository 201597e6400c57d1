"""Snapshots that belong together: where a coordinator drives the shards.

Shards that are pushed to need not be saved at one moment (DB-5). Those that a
coordinator drives hold parts of one point: only snapshots of one label fit together. A
round that was cut short leaves some that nobody can use.
"""

import errno
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from distbelief.core import files
from distbelief.core.vectors import Vector
from distbelief.errors import LocalProtocolError, StorageError
from distbelief.roles.role import FIRST_LABEL, NEWEST, Snapshot


# Snapshots on disk: snapshots/ROLE/LABEL.safetensors, the last few of each role.
#
# Any program that reads safetensors can look into one: arrays under their names, facts as
# metadata. Rules:
#
# * A snapshot is whole or not there: it is written beside its place, forced to the disk,
#   then renamed (`files`). If that fails, the older ones stay as they were.
# * It carries a checksum of all it holds. What does not agree with it (cut short, changed
#   on the disk, not of this format) is reported and passed over, but never deleted.
# * A role that has snapshots, none of them whole, does not begin anew: that is an error.
#   So is a file that cannot be read: it need not be damaged.
# * The last `N_KEPT` whole ones of a role are kept; labels sort by age.
#
# The checksum is a CRC-32: it is to catch damage, not malice, and takes a third of the
# time of SHA-256 while the shard's pushes wait.

N_KEPT: Final = 3

_SUFFIX: Final = ".safetensors"
_CHECKSUM: Final = "distbelief.crc32"
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_HEADER_BYTES_MAX: Final = 1 << 20


@final
class CheckpointStore:
    """The snapshots of one run, by role.

    Args:
        directory: The run directory's `snapshots`; made when first needed.
        report: Told of each damaged snapshot, in a sentence.
    """

    def __init__(self, directory: Path, *, report: Callable[[str], None]) -> None:
        self._directory = directory
        self._report = report

    @property
    def directory(self) -> Path:
        """Where they lie."""
        return self._directory

    def save(self, role: str, snapshot: Snapshot) -> None:
        """Keep `snapshot` for good, then drop all but the last few of this role.

        Raises:
            StorageError: it cannot be kept; those from before are as they were.
        """
        label = snapshot.label
        if label == NEWEST:
            label = (self.labels(role) or [FIRST_LABEL])[-1]
        path = self.path(role, label)
        arrays = {name: np.ascontiguousarray(v) for name, v in snapshot.arrays.items()}
        facts = dict(snapshot.facts)
        checksum = _checksum(label, arrays, facts)
        try:
            files.make_directory(path.parent)
        except OSError as error:
            raise files.explained(error, path.parent, doing="make") from error
        files.write_by(path, lambda temporary: _save(temporary, arrays, facts | checksum))
        self._drop_old(role)

    def newest(self, role: str) -> Snapshot | None:
        """Return the newest whole snapshot of this role; None if it has none at all.

        Raises:
            StorageError: it has some, and all are damaged; or one cannot be read.
        """
        damaged: list[tuple[Path, str]] = []
        for label in reversed(self.labels(role)):
            path = self.path(role, label)
            try:
                snapshot = _load(path, label)
            except FileNotFoundError:  # just now, to make room for a newer one
                continue
            except _DamagedError as error:
                damaged.append((path, str(error)))
                continue
            for other, why in damaged:
                self._report(
                    f"snapshot {other} is damaged and passed over ({why}); "
                    f"{path.name} is used instead{_cost(other, snapshot)}, and the "
                    "damaged one left where it is"
                )
            return snapshot
        if damaged:
            shown = ", ".join(f"{path} ({why})" for path, why in damaged)
            raise StorageError(f"no snapshot of {role} is whole: {shown}")
        return None

    def fault(self, role: str, label: str) -> str | None:
        """Return what is wrong with the snapshot of this label; None: it is whole.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            _load(self.path(role, label), label)
        except FileNotFoundError:
            return "it is not there"
        except _DamagedError as error:
            return str(error)
        return None

    def is_whole(self, role: str, label: str) -> bool:
        """Return whether the snapshot of this label is whole.

        Raises:
            StorageError: it cannot be read.
        """
        return self.fault(role, label) is None

    def labels(self, role: str) -> list[str]:
        """Return the labels of this role, damaged snapshots' too, oldest first.

        Raises:
            StorageError: the directory cannot be read.
        """
        directory = self.path(role, "any").parent
        try:
            paths = list(directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(directory, error) from error
        return sorted(
            (path.stem for path in paths if path.suffix == _SUFFIX and _NAME.fullmatch(path.stem)),
            key=_age,
        )

    def path(self, role: str, label: str) -> Path:
        """Return where the snapshot of this label lies."""
        for name in (role, label):
            if _NAME.fullmatch(name) is None:
                raise LocalProtocolError(f"{name!r} cannot name a snapshot's file")
        return self._directory / role / f"{label}{_SUFFIX}"

    def _drop_old(self, role: str) -> None:
        """Delete older snapshots beyond `N_KEPT` that can be opened.

        Their checksums are not read again: that would take as long as saving.
        """
        paths = [self.path(role, label) for label in self.labels(role)]
        for path in [path for path in paths if _opens(path)][:-N_KEPT]:
            path.unlink(missing_ok=True)


def _save(path: Path, arrays: Mapping[str, Vector], facts: Mapping[str, str]) -> None:
    try:
        save_file(dict(arrays), path, metadata=dict(facts))
    except SafetensorError as error:
        raise files.of_safetensors(error) from error


class _DamagedError(StorageError):
    """What a file holds is not what was saved."""


def _load(path: Path, label: str) -> Snapshot:
    """Return the snapshot in this file, checked against its checksum.

    Raises:
        FileNotFoundError: there is no such file.
        _DamagedError: it is damaged.
        StorageError: it cannot be read; whether it is damaged, nobody can say.
    """
    try:
        with path.open("rb"):  # safetensors says "no such file", whatever the reason
            pass
        with safe_open(path, framework="numpy") as file:
            facts: dict[str, str] = dict(file.metadata() or {})
            arrays: dict[str, Vector] = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
            }
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.EIO:  # the disk has lost it
            raise _DamagedError(error.strerror) from error
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise _DamagedError(str(error)) from error
    written = facts.pop(_CHECKSUM, None)
    if written is None:
        raise _DamagedError("it has no checksum")
    if _checksum(label, arrays, facts) != {_CHECKSUM: written}:
        raise _DamagedError("its checksum is another")
    return Snapshot(label=label, arrays=arrays, facts=facts)


def _unreadable(path: Path, error: OSError) -> StorageError:
    why = error.strerror or str(error)
    return StorageError(f"cannot read {path}: {why}; it need not be damaged")


def _cost(damaged: Path, used: Snapshot) -> str:
    """Return how many pushes an older snapshot is behind, if both tell their clocks."""
    clock, older = _clock_in(damaged), used.facts.get("clock", "")
    if clock is None or not older.isdecimal() or clock <= int(older):
        return ""
    return f", {clock - int(older):,} pushes older"


class _Header(msgspec.Struct, frozen=True):
    """What is read of the header of a damaged snapshot."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default={})


def _clock_in(path: Path) -> int | None:
    """Return the clock that the header of a damaged snapshot tells, if it does."""
    try:
        with path.open("rb") as file:
            n_bytes = int.from_bytes(file.read(8), "little")
            text = file.read(min(n_bytes, _HEADER_BYTES_MAX))
        clock = msgspec.json.decode(text, type=_Header).metadata.get("clock", "")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return int(clock) if clock.isdecimal() and len(clock) <= 18 else None


def _opens(path: Path) -> bool:
    """Return whether the file has a header, and the size that its header says."""
    try:
        with safe_open(path, framework="numpy"):
            return True
    except (OSError, SafetensorError):
        return False


def _checksum(label: str, arrays: Mapping[str, Vector], facts: Mapping[str, str]) -> dict[str, str]:
    described = {name: [v.dtype.str, list(v.shape)] for name, v in arrays.items()}
    text = json.dumps([label, described, facts], sort_keys=True)
    value = zlib.crc32(text.encode())
    for name in sorted(arrays):
        value = zlib.crc32(arrays[name].data, value)
    return {_CHECKSUM: f"{value:08x}"}


def _age(label: str) -> tuple[int, int, str]:
    """Sort numbers by value, and before other labels ("final")."""
    return (0, int(label), label) if label.isdigit() else (1, 0, label)


SET_ASIDE: Final = ".incomplete"


def agreed_label(store: CheckpointStore, shards: Sequence[str]) -> str | None:
    """Return the newest label of which every shard has a whole snapshot."""
    shared = set(store.labels(shards[0])).intersection(*(store.labels(name) for name in shards[1:]))
    for label in reversed(store.labels(shards[0])):
        if label in shared and all(store.is_whole(name, label) for name in shards):
            return label
    return None


def set_aside(store: CheckpointStore, shards: Sequence[str]) -> tuple[str, ...]:
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


def _is_first_round(store: CheckpointStore, labels: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a kill in the first round left these, and nothing is damaged."""
    return all(
        label.isdigit() and int(label) == 1 and store.is_whole(name, label)
        for name, of_one in labels.items()
        for label in of_one
    )


def _newer(store: CheckpointStore, name: str, agreed: str | None) -> list[str]:
    """Return the labels of one shard that are newer than what all have."""
    labels = store.labels(name)
    return labels if agreed is None else labels[labels.index(agreed) + 1 :]
