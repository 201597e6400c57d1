"""Snapshots on disk: snapshots/ROLE/LABEL.safetensors, the last few of each role.

Any program that reads safetensors can look into one: arrays under their names, facts as
metadata. Rules:

* A snapshot is whole or not there: it is written beside its place, forced to the disk,
  then renamed (`files`). If that fails, the older ones stay as they were.
* It carries a checksum of all it holds. What does not agree with it (cut short, changed
  on the disk, not of this format) is reported and passed over, but never deleted.
* The last `N_KEPT` whole ones of a role are kept; labels sort by age.

The checksum is a CRC-32: it is to catch damage, not malice, and takes a third of the
time of SHA-256 while the shard's pushes wait.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from distbelief import files
from distbelief.errors import LocalProtocolError, StorageError
from distbelief.roles import FIRST_LABEL, NEWEST, Snapshot
from distbelief.vectors import Vector


N_KEPT: Final = 3

_SUFFIX: Final = ".safetensors"
_CHECKSUM: Final = "distbelief.crc32"
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@final
class SnapshotStore:
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
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.explained(error, path.parent, doing="make") from error
        files.write_by(
            path, lambda temporary: _save(temporary, arrays, facts | checksum)
        )
        self._drop_old(role)

    def newest(self, role: str) -> Snapshot | None:
        """Return the newest whole snapshot of this role; None if there is none."""
        for label in reversed(self.labels(role)):
            path = self.path(role, label)
            try:
                return _load(path, label)
            except (OSError, SafetensorError, StorageError) as error:
                self._report(
                    f"snapshot {path} is damaged and passed over ({error}); it is left "
                    "where it is"
                )
        return None

    def is_whole(self, role: str, label: str) -> bool:
        """Return whether the snapshot of this label is whole."""
        path = self.path(role, label)
        try:
            _load(path, label)
        except (OSError, SafetensorError, StorageError):
            return False
        return True

    def labels(self, role: str) -> list[str]:
        """Return the labels of this role, damaged snapshots' too, oldest first."""
        directory = self.path(role, "any").parent
        if not directory.is_dir():
            return []
        return sorted(
            (path.stem for path in directory.iterdir() if path.suffix == _SUFFIX),
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


def _load(path: Path, label: str) -> Snapshot:
    """Return the snapshot in this file, checked against its checksum."""
    with safe_open(path, framework="numpy") as file:
        facts: dict[str, str] = dict(file.metadata() or {})
        arrays: dict[str, Vector] = {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118
        }
    written = facts.pop(_CHECKSUM, None)
    if written is None:
        raise StorageError("it has no checksum")
    if _checksum(label, arrays, facts) != {_CHECKSUM: written}:
        raise StorageError("its checksum is another")
    return Snapshot(label=label, arrays=arrays, facts=facts)


def _opens(path: Path) -> bool:
    """Return whether the file has a header, and the size that its header says."""
    try:
        with safe_open(path, framework="numpy"):
            return True
    except (OSError, SafetensorError):
        return False


def _checksum(
    label: str, arrays: Mapping[str, Vector], facts: Mapping[str, str]
) -> dict[str, str]:
    described = {name: [v.dtype.str, list(v.shape)] for name, v in arrays.items()}
    text = json.dumps([label, described, facts], sort_keys=True)
    value = zlib.crc32(text.encode())
    for name in sorted(arrays):
        value = zlib.crc32(arrays[name].data, value)
    return {_CHECKSUM: f"{value:08x}"}


def _age(label: str) -> tuple[int, int, str]:
    """Sort numbers by value, and before other labels ("final")."""
    return (0, int(label), label) if label.isdigit() else (1, 0, label)
