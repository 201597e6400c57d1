"""Corpora on disk."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from experiments.cache import CacheError, find_cache, hold_lock, show_progress
from experiments.speech.builder import Tape, ensure
from experiments.speech.casting import choose_variants
from experiments.speech.recipe import Recipe
from experiments.speech.volume import ARRAYS, Volume, open_volume
from tests.experiments.speech.conftest import BEGINNING, CLEAN, TEST, TRAIN


def copy_volume(volume: Volume, folder: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(volume.folder, folder / volume.folder.name)


def test_two_builders_at_once_make_what_one_made_in_two_steps(
    tmp_path: Path, train_volume: Volume
) -> None:
    partial = tmp_path / f"{TRAIN.name}.partial"
    partial.mkdir()
    (partial / "features.npy").write_text("left by a builder that was interrupted")
    with ThreadPoolExecutor(2) as callers:
        calls = [callers.submit(ensure, [TRAIN], cache=tmp_path) for _ in range(2)]
    assert [call.result() for call in calls] == [None, None]
    again = open_volume(tmp_path / TRAIN.name)
    # `train_volume` continues BEGINNING; this was recorded in one go.
    assert again.facts["sha256"] == train_volume.facts["sha256"]
    assert again.facts["mean"] == train_volume.facts["mean"]
    assert not partial.exists()


def test_a_shorter_volume_is_the_beginning_of_a_longer(cache: Path, train_volume: Volume) -> None:
    beginning = open_volume(cache / BEGINNING.name)
    n_frames = len(beginning.features)
    assert BEGINNING.n_frames <= n_frames < TRAIN.n_frames <= len(train_volume.features)
    np.testing.assert_array_equal(beginning.features, train_volume.features[:n_frames])


def test_the_parts_share_no_voice_and_no_sentence(
    train_volume: Volume, test_volume: Volume
) -> None:
    train, test = (set(choose_variants(part)) for part in ("train", "test"))
    assert not train & test
    assert (len(train), len(test)) == (86, 18)
    assert train_volume.facts["text_sha256"] != test_volume.facts["text_sha256"]
    for volume, variants in ((train_volume, train), (test_volume, test)):
        assert {voice.partition("+")[2] for voice in volume.facts["voices"]} <= variants
        n_sentences = volume.facts["sentences_to_choose_from"]
        assert 0 <= volume.sentences.min() <= volume.sentences.max() < n_sentences


def test_utterances_cover_the_frames_and_neighbours_agree_inside(train_volume: Volume) -> None:
    boundaries = train_volume.boundaries
    assert boundaries[0] == 0
    assert boundaries[-1] == len(train_volume.features) == len(train_volume.contexts)
    assert np.all(np.diff(boundaries) > 20)
    left, phone, right, position = train_volume.contexts[: boundaries[1]].T
    changed = np.flatnonzero(np.diff(phone)) + 1
    assert np.all(position[changed] <= position[changed - 1])
    np.testing.assert_array_equal(phone[changed - 1], left[changed])
    np.testing.assert_array_equal(phone[changed], right[changed - 1])


def test_labels_explain_the_audio_best_when_not_shifted(cache: Path) -> None:
    """The share of the energies' variance between phones falls with any shift."""
    volume = open_volume(cache / CLEAN.name)
    energies = volume.features.astype(np.float64)
    energies -= energies.mean(axis=0)
    phones = volume.contexts[:, 1]
    shares = {}
    for shift in (-3, -2, -1, 0, 1, 2, 3):
        inside = slice(3, len(phones) - 3)
        moved = np.roll(phones, shift)[inside]
        frames = np.bincount(moved, minlength=len(volume.phones))[:, None]
        sums = np.zeros((len(volume.phones), 40))
        np.add.at(sums, moved, energies[inside])
        between = (sums**2 / np.maximum(1, frames)).sum()
        shares[shift] = between / (energies[inside] ** 2).sum()
    assert max(shares, key=lambda shift: shares[shift]) == 0
    assert shares[0] > 0.25
    assert shares[-3] < shares[-2] < shares[-1] < shares[0]
    assert shares[0] > shares[1] > shares[2] > shares[3]


@pytest.mark.parametrize("name", [*(f"{array}.npy" for array in ARRAYS), "corpus.json"])
def test_a_file_cut_short_is_named_with_its_mend(
    name: str, tmp_path: Path, test_volume: Volume
) -> None:
    folder = copy_volume(test_volume, tmp_path)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CacheError) as caught:
        open_volume(folder)
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be used: ")
    assert f"Delete the folder {folder} and start again" in message


def test_what_does_not_fit_the_facts_is_refused(tmp_path: Path, test_volume: Volume) -> None:
    folder = copy_volume(test_volume, tmp_path)
    np.save(folder / "features.npy", np.zeros((3, 40), np.float16))
    with pytest.raises(CacheError, match=r"its shape is \(3, 40\), corpus.json says"):
        open_volume(folder)
    (folder / "features.npy").unlink()
    with pytest.raises(CacheError, match=r"features.npy cannot be used: no such file"):
        open_volume(folder)
    facts = {key: test_volume.facts[key] for key in ("frames", "utterances", "mean")}
    (folder / "corpus.json").write_text(json.dumps(facts))
    with pytest.raises(CacheError, match="it lacks deviation, phones, sha256"):
        open_volume(folder)
    (folder / "corpus.json").unlink()
    with pytest.raises(CacheError, match=r"corpus.json cannot be used: no such file"):
        open_volume(folder)


def test_the_facts_say_what_it_was_made_from(test_volume: Volume) -> None:
    facts = test_volume.facts
    assert facts["part"] == "test"
    assert facts["frames"] >= TEST.n_frames
    assert len(facts["text_sha256"]) == 64
    assert facts["interpreter"].startswith("CPython 3.")
    assert set(facts["versions"]) == {"numpy", "scipy", "espeakng-loader"}


def test_a_lock_that_is_never_freed_is_not_waited_for_forever(tmp_path: Path) -> None:
    path = tmp_path / "train.lock"
    with (
        hold_lock(path),
        pytest.raises(CacheError, match=r"has been building train for more than 0 s"),
        hold_lock(path, wait_seconds=0.0),
    ):
        raise AssertionError("two held one lock")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CacheError, match=r"cannot write .*file.*XDG_CACHE_HOME"):
        ensure([TEST], cache=tmp_path / "file" / "cache")


def test_recipes_have_names_of_their_own() -> None:
    recipes = [TRAIN, TEST, CLEAN, Recipe(part="train", hours=0.03, seed=1)]
    assert len({recipe.name for recipe in recipes}) == len(recipes)
    assert round(Recipe(part="train", hours=10.0).n_bytes / 1e6) == 348


def test_the_cache_is_where_the_user_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_cache("speech", None) == tmp_path / "distbelief" / "speech"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert find_cache("speech", None) == Path.home() / ".cache" / "distbelief" / "speech"
    assert find_cache("speech", "~/here") == Path.home() / "here"


def test_rows_written_bit_by_bit_load_as_one_array(tmp_path: Path) -> None:
    rows = np.arange(30, dtype=np.float16).reshape(10, 3)
    with Tape(tmp_path / "a.npy", row_shape=(3,), dtype=np.float16) as tape:
        tape.append(rows[:4])
    with Tape(tmp_path / "b.npy", row_shape=(3,), dtype=np.float16) as tape:
        tape.copy(tmp_path / "a.npy")
        for row in rows[4:]:
            tape.append(row[None])
        assert tape.n_rows == 10
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows)
    with Tape(tmp_path / "empty.npy", row_shape=(), dtype=np.int64):
        pass
    assert np.load(tmp_path / "empty.npy").shape == (0,)


def test_without_a_terminal_the_last_frames_are_a_plain_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show_progress("synthesising", n_frames=10) as advance:
        advance(4)
        advance(6)
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("synthesising: 100%, ")
    assert line.endswith(" frames/s, 0 s left")
