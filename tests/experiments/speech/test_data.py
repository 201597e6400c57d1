from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.cache import CacheError
from experiments.speech.data import PhoneFrames, frames, prepare
from experiments.speech.errors import SpeechError
from experiments.speech.volume import Volume
from tests.experiments.speech.conftest import TEST, TRAIN


@pytest.fixture(scope="module")
def test_part(cache: Path) -> PhoneFrames:
    return frames("test", hours=TEST.hours, cache=cache, survey_hours=TRAIN.hours)


@pytest.fixture(scope="module")
def train_part(cache: Path) -> PhoneFrames:
    return frames("train", hours=TRAIN.hours, cache=cache, survey_hours=TRAIN.hours)


def find_edges(volume: Volume) -> list[int]:
    """Frames less than six from the beginning or end of some utterance."""
    edges = volume.boundaries[:4, None] + np.arange(-6, 7)
    return sorted({int(edge) for edge in edges.ravel() if edge >= 0})


def test_context_is_clipped_in_the_utterance(test_part: PhoneFrames, train_volume: Volume) -> None:
    volume = test_part.volume
    mean = np.array(train_volume.facts["mean"])
    deviation = np.array(train_volume.facts["deviation"])
    chosen = [*find_edges(volume), len(test_part) - 1]
    inputs, _ = test_part.__getitems__(chosen)
    for row, index in zip(inputs, chosen, strict=True):
        utterance = max(i for i, first in enumerate(volume.boundaries) if first <= index)
        first, last = volume.boundaries[utterance : utterance + 2] - (0, 1)
        context = [min(max(index + shift, first), last) for shift in range(-5, 6)]
        slow = (volume.features[context].astype(np.float64) - mean) / deviation
        np.testing.assert_allclose(row, slow.ravel(), rtol=1e-4, atol=1e-4)


def test_a_batch_is_its_samples(test_part: PhoneFrames) -> None:
    indices = [5, 3, 3, len(test_part) - 1]
    inputs, targets = test_part.__getitems__(indices)
    assert inputs.shape == (4, 440)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    for row, target, index in zip(inputs, targets, indices, strict=True):
        sample, state = test_part[index]
        assert torch.equal(sample, row)
        assert type(state) is int
        assert state == target
    assert torch.equal(test_part.__getitems__(torch.tensor(indices))[0], inputs)
    inputs, targets = test_part.__getitems__([])
    assert (inputs.shape, targets.shape) == ((0, 440), (0,))
    for index in (-1, 10**9):
        with pytest.raises(IndexError, match="is not in 0 to"):
            test_part[index]


def test_train_inputs_are_normalised(train_part: PhoneFrames) -> None:
    inputs, _ = train_part.__getitems__(range(len(train_part)))
    centre = inputs.view(-1, 11, 40)[:, 5]
    torch.testing.assert_close(centre.mean(dim=0), torch.zeros(40), atol=1e-3, rtol=0)
    torch.testing.assert_close(centre.std(dim=0), torch.ones(40), atol=1e-3, rtol=0)


def test_both_parts_have_the_same_states(train_part: PhoneFrames, test_part: PhoneFrames) -> None:
    assert train_part.n_states == test_part.n_states == 210
    states: dict[str, set[int]] = {}
    for part in (train_part, test_part):
        volume = part.volume
        _, targets = part.__getitems__(range(len(part)))
        assert torch.equal(targets % 3, torch.tensor(volume.contexts[:, 3]))
        for number, phone in enumerate(volume.phones):
            own = targets[torch.tensor(volume.contexts[:, 1] == number)] // 3
            states.setdefault(phone, set()).update(own.tolist())
    assert all(len(numbers) <= 1 for numbers in states.values())


def test_context_dependent_states_are_as_many_as_asked(cache: Path) -> None:
    part = frames("test", hours=TEST.hours, labels="cd1000", cache=cache, survey_hours=TRAIN.hours)
    _, targets = part.__getitems__(range(len(part)))
    assert part.n_states == 1_000
    assert 210 < int(targets.max()) < 1_000


def test_prepare_finds_damage(cache: Path, tmp_path: Path) -> None:
    folder = cache / TRAIN.name
    copy = tmp_path / TRAIN.name
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    prepare("train", hours=0.03, survey_hours=0.03, cache=tmp_path)
    with (copy / "features.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(CacheError, match=r"features\.npy .* SHA-256 .* Delete the fo"):
        prepare("train", hours=0.03, survey_hours=0.03, cache=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": "dev"}, "part = 'dev' must be 'train' or 'test'"),
        ({"part": "train", "hours": -1.0}, "hours = -1.0 must be above 0"),
        ({"part": "train", "labels": "tri"}, "labels = 'tri' is no labelling"),
    ],
)
def test_a_wrong_argument_is_named_before_any_work(
    arguments: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpeechError, match=message):
        prepare(cache=tmp_path, **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
