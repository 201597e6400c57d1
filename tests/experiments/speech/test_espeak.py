import sys

import numpy as np
import pytest

from experiments.speech import espeak
from experiments.speech.errors import MissingExtraError, SessionError


@pytest.fixture(scope="module")
def speaker() -> espeak.Espeak:
    return espeak.Espeak()


@pytest.mark.parametrize(
    ("mnemonic", "phone"),
    [("i:", "i"), ("'eI", "eI"), ("_:", "_"), ("_", "_"), ("t#", "t#"), ("(en)", None)],
)
def test_a_phone_has_neither_stress_nor_length(mnemonic: str, phone: str) -> None:
    assert espeak.name_phone(mnemonic) == phone


def test_onsets_ascend_inside_the_waveform(speaker: espeak.Espeak) -> None:
    speaker.set_voice("en-us+f3", rate=175, pitch=50, pitch_range=50)
    spoken = speaker.say("The cat sat on the mat.")
    assert np.all(np.diff(spoken.onsets) >= 0)
    assert 0 <= spoken.onsets[0] <= spoken.onsets[-1] <= len(spoken.waveform)
    assert len(spoken.onsets) == len(spoken.phones)
    assert {"k", "t", "m", espeak.SILENCE} <= set(spoken.phones)
    assert 0.05 < np.abs(spoken.waveform).max() <= 1.0


def test_every_accent_and_104_variants_exist(speaker: espeak.Espeak) -> None:
    for accent in espeak.ACCENTS:
        speaker.set_voice(f"{accent}+m1", rate=175, pitch=50, pitch_range=50)
    assert len(set(espeak.list_variants())) == 104
    with pytest.raises(SessionError, match="no voice 'xx-nowhere'"):
        speaker.set_voice("xx-nowhere", rate=175, pitch=50, pitch_range=50)


def test_a_missing_wheel_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'distbelief\[speech\]'"):
        espeak.Espeak()
