"""What lies between a mouth and a recording: room, microphone, noise, other talkers.

Formant synthesis is far more regular than people are; these make the task hard enough
to be worth a large network. The direct sound arrives at delay 0, so that labels taken
from the dry speech stay aligned with the recording.
"""

from dataclasses import dataclass

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from experiments.speech.espeak import SAMPLE_RATE


Floats = NDArray[np.float32]
NOISE_SAMPLES = 1 << 18  # 11.9 s, played in a loop
LONGEST_REVERBERATION = 0.5  # seconds of tail that are kept
FIRST_REFLECTION = 0.004  # seconds
TALKER_PROBABILITY = 0.3
SNR_JITTER = 3.0  # dB from sentence to sentence
GAIN = 10.0  # dB, up or down


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Place and equipment of one recording session."""

    response: Floats  # (taps,), impulse response of the room, 1 at delay 0
    tilt: float  # the microphone adds -tilt of the sample before
    noise: Floats  # (NOISE_SAMPLES,), standard deviation 1
    talker: Floats  # (samples,), somebody else, standard deviation 1
    snr: float  # speech over noise, dB


def draw_channel(rng: np.random.Generator, *, talker: Floats) -> Channel:
    """Draw a room, a microphone, and a noise with a spectrum of 1/f^0 to 1/f^2.

    Args:
        rng: the session's random stream.
        talker: (samples,), dry speech of an interfering talker.
    """
    return Channel(
        response=_draw_room(rng),
        tilt=rng.uniform(-0.6, 0.6),
        noise=_draw_noise(rng, exponent=rng.uniform(0.0, 2.0)),
        talker=talker / _deviation(talker),
        snr=rng.uniform(0.0, 20.0),
    )


def record(speech: Floats, *, channel: Channel, rng: np.random.Generator) -> Floats:
    """The sentence `speech` as the channel's microphone hears it, same length."""
    n_samples = len(speech)
    heard = _reverberate(speech, channel.response)
    heard[1:] -= channel.tilt * heard[:-1]
    noise = _loop(channel.noise, n_samples, rng=rng)
    if rng.random() < TALKER_PROBABILITY:
        noise = 0.5 * noise + _loop(channel.talker, n_samples, rng=rng)
    snr = channel.snr + rng.uniform(-SNR_JITTER, SNR_JITTER)
    noise *= _deviation(heard) / _deviation(noise) * _decibels(-snr)
    gain = _decibels(rng.uniform(-GAIN, GAIN))
    return ((heard + noise) * gain).astype(np.float32)


def _draw_room(rng: np.random.Generator) -> Floats:
    """Decaying noise after the direct sound: RT60 0.1 to 0.7 s, 2 to 12 dB down."""
    reverberation = rng.uniform(0.1, 0.7)  # RT60, seconds
    n_taps = int(SAMPLE_RATE * min(reverberation, LONGEST_REVERBERATION))
    seconds = np.arange(n_taps) / SAMPLE_RATE
    tail = rng.standard_normal(n_taps) * 10.0 ** (-3.0 * seconds / reverberation)
    tail[: int(FIRST_REFLECTION * SAMPLE_RATE)] = 0.0
    tail *= _decibels(-rng.uniform(2.0, 12.0)) / np.linalg.norm(tail)
    tail[0] = 1.0
    return tail.astype(np.float32)


def _reverberate(speech: Floats, response: Floats) -> Floats:
    """The convolution of both, cut to the length of `speech`."""
    length = scipy.fft.next_fast_len(len(speech) + len(response) - 1, real=True)
    product = scipy.fft.rfft(speech, length) * scipy.fft.rfft(response, length)
    heard = scipy.fft.irfft(product, length)[: len(speech)]
    return np.ascontiguousarray(heard, np.float32)


def _draw_noise(rng: np.random.Generator, *, exponent: float) -> Floats:
    """A loop of noise whose power falls as frequency to the `exponent`."""
    frequencies = np.arange(1, NOISE_SAMPLES // 2 + 2, dtype=np.float32)
    shape = (len(frequencies), 2)
    pairs = rng.standard_normal(shape, dtype=np.float32)
    spectrum = pairs.view(np.complex64)[:, 0] * frequencies ** np.float32(-exponent / 2)
    noise = scipy.fft.irfft(spectrum, NOISE_SAMPLES)
    return np.asarray(noise / _deviation(noise), np.float32)


def _loop(sound: Floats, n_samples: int, *, rng: np.random.Generator) -> Floats:
    """`n_samples` of a sound played in a loop, from a random place; a copy."""
    start = int(rng.integers(len(sound)))
    n_turns = -(-(start + n_samples) // len(sound))
    return np.tile(sound, n_turns)[start : start + n_samples]


def _deviation(sound: Floats) -> float:
    return float(sound.std()) + 1e-9


def _decibels(level: float) -> float:
    return float(10.0 ** (level / 20.0))
