"""Log-mel energies: 25 ms frames every 10 ms, 40 values each, as in section 5 of
Dean 2012 ("11 consecutive overlapping 25 ms frames of speech, each represented by 40
log-energy values"); the context of 11 frames is put together in `data`.
"""  # noqa: D205

from dataclasses import dataclass

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from experiments.speech.espeak import SAMPLE_RATE


Floats = NDArray[np.float32]
N_MELS = 40
WINDOW = 551  # samples, 25 ms
HOP = SAMPLE_RATE / 100  # samples, 10 ms
FRAMES_PER_HOUR = 360_000
TRANSFORM = 1_024  # points
LOWEST, HIGHEST = 64.0, 9_000.0  # Hz
FULL_SCALE = 1_024.0  # of a sample, so that the floor lies 66 dB or so below speech
ENERGY_FLOOR = 1e-2
HAMMING = np.hamming(WINDOW).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The features of one waveform."""

    energies: Floats  # (frames, 40), natural logarithm
    centres: NDArray[np.int64]  # (frames,), sample index


def build_mel_bank(warp: float = 1.0) -> Floats:
    """Triangular filters, evenly spaced in mel (O'Shaughnessy 1987), (513, 40).

    Args:
        warp: factor on every frequency; it acts as a longer or shorter vocal tract.
    """
    low, high = (1127.0 * np.log1p(f / 700.0) for f in (LOWEST, HIGHEST))
    corners = 700.0 * np.expm1(np.linspace(low, high, N_MELS + 2) / 1127.0) * warp
    corners = np.clip(corners, 0.0, SAMPLE_RATE / 2)
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    bins = np.arange(TRANSFORM // 2 + 1)[:, None] * (SAMPLE_RATE / TRANSFORM)
    rising = (bins - left) / (peak - left)
    falling = (right - bins) / (right - peak)
    return np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)


def extract(waveform: Floats, *, bank: Floats) -> Frames:
    """Frames that lie wholly inside the waveform.

    Args:
        waveform: (samples,), full scale is 1.
        bank: (513, 40), from `build_mel_bank`.
    """
    n_frames = max(0, int((len(waveform) - WINDOW) / HOP) + 1)
    starts = np.round(np.arange(n_frames) * HOP).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(waveform, WINDOW)[starts]
    spectrum = scipy.fft.rfft(windows * (HAMMING * FULL_SCALE), TRANSFORM, axis=1)
    power = spectrum.real**2 + spectrum.imag**2
    energies = np.log(power @ bank + ENERGY_FLOOR)
    return Frames(energies=energies, centres=starts + WINDOW // 2)
