"""A finished corpus on disk: where its parts are, and whether they can be trusted.

features.npy    float16 (frames, 40), log-mel energies
contexts.npy    int16 (frames, 4): left phone, phone, right phone, position
boundaries.npy  int64 (utterances + 1,), first frame of each utterance, and the end
sentences.npy   int64 (utterances,), index into the part's sentences
corpus.json     what it was made from, counts, statistics, SHA-256 of every array
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments import cache
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
        cache.verify(self.folder, self.facts)


def open_volume(folder: Path) -> Volume:
    """Map a corpus; a file that is missing, cut short or unreadable is named."""
    path = folder / FACTS
    facts = cache.read_facts(path, ("frames", "utterances", "phones", "mean", "deviation"))
    n_frames, n_utterances = facts["frames"], facts["utterances"]
    shapes = {
        "features": (n_frames, N_MELS),
        "contexts": (n_frames, 4),
        "boundaries": (n_utterances + 1,),
        "sentences": (n_utterances,),
    }
    return Volume(folder=folder, facts=facts, **cache.map_arrays(path, shapes))
