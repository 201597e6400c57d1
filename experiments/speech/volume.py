"""A finished corpus on disk: where its parts are, and whether they can be trusted.

features.npy    float16 (frames, 40), log-mel energies
contexts.npy    int16 (frames, 4): left phone, phone, right phone, position
boundaries.npy  int64 (utterances + 1,), first frame of each utterance, and the end
sentences.npy   int64 (utterances,), index into the part's sentences
corpus.json     what it was made from, counts, statistics, SHA-256 of every array
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.speech.errors import CorpusError
from experiments.speech.features import N_MELS


FACTS = "corpus.json"
ARRAYS = ("features", "contexts", "boundaries", "sentences")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """One part of a corpus, its large arrays mapped, not read."""

    folder: Path
    facts: dict[str, Any]
    features: NDArray[np.float16]  # (frames, 40)
    contexts: NDArray[np.int16]  # (frames, 4)
    boundaries: NDArray[np.int64]  # (utterances + 1,)
    sentences: NDArray[np.int64]  # (utterances,)

    @property
    def phones(self) -> tuple[str, ...]:
        return tuple(self.facts["phones"])

    def verify(self) -> None:
        """Compare every array with the hash taken when it was written."""
        for name in ARRAYS:
            path = self.folder / f"{name}.npy"
            found, written = hash_file(path), self.facts["sha256"][name]
            if found != written:
                raise _damaged(path, f"its SHA-256 is {found[:12]}…, not {written[:12]}…")


def open_volume(folder: Path) -> Volume:
    """Map a corpus; a file that is missing, cut short or unreadable is named."""
    facts = _read_facts(folder / FACTS)
    arrays = {name: _map_array(folder / f"{name}.npy") for name in ARRAYS}
    n_frames, n_utterances = facts["frames"], facts["utterances"]
    shapes = {
        "features": (n_frames, N_MELS),
        "contexts": (n_frames, 4),
        "boundaries": (n_utterances + 1,),
        "sentences": (n_utterances,),
    }
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise _damaged(
                folder / f"{name}.npy", f"its shape is {arrays[name].shape}, {FACTS} says {shape}"
            )
    return Volume(folder=folder, facts=facts, **arrays)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        needed = {"frames", "utterances", "phones", "sha256", "mean", "deviation"}
        missing = needed - set(facts)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise _damaged(path, f"it is no JSON: {error}") from error
    if missing:
        raise _damaged(path, f"it lacks {', '.join(sorted(missing))}")
    return dict(facts)


def _map_array(path: Path) -> NDArray[Any]:
    """Map an array copy-on-write: never written, but torch wants a writable buffer."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, EOFError) as error:
        raise _damaged(path, str(error)) from error
    return array


def _unreadable(path: Path, error: OSError) -> CorpusError:
    reason = error.strerror or str(error)
    return _damaged(path, reason[:1].lower() + reason[1:])


def _damaged(path: Path, reason: str) -> CorpusError:
    return CorpusError(
        f"{path} cannot be used: {reason}. Delete the folder "
        f"{os.fspath(path.parent)} and start again; it will be built anew"
    )
