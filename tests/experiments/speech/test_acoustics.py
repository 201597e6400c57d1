import dataclasses

import numpy as np
import pytest

from experiments.speech import acoustics
from experiments.speech.espeak import SAMPLE_RATE


def draw(seed: int) -> acoustics.Channel:
    rng = np.random.default_rng(seed)
    talker = rng.standard_normal(SAMPLE_RATE).astype(np.float32)
    return acoustics.draw_channel(rng, talker=talker)


@pytest.mark.parametrize("seed", range(5))
def test_direct_sound_comes_first_and_at_once(seed: int) -> None:
    response = draw(seed).response
    assert response[0] == 1.0
    assert np.all(response[1 : int(0.003 * SAMPLE_RATE)] == 0.0)
    level = 20.0 * np.log10(np.linalg.norm(response[1:]))
    assert -12.1 <= level <= -1.9


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_as_loud_as_asked(seed: int) -> None:
    channel = draw(seed)
    rng = np.random.default_rng(seed)
    speech = rng.standard_normal(SAMPLE_RATE).astype(np.float32)
    heard = acoustics.record(speech, channel=channel, rng=rng)
    quiet = acoustics.record(0 * speech, channel=channel, rng=rng)
    assert heard.shape == speech.shape
    assert heard.dtype == np.float32
    assert np.abs(quiet).max() < 1e-6  # noise is relative to speech
    correlation = np.corrcoef(heard, speech)[0, 1]
    assert 0.3 < correlation < 1.0


def test_a_room_is_a_convolution() -> None:
    rng = np.random.default_rng(0)
    speech, response = rng.standard_normal((2, 500)).astype(np.float32)
    channel = dataclasses.replace(draw(0), response=response, tilt=0.0, snr=300.0)
    heard = acoustics.record(speech, channel=channel, rng=rng)
    direct = np.convolve(speech, response)[:500]
    gain = heard[0] / direct[0]
    np.testing.assert_allclose(heard, gain * direct, rtol=1e-3, atol=1e-3)


def test_a_recording_depends_on_its_stream_alone() -> None:
    speech = np.random.default_rng(0).standard_normal(9_000).astype(np.float32)
    first, second = (
        acoustics.record(speech, channel=draw(3), rng=np.random.default_rng(4)) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
