"""Checkpoint files of a run, and checkpoints of all shards that belong together.

    snapshots/ROLE/LABEL.safetensors      the last `N_KEPT` of each role

* A checkpoint is complete or absent: it is written to a temporary file, synced, then renamed.
* It carries a checksum. A file that does not match it is reported and skipped, never deleted.
* A role whose checkpoints are all damaged does not start from scratch: that is an error. So is a
  file that cannot be read, because it may be intact.
* Shards of Downpour may be saved at different moments (DB-5). Shards under a coordinator hold parts
  of one point, so only checkpoints of one label fit together.
"""

import errno
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

import numpy as np

from distbelief.core.errors import LocalProtocolError, StorageError
from distbelief.core.folders import NAME, SUFFIX, Folder, LocalFolder
from distbelief.core.tensor_files import DamagedError, TensorFile, encoded
from distbelief.core.vectors import Vector
from distbelief.parameter_server.shard_config import shard_of
from distbelief.protocol.role import BEST, FIRST_LABEL, NEWEST, Snapshot


N_KEPT: Final = 3

_CHECKSUM: Final = "distbelief.crc32"
_MARK: Final = "begun"  # a file in a folder elsewhere


@final
class CheckpointStore:
    """The checkpoints of one run, by role."""

    def __init__(
        self, folder: Folder | Path, *, report: Callable[[str], None], elsewhere: bool = False
    ) -> None:
        self.folder = LocalFolder(folder) if isinstance(folder, Path) else folder
        self.report = report
        self._elsewhere = elsewhere  # in a folder that was made by `begin`, and may be gone

    @property
    def place(self) -> str:
        return self.folder.place

    def begin(self) -> None:
        """Make a folder elsewhere, which from now on must be there."""
        self.folder.write(_MARK, [])

    def _check(self) -> None:
        # Without it a run would find no checkpoint and begin anew, or save on the disk below.
        try:
            if self._elsewhere:
                self.folder.size(_MARK)
        except FileNotFoundError:
            raise StorageError(
                f"there is no folder {self.place} with the checkpoints of this run: is it mounted, "
                "or was it deleted?"
            ) from None
        except OSError as error:
            raise _unreadable(self.place, error) from error

    def save(self, role: str, snapshot: Snapshot) -> None:
        """Store `snapshot`, then delete all but the last few of this role."""
        self._check()
        label = snapshot.label
        if label == NEWEST:
            label = (self.labels(role) or [FIRST_LABEL])[-1]
        # A role that lost the supervisor may save when another has long taken its place.
        own = int(snapshot.facts.get("incarnation", "0"))
        if snapshot.label in {NEWEST, BEST} and self._incarnation(role, label) > own:
            raise StorageError(f"a later incarnation of {role} has saved {label} by now")
        arrays = {name: np.ascontiguousarray(v) for name, v in snapshot.arrays.items()}
        facts = dict(snapshot.facts)
        facts |= _checksum(label, arrays, facts)
        self.folder.write(_name(role, label), encoded(arrays, facts))
        # Checksums are not read again: that would take as long as saving.
        kept = [label for label in self.labels(role) if self._incarnation(role, label) >= 0]
        for old in kept[:-N_KEPT]:
            self.folder.delete(_name(role, old))

    def newest(self, role: str) -> Snapshot | None:
        """Return the newest intact checkpoint of this role; None if it has none at all."""
        damaged: list[tuple[str, str]] = []
        for label in reversed(self.labels(role)):
            try:
                snapshot = self._load(role, label)
            except FileNotFoundError:  # deleted just now by a newer save
                continue
            except DamagedError as error:
                damaged.append((self.path(role, label), str(error)))
                continue
            for other, why in damaged:
                self.report(
                    f"checkpoint {other} is damaged and skipped ({why}); "
                    f"{label}{SUFFIX} is used instead"
                )
            return snapshot
        if damaged:
            shown = ", ".join(f"{path} ({why})" for path, why in damaged)
            raise StorageError(f"all checkpoints of {role} are damaged: {shown}")
        return None

    def fault(self, role: str, label: str) -> str | None:
        """Return what is wrong with the checkpoint of this label; None if it is intact."""
        try:
            self._load(role, label)
        except FileNotFoundError:
            return "it is missing"
        except DamagedError as error:
            return str(error)
        return None

    def labels(self, role: str) -> list[str]:
        """Return the labels of this role, of damaged checkpoints too, oldest first."""
        owner = shard_of(role)
        self._check()
        try:
            names = self.folder.names(owner)
        except OSError as error:
            raise _unreadable(f"{self.place}/{owner}", error) from error
        labels = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return sorted((label for label in labels if NAME.fullmatch(label)), key=_age)

    def path(self, role: str, label: str) -> str:
        return f"{self.place}/{_name(role, label)}"

    def file(self, role: str, label: str) -> TensorFile:
        return TensorFile(self.folder, _name(role, label))

    def _incarnation(self, role: str, label: str) -> int:
        """Return the incarnation that wrote a checkpoint, by its header; -1 for none or no file."""
        try:
            return int(self.file(role, label).facts.get("incarnation", "0"))
        except (OSError, StorageError, ValueError):
            return -1

    def _load(self, role: str, label: str) -> Snapshot:
        # FileNotFoundError and DamagedError are for `newest`; any other StorageError leaves open
        # whether the file is damaged.
        file = self.file(role, label)
        try:
            facts = file.facts
            arrays = {name: file.array(name) for name in file.entries}
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.EIO:  # a bad sector
                raise DamagedError(error.strerror) from error
            raise _unreadable(file.place, error) from error
        written = facts.pop(_CHECKSUM, None)
        if written is None:
            raise DamagedError("it has no checksum")
        if _checksum(label, arrays, facts) != {_CHECKSUM: written}:
            raise DamagedError("its checksum does not match")
        return Snapshot(label=label, arrays=arrays, facts=facts)


def _name(role: str, label: str) -> str:
    for name in (role, label):
        if NAME.fullmatch(name) is None:
            raise LocalProtocolError(f"{name!r} cannot name a checkpoint file")
    # Both copies of a shard have their checkpoints in one place.
    return f"{shard_of(role)}/{label}{SUFFIX}"


def _unreadable(place: str, error: OSError) -> StorageError:
    why = error.strerror or str(error)
    return StorageError(f"cannot read {place}: {why}; it may be intact")


# CRC-32 catches damage, not malice, and takes a third of the time of SHA-256, during which the
# shard's pushes wait.
def _checksum(label: str, arrays: Mapping[str, Vector], facts: Mapping[str, str]) -> dict[str, str]:
    described = {name: [v.dtype.str, list(v.shape)] for name, v in arrays.items()}
    text = json.dumps([label, described, facts], sort_keys=True)
    value = zlib.crc32(text.encode())
    for name in sorted(arrays):
        value = zlib.crc32(arrays[name].data, value)
    return {_CHECKSUM: f"{value:08x}"}


# Numbers by value, and before other labels ("final").
def _age(label: str) -> tuple[int, int, str]:
    return (0, int(label), label) if label.isdigit() else (1, 0, label)


SET_ASIDE: Final = ".incomplete"


def agreed_label(store: CheckpointStore, shards: Sequence[str]) -> str | None:
    """Return the newest label of which every shard has an intact checkpoint."""
    shared = set(store.labels(shards[0])).intersection(*(store.labels(name) for name in shards[1:]))
    for label in reversed(store.labels(shards[0])):
        if label in shared and all(store.fault(name, label) is None for name in shards):
            return label
    return None


def set_aside(store: CheckpointStore, shards: Sequence[str]) -> tuple[str, ...]:
    """Rename checkpoints newer than the newest label of all shards; return what to tell.

    StorageError if a file cannot be renamed, or there is nothing to resume from.
    """
    agreed = agreed_label(store, shards)
    of_shards = {name: store.labels(name) for name in shards}
    lacking = {
        name: labels if agreed is None else labels[labels.index(agreed) + 1 :]
        for name, labels in of_shards.items()
    }
    newer = [(name, label) for name, labels in lacking.items() for label in labels]
    if not newer:
        return ()
    newest = max((label for _, label in newer), key=_age)
    faults = {name: store.fault(name, newest) for name in shards}
    without = ", ".join(
        f"{store.path(name, newest)} ({why})" for name, why in faults.items() if why
    )
    # A kill in the first round leaves intact files of some shards, and nothing damaged.
    is_first_round = all(
        _age(label)[:2] == (0, 1) and store.fault(name, label) is None for name, label in newer
    )
    if agreed is None and not is_first_round:
        raise StorageError(
            f"{store.place} has no label with an intact checkpoint of every shard; "
            f"of the newest: {without}"
        )
    for name, label in newer:
        file = _name(name, label)
        store.folder.rename(file, f"{file}{SET_ASIDE}")
    found = (
        "it was the first, so the run starts from scratch"
        if agreed is None
        else f"the run resumes from {agreed}, the newest complete one"
    )
    kept = f"newer files are kept in {store.place} as *{SET_ASIDE}"
    return (f"checkpoint {newest} is incomplete: {without}; {found}; {kept}",)
