import numpy as np
import pytest

from experiments.speech.espeak import SAMPLE_RATE
from experiments.speech.features import N_MELS, WINDOW, build_mel_bank, extract


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
    tone = make_tone(500.0)
    frames = extract(tone, bank=build_mel_bank())
    assert frames.energies.shape == (len(frames.centres), N_MELS)
    assert set(np.diff(frames.centres).tolist()) == {220, 221}
    assert frames.centres[0] == WINDOW // 2
    assert len(tone) - 221 < frames.centres[-1] + WINDOW // 2 + 1 <= len(tone)


@pytest.mark.parametrize("n_samples", [WINDOW, WINDOW + 220, WINDOW + 221])
def test_a_short_waveform_has_the_frames_that_fit(n_samples: int) -> None:
    frames = extract(np.zeros(n_samples, np.float32), bank=build_mel_bank())
    assert len(frames.centres) == 1 + (n_samples - WINDOW) // 221
    assert np.all(np.isfinite(frames.energies))


def test_a_warp_moves_the_filters() -> None:
    plain, warped = build_mel_bank(), build_mel_bank(1.12)
    ratio = warped[:, 20].argmax() / plain[:, 20].argmax()
    assert ratio == pytest.approx(1.12, rel=0.05)
