"""The synthesiser: text in, waveform and the onset of every phone out.

A ctypes binding of the few functions of libespeak-ng (speak_lib.h, version 1.52) that
the `espeakng-loader` wheel carries. Three facts about that library shape this module:

* the time of an event in milliseconds is too coarse; its sample index is exact;
* the name of a phone fills eight bytes and ends in NUL only where it is shorter;
* what it says depends on everything it said before, so whoever wants the same audio
  twice speaks in a freshly forked process (`studio`);
* the breath of nine variants (Alicia, Demonic, f2, f3, f5, sandro, victor, whisper,
  whisperf) is noise that the library seeds from the clock, so it is seeded here.
"""

import ctypes
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.speech.errors import MissingExtraError, SessionError


SAMPLE_RATE = 22_050  # Hz
SILENCE = "_"
ACCENTS = (
    "en",
    "en-us",
    "en-gb-scotland",
    "en-029",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-us-nyc",
)
STRESS_AND_LENGTH = re.compile(r"[',%=|*!_]|:+$")

# Numbers from speak_lib.h.
SYNCHRONOUS = 2
PHONEME_EVENTS, DONT_EXIT = 0x0001, 0x8000
EVENT_LIST_END, EVENT_PHONEME = 0, 7
RATE, PITCH, PITCH_RANGE = 1, 3, 4
CHARACTERS_UTF8, POSITION_CHARACTER = 1, 1
NAME_BYTES = 8


class _Event(ctypes.Structure):
    """`espeak_EVENT`; its last member is a union, read here as eight bytes."""

    _fields_ = (  # type: ignore[mutable-override]
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_uint64),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One sentence as the synthesiser read it, before any room or noise."""

    waveform: NDArray[np.float32]  # (samples,), full scale is 1
    onsets: NDArray[np.int64]  # (segments,), sample index where each phone begins
    phones: tuple[str, ...]  # (segments,)


def load_wheel() -> ModuleType:
    try:
        return importlib.import_module("espeakng_loader")
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "speech is synthesised with the espeakng-loader wheel, which is not "
            "installed: pip install 'distbelief[speech]'"
        ) from missing


def list_variants() -> list[str]:
    """Names of the voice variants; each is another speaker for every accent."""
    folder = Path(load_wheel().get_data_path()) / "voices" / "!v"
    return sorted(path.name for path in folder.iterdir())


def name_phone(mnemonic: str) -> str | None:
    """The phone without stress and length; None for a mark of a language switch.

    >>> name_phone("i:"), name_phone("_:"), name_phone("(en)")
    ('i', '_', None)
    """
    if mnemonic.startswith("("):
        return None
    return STRESS_AND_LENGTH.sub("", mnemonic) or SILENCE


class Espeak:
    """The library, started. There is one per process: its state is global."""

    def __init__(self) -> None:
        wheel = load_wheel()
        self._library = ctypes.CDLL(wheel.get_library_path())
        self._library.espeak_Synth.argtypes = [
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        folder = str(wheel.get_data_path()).encode()
        options = PHONEME_EVENTS | DONT_EXIT
        rate = self._library.espeak_Initialize(SYNCHRONOUS, 0, folder, options)
        if rate != SAMPLE_RATE:
            raise SessionError(f"libespeak-ng starts at {rate} Hz, not {SAMPLE_RATE}")
        self._blocks: list[bytes] = []
        self._events: list[tuple[int, str]] = []
        self._callback = _Callback(self._collect)  # kept: C holds no reference
        self._library.espeak_SetSynthCallback(self._callback)

    def seed_breath(self, seed: int) -> None:
        """Fix the noise in breathy voices; `seed` is below 2^31."""
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(seed))

    def set_voice(self, name: str, *, rate: int, pitch: int, pitch_range: int) -> None:
        """Speak as `name`, for instance "en-us+f3".

        Args:
            name: an accent, a plus, a variant.
            rate: words per minute, 80 to 450.
            pitch: 0 to 100, 50 is usual.
            pitch_range: 0 (monotone) to 100, 50 is usual.
        """
        if self._library.espeak_SetVoiceByName(name.encode()) != 0:
            raise SessionError(f"libespeak-ng has no voice {name!r}")
        settings = ((RATE, rate), (PITCH, pitch), (PITCH_RANGE, pitch_range))
        for parameter, value in settings:
            self._library.espeak_SetParameter(parameter, value, 0)

    def say(self, sentence: str) -> Spoken:
        self._blocks.clear()
        self._events.clear()
        text = sentence.encode() + b"\0"
        status = self._library.espeak_Synth(
            text, len(text), 0, POSITION_CHARACTER, 0, CHARACTERS_UTF8, None, None
        )
        if status != 0:
            raise SessionError(f"libespeak-ng returned {status} for {sentence!r}")
        samples = np.frombuffer(b"".join(self._blocks), np.int16)
        named = [(onset, name_phone(mark)) for onset, mark in self._events]
        segments = [(onset, phone) for onset, phone in named if phone is not None]
        return Spoken(
            waveform=samples.astype(np.float32) / np.float32(32_768),
            onsets=np.array([onset for onset, _ in segments], np.int64),
            phones=tuple(phone for _, phone in segments),
        )

    def _collect(self, samples: Any, n_samples: int, events: Any) -> int:  # noqa: ANN401
        """Called by the library with a block of audio and the events in it."""
        if n_samples > 0:
            self._blocks.append(ctypes.string_at(samples, 2 * n_samples))
        index = 0
        while events[index].type != EVENT_LIST_END:
            event = events[index]
            if event.type == EVENT_PHONEME:
                address = ctypes.addressof(event) + _Event.id.offset
                name = ctypes.string_at(address, NAME_BYTES).split(b"\0")[0]
                self._events.append((event.sample, name.decode("utf-8", "replace")))
            index += 1
        return 0
