"""Makes corpora: recording sessions in order, until there are hours enough.

    python -m experiments.speech.builder CACHE N_WORKERS RECIPE.json ...

A corpus is built once and mapped by every process that trains on it. `ensure` builds those that
are missing by this program, because sessions are forked, and a fork of a process in which torch has
started threads may hang; and because BLAS must run on one thread, for the last bit of a sum depends
on how many there are.

An interrupted build leaves nothing that looks whole. A shorter volume of the same recipe, if the
cache has one, is copied and continued, not made again.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import numpy.lib.format as npy
from numpy.typing import DTypeLike, NDArray

from experiments.cache import CacheError, build, show_progress, write_facts
from experiments.speech import text
from experiments.speech.casting import Casting, cast
from experiments.speech.errors import SpeechError
from experiments.speech.espeak import SILENCE, Espeak
from experiments.speech.features import FRAMES_PER_HOUR, N_MELS
from experiments.speech.recipe import Recipe
from experiments.speech.session import Recording
from experiments.speech.studio import Studio
from experiments.speech.volume import ARRAYS, FACTS, Volume, open_volume


class Tape:
    """Rows of one shape and type; use it in a `with` statement."""

    def __init__(self, path: Path, *, row_shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.n_rows = 0
        self._row_shape = row_shape
        self._dtype: np.dtype[np.generic] = np.dtype(dtype)
        self._file = path.open("w+b")

    def __enter__(self) -> Self:
        self._write_header()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()

    def copy(self, source: Path) -> None:
        rows = np.load(source, mmap_mode="r", allow_pickle=False)
        assert rows.shape[1:] == self._row_shape
        assert rows.dtype == self._dtype
        with source.open("rb") as file:
            file.seek(rows.offset)
            shutil.copyfileobj(file, self._file, 1 << 22)
        self.n_rows += len(rows)

    def append(self, rows: NDArray[np.generic]) -> None:
        assert rows.shape[1:] == self._row_shape
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self.n_rows += len(rows)

    def _write_header(self) -> None:
        shape, descr = (self.n_rows, *self._row_shape), npy.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(self._file, header)


STOP_SECONDS = 10.0
LIBRARIES = ("numpy", "scipy", "espeakng-loader")
STATISTICS_ROWS = 1 << 16


def fill(folder: Path, recipe: Recipe, *, cache: Path, n_workers: int) -> None:
    """Write a volume into a folder; the caller holds the recipe's lock."""
    with Builder(folder) as builder:
        beginning = find_beginning(recipe, cache=cache)
        if beginning is not None:
            builder.continue_from(beginning)
        casting = cast(recipe.part, seed=recipe.seed, clean=recipe.clean)
        builder.record(casting, n_frames=recipe.n_frames, n_workers=n_workers)
    builder.write_facts(recipe, casting=casting)


def find_beginning(recipe: Recipe, *, cache: Path) -> Volume | None:
    """The longest volume in the cache that is the beginning of this one."""
    volumes = [open_volume(path.parent) for path in cache.glob(f"{recipe.pattern}/{FACTS}")]
    shorter = [found for found in volumes if found.facts["hours"] < recipe.hours]
    if not shorter:
        return None
    longest = max(shorter, key=lambda found: len(found.features))
    longest.verify()
    return longest


class Builder:
    """A volume in the making; use it in a `with` statement, then write the facts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._tapes: dict[str, Tape] = {}
        self._numbers: dict[str, int] = {SILENCE: 0}
        self._voices: list[str] = []  # one a session
        self._n_frames = 0
        self._frames_per_second = 0.0

    def __enter__(self) -> Self:
        rows = {"features": (N_MELS,), "contexts": (4,)}
        types = {"features": np.float16, "contexts": np.int16}
        for name in ARRAYS:
            path, dtype = self._folder / f"{name}.npy", types.get(name, np.int64)
            tape = Tape(path, row_shape=rows.get(name, ()), dtype=dtype)
            self._tapes[name] = self._files.enter_context(tape)
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def continue_from(self, volume: Volume) -> None:
        for name, tape in self._tapes.items():
            tape.copy(volume.folder / f"{name}.npy")
        self._numbers = {phone: index for index, phone in enumerate(volume.phones)}
        self._voices = list(volume.facts["voices"])
        self._n_frames = len(volume.features)

    def record(self, casting: Casting, *, n_frames: int, n_workers: int) -> None:
        if not self._voices:
            self._tapes["boundaries"].append(np.zeros(1, np.int64))
        studio = Studio(Espeak(), casting=casting, n_workers=n_workers)
        begin, n_old = time.monotonic(), self._n_frames
        title = f"synthesising speech, {casting.part} part"
        with (
            closing(studio.hold_sessions(len(self._voices))) as sessions,
            show_progress(title, n_frames=max(0, n_frames - n_old)) as advance,
        ):
            while self._n_frames < n_frames:
                recording = next(sessions)
                self._add(recording)
                advance(len(recording.energies))
        seconds = time.monotonic() - begin
        self._frames_per_second = (self._n_frames - n_old) / max(1e-9, seconds)

    def write_facts(self, recipe: Recipe, *, casting: Casting) -> None:
        mean, deviation = _measure(np.load(self._folder / "features.npy", mmap_mode="r"))
        facts = {
            "part": recipe.part,
            "hours": recipe.hours,
            "hours_recorded": self._n_frames / FRAMES_PER_HOUR,
            "seed": recipe.seed,
            "clean": recipe.clean,
            "frames": self._n_frames,
            "utterances": self._tapes["sentences"].n_rows,
            "sessions": len(self._voices),
            "sentences_to_choose_from": len(casting.sentences),
            "text_sha256": text.hash_sentences(casting.sentences),
            "interpreter": f"{platform.python_implementation()} {platform.python_version()}",
            "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
            "frames_per_second": round(self._frames_per_second),
            "mean": mean.tolist(),
            "deviation": deviation.tolist(),
            "phones": list(self._numbers),
            "voices": self._voices,
        }
        write_facts(self._folder / FACTS, facts, arrays=ARRAYS)

    def _add(self, recording: Recording) -> None:
        for phone in recording.phones:
            self._numbers.setdefault(phone, len(self._numbers))
        table = np.array([self._numbers[phone] for phone in recording.phones], np.int16)
        contexts = recording.contexts.copy()
        contexts[:, :3] = table[contexts[:, :3]]
        ends = self._n_frames + np.cumsum(recording.lengths)
        self._tapes["features"].append(recording.energies)
        self._tapes["contexts"].append(contexts)
        self._tapes["boundaries"].append(ends)
        self._tapes["sentences"].append(recording.sentences)
        self._voices.append(recording.voice)
        self._n_frames += len(recording.energies)


def _measure(features: NDArray[np.float16]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of every energy, (40,) both."""
    total, squares = np.zeros(N_MELS), np.zeros(N_MELS)
    for start in range(0, len(features), STATISTICS_ROWS):
        rows = features[start : start + STATISTICS_ROWS].astype(np.float64)
        total += rows.sum(axis=0)
        squares += np.square(rows).sum(axis=0)
    mean = total / len(features)
    return mean, np.sqrt(np.maximum(squares / len(features) - mean**2, 1e-8))


# ------------------------------------------------------------------- the program


def ensure(recipes: Sequence[Recipe], *, cache: Path, n_workers: int | None = None) -> None:
    """Build the recipes that are not in `cache`, in a fresh process, in this order."""
    missing = [recipe for recipe in recipes if not (cache / recipe.name).exists()]
    if not missing:
        return
    arguments = [
        *(sys.executable, "-m", "experiments.speech.builder", str(cache)),
        str(n_workers or len(os.sched_getaffinity(0))),
        *(json.dumps(asdict(recipe)) for recipe in missing),
    ]
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        # One session per core is the parallelism, and features have the same bits.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as builder:
        try:
            answer, _ = builder.communicate()
        except BaseException:
            _stop(builder)
            raise
    if builder.returncode != 0:
        raise CacheError(answer.strip() or _describe_end(builder.returncode))


def _stop(builder: subprocess.Popen[str]) -> None:
    """End the builder; it has a moment to clear away what is half built."""
    builder.terminate()
    try:
        builder.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        builder.kill()


def _describe_end(status: int) -> str:
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    return f"the process that synthesises speech {how}; start again to build it anew"


def main(cache: str, n_workers: str, *recipes: str) -> int:
    """Build these recipes; an error is one line on stdout."""
    # Both ways to be ended unwind the stack, so that nothing half built is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for text in recipes:
            recipe, folder = Recipe(**json.loads(text)), Path(cache)
            fill_folder = partial(fill, recipe=recipe, cache=folder, n_workers=int(n_workers))
            build(folder / recipe.name, fill_folder, n_bytes=recipe.n_bytes)
    except (SpeechError, CacheError) as error:
        print(error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
