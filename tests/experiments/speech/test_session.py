"""What recordings are made from: text, sound, features, labels of frames."""

import dataclasses
import inspect
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given, strategies as st

from experiments.speech import acoustics, text
from experiments.speech.espeak import SAMPLE_RATE
from experiments.speech.features import N_MELS, WINDOW, build_mel_bank, extract
from experiments.speech.session import label_frames


@given(
    durations=st.lists(st.integers(1, 400), min_size=1, max_size=12), silence=st.integers(0, 300)
)
def test_labels_equal_a_slow_search(durations: list[int], silence: int) -> None:
    onsets = silence + np.cumsum([0, *durations[:-1]])
    n_samples = silence + sum(durations)
    centres = np.arange(0, n_samples, 37)
    segments, positions = label_frames(centres, onsets=onsets, n_samples=n_samples)
    ends = [*onsets[1:], n_samples]
    for centre, segment, position in zip(centres, segments, positions, strict=True):
        slow = max([i for i, onset in enumerate(onsets) if onset <= centre], default=0)
        third = (centre - onsets[slow]) * 3 // (ends[slow] - onsets[slow])
        assert segment == slow
        assert position == max(0, third)


def test_segments_of_no_length_are_passed_over() -> None:
    onsets = np.array([0, 100, 100, 200])
    segments, positions = label_frames(np.array([99, 100, 199, 200]), onsets=onsets, n_samples=200)
    assert segments.tolist() == [0, 2, 2, 3]
    assert positions.tolist() == [2, 0, 2, 0]


def make_tone(frequency: float, *, seconds: float = 0.3) -> np.ndarray:
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.1 * np.sin(2.0 * np.pi * frequency * times)).astype(np.float32)


@pytest.mark.parametrize("frequency", [300.0, 1_000.0, 4_000.0])
def test_a_tone_is_loudest_in_the_filter_around_it(frequency: float) -> None:
    bank = build_mel_bank()
    energies = extract(make_tone(frequency), bank=bank).energies
    peaks = bank.argmax(axis=0) * SAMPLE_RATE / 1_024
    loudest = energies.mean(axis=0).argmax()
    assert loudest == np.abs(peaks - frequency).argmin()


def test_frames_are_10_ms_apart_and_inside_the_waveform() -> None:
    bank = build_mel_bank()
    tone = make_tone(500.0)
    frames = extract(tone, bank=bank)
    assert frames.energies.shape == (len(frames.centres), N_MELS)
    assert set(np.diff(frames.centres).tolist()) == {220, 221}
    assert frames.centres[0] == WINDOW // 2
    assert len(tone) - 221 < frames.centres[-1] + WINDOW // 2 + 1 <= len(tone)
    for n_samples in (WINDOW, WINDOW + 220, WINDOW + 221):
        frames = extract(np.zeros(n_samples, np.float32), bank=bank)
        assert len(frames.centres) == 1 + (n_samples - WINDOW) // 221
        assert np.all(np.isfinite(frames.energies))


def test_a_warp_moves_the_filters() -> None:
    plain, warped = build_mel_bank(), build_mel_bank(1.12)
    ratio = warped[:, 20].argmax() / plain[:, 20].argmax()
    assert ratio == pytest.approx(1.12, rel=0.05)


def draw(seed: int) -> acoustics.Channel:
    rng = np.random.default_rng(seed)
    talker = rng.standard_normal(SAMPLE_RATE).astype(np.float32)
    return acoustics.draw_channel(rng, talker=talker)


@pytest.mark.parametrize("seed", range(5))
def test_direct_sound_comes_first_and_noise_is_as_loud_as_asked(seed: int) -> None:
    channel = draw(seed)
    response = channel.response
    assert response[0] == 1.0
    assert np.all(response[1 : int(0.003 * SAMPLE_RATE)] == 0.0)
    level = 20.0 * np.log10(np.linalg.norm(response[1:]))
    assert -12.1 <= level <= -1.9
    rng = np.random.default_rng(seed)
    speech = rng.standard_normal(SAMPLE_RATE).astype(np.float32)
    heard = acoustics.record(speech, channel=channel, rng=rng)
    quiet = acoustics.record(0 * speech, channel=channel, rng=rng)
    assert heard.shape == speech.shape
    assert heard.dtype == np.float32
    assert np.abs(quiet).max() < 1e-6  # noise is relative to speech
    correlation = np.corrcoef(heard, speech)[0, 1]
    assert 0.3 < correlation < 1.0
    again, same = (
        acoustics.record(speech, channel=draw(seed), rng=np.random.default_rng(4)) for _ in range(2)
    )
    np.testing.assert_array_equal(again, same)  # it depends on its stream alone


def test_a_room_is_a_convolution() -> None:
    rng = np.random.default_rng(0)
    speech, response = rng.standard_normal((2, 500)).astype(np.float32)
    channel = dataclasses.replace(draw(0), response=response, tilt=0.0, snr=300.0)
    heard = acoustics.record(speech, channel=channel, rng=rng)
    direct = np.convolve(speech, response)[:500]
    gain = heard[0] / direct[0]
    np.testing.assert_allclose(heard, gain * direct, rtol=1e-3, atol=1e-3)


DOCSTRING = """Return a *list* of the items that :func:`read` has found.

    An example follows, and it shall not be read aloud::

        >>> This is code and Not A Sentence to be read aloud.

    Too short. Every item of the list is a string, and no item of it is empty.
    The 3rd item holds a digit, so nobody is asked to read it aloud."""


def test_a_docstring_yields_its_plain_sentences() -> None:
    assert list(text.split(inspect.cleandoc(DOCSTRING))) == [
        "Return a list of the items that read has found.",
        "Every item of the list is a string, and no item of it is empty.",
    ]


def test_no_sentence_is_in_both_parts_and_each_stays_when_others_go() -> None:
    # Sentences enough for a law, without the seconds that all of them take.
    sentences = sorted({line for topic in topics.values() for line in text.split(topic)})
    train, test = (text.select(sentences, part=part) for part in ("train", "test"))
    assert len(sentences) > 800
    assert not set(train) & set(test)
    assert sorted(train + test) == sentences
    assert 0.05 < len(test) / len(sentences) < 0.15
    fewer = sentences[::2]
    assert text.select(fewer, part="test") == [s for s in fewer if s in set(test)]
    assert text.hash_sentences(fewer) != text.hash_sentences(fewer[:-1])
