"""The tally: what each decoder has been through so far, run by run, in a file.

Executions of several runs add up only while the decoder stays as it was, which its
`fingerprint` tells: a sum over the files of its code, and the versions of what it
stands on.
"""

import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import FrameType, ModuleType
from typing import Final, final

import msgspec

from experiments.fuzz.mutating import Mutator, numbers
from experiments.fuzz.targets import Decoder


N_TRACED: Final = 300
_OURS: Final = "distbelief."


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one decoder.

    Attributes:
        name: Of the decoder.
        what: It reads.
        fingerprint: Of the decoder.
        engine: That found the bytes.
        seed: Of its chance.
        n: Executions.
        n_taken: Of them, of bytes that were taken.
        seconds: Of a processor.
        findings: What went wrong, each with the bytes.
    """

    name: str
    what: str
    fingerprint: str
    engine: str
    seed: int
    n: int
    n_taken: int
    seconds: float
    findings: list[str]


@final
class Tally:
    """Runs of this and earlier times.

    Args:
        file: Where they stand, one a line; None: nowhere, and there were none.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def runs(self, name: str, fingerprint: str) -> list[Run]:
        """Return the runs of a decoder as it is now."""
        if self._file is None or not self._file.is_file():
            return []
        lines = self._file.read_bytes().splitlines()
        runs = [msgspec.json.decode(line, type=Run) for line in lines]
        return [r for r in runs if (r.name, r.fingerprint) == (name, fingerprint)]

    def add(self, run: Run) -> None:
        """Write one down."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(run) + b"\n")


def fingerprint(decoder: Decoder) -> str:
    """Return what changes if the decoder's code does.

    That is: the modules of the functions that run while it reads its seeds and a few
    mutations, and those of what such modules have imported (classes of messages are
    read by msgspec, where nothing of theirs runs); all of this package.
    """
    names = set(_running(decoder))
    for name in list(names):
        names.update(_imported(sys.modules[name]))
    total = hashlib.sha256()
    for name in sorted(names):
        file = sys.modules[name].__file__
        assert file is not None
        total.update(name.encode() + Path(file).read_bytes())
    for word in (sys.version, version("msgspec"), version("numpy")):
        total.update(word.encode())
    return total.hexdigest()[:16]


def _running(decoder: Decoder) -> Iterator[str]:
    """Yield the modules of ours that have a part in it."""
    mutator = Mutator(decoder.seeds, draw=numbers(0))
    mutations = [mutator.next() for _ in range(N_TRACED)]
    found: set[str] = set()

    def called(frame: FrameType, _event: str, _argument: object) -> None:
        found.add(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        for data in (*decoder.seeds, *mutations):
            decoder.takes(data)
    finally:
        sys.setprofile(before)
    yield from (name for name in found if name.startswith(_OURS))


def _imported(module: ModuleType) -> Iterator[str]:
    for value in vars(module).values():
        named = value if isinstance(value, ModuleType) else None
        name = getattr(value, "__module__", None) if named is None else named.__name__
        if isinstance(name, str) and name.startswith(_OURS) and name in sys.modules:
            yield name
