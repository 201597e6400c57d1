"""The task as a map-style data set: 11 frames in, the phone state of the middle out.

Both parts are labelled and normalised by the first `survey_hours` of the train part, so
that train and test agree whatever their own length is.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from experiments.cache import find_cache
from experiments.speech import labels as labelling
from experiments.speech.builder import ensure
from experiments.speech.features import N_MELS
from experiments.speech.recipe import Recipe
from experiments.speech.volume import Volume, open_volume


N_LEFT = N_RIGHT = 5  # frames of context
N_CONTEXT = N_LEFT + 1 + N_RIGHT
N_INPUTS = N_CONTEXT * N_MELS  # 440
HOURS = {"train": 2.0, "test": 0.5}  # where `hours` is not given


class PhoneFrames(Dataset[tuple[torch.Tensor, int]]):
    """Frames with their context and phone state."""

    def __init__(self, volume: Volume, *, survey: Volume, inventory: labelling.Inventory) -> None:
        self.volume = volume  # where the frames lie
        self.n_states = inventory.n_states  # how many phone states there are
        targets = inventory.label(volume.contexts, names=volume.phones)
        self._targets = torch.from_numpy(targets)  # (frames,)
        self._features = torch.from_numpy(volume.features)  # (frames, 40), mapped
        self._boundaries = torch.from_numpy(np.array(volume.boundaries))
        self._offsets = torch.arange(-N_LEFT, N_RIGHT + 1)
        mean, deviation = survey.facts["mean"], survey.facts["deviation"]
        self._mean = torch.tensor(mean).repeat(N_CONTEXT)  # (440,)
        self._scale = 1.0 / torch.tensor(deviation).repeat(N_CONTEXT)

    def __len__(self) -> int:
        return len(self._targets)

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One sample: inputs (440,) float32 and its state."""
        inputs, targets = self.__getitems__([index])
        return inputs[0], int(targets[0])

    def __getitems__(
        self, indices: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole batch: inputs (n, 440) float32 and states (n,) int64."""
        frames = torch.as_tensor(indices, dtype=torch.int64)
        if len(frames) and not 0 <= int(frames.min()) <= int(frames.max()) < len(self):
            raise IndexError(f"a frame index is not in 0 to {len(self) - 1}")
        utterance = torch.searchsorted(self._boundaries, frames, right=True)
        first = self._boundaries[utterance - 1].unsqueeze(1)
        last = self._boundaries[utterance].unsqueeze(1) - 1
        rows = (frames.unsqueeze(1) + self._offsets).clamp(first, last)
        energies = self._features.index_select(0, rows.flatten())
        inputs = energies.view(-1, N_INPUTS).to(torch.float32)
        inputs.sub_(self._mean).mul_(self._scale)
        return inputs, self._targets[frames].to(torch.int64)


def frames(
    part: str,
    *,
    hours: float | None = None,
    labels: str = "mono",
    cache: str | os.PathLike[str] | None = None,
    seed: int = 0,
    survey_hours: float = 1.0,
) -> PhoneFrames:
    """The frames of one part, "train" or "test"; they are synthesised now if the cache lacks them.

    `hours` of audio are the least, by default 2 for train and 0.5 for test. Labels are "mono" (210
    states) or "cdN" (N states, for instance "cd8192"). `cache` is the folder of all corpora, if not
    the user's cache directory. `survey_hours` from the beginning of the train part decide labels
    and normalisation: they must be the same for train and test.
    """
    labelling.count_states(labels)
    folder = find_cache("speech", cache)
    own, survey = _list_recipes(part, hours, seed=seed, survey_hours=survey_hours)
    ensure([survey, own], cache=folder)
    surveyed = open_volume(folder / survey.name)
    inventory = labelling.derive(labels, contexts=surveyed.contexts, names=surveyed.phones)
    volume = open_volume(folder / own.name)
    return PhoneFrames(volume, survey=surveyed, inventory=inventory)


def prepare(
    part: str,
    *,
    hours: float | None = None,
    labels: str = "mono",
    cache: str | os.PathLike[str] | None = None,
    **chosen: Any,  # noqa: ANN401 -- the other arguments of `frames`
) -> None:
    """Build and check what `frames` with the same arguments will open.

    Call it once before several processes call `frames`.
    """
    labelling.count_states(labels)
    folder = find_cache("speech", cache)
    recipes = _list_recipes(part, hours, **chosen)
    ensure(recipes[::-1], cache=folder)
    for recipe in recipes:
        open_volume(folder / recipe.name).verify()


def _list_recipes(
    part: str, hours: float | None, *, seed: int = 0, survey_hours: float = 1.0
) -> tuple[Recipe, Recipe]:
    own = Recipe(part=part, hours=hours or HOURS.get(part, 0.0), seed=seed)
    return own, Recipe(part="train", hours=survey_hours, seed=seed)
