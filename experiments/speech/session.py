"""One recording session: one speaker reads twenty sentences in one place.

A session is a function of its number: voice, rate, pitch, room, noise and sentences all
come from a random stream seeded with (seed, part, session index).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.speech import acoustics, features
from experiments.speech.casting import PARTS, Casting
from experiments.speech.espeak import ACCENTS, SAMPLE_RATE, SILENCE, Espeak, Spoken


SENTENCES_PER_SESSION = 20
TALKER_SENTENCES = 3
LONGEST_WARP = 0.12  # of the vocal tract, natural logarithm
SHORTEST = 0.25  # seconds; less is a sentence that the synthesiser could not read
N_POSITIONS = 3  # begin, middle, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one session yields."""

    voice: str
    energies: NDArray[np.float16]  # (frames, 40)
    contexts: NDArray[np.int16]  # (frames, 4): left, phone, right, position
    phones: tuple[str, ...]  # names of the indices in the first three columns
    lengths: NDArray[np.int64]  # (utterances,), frames
    sentences: NDArray[np.int64]  # (utterances,), index into the casting's


def hold_session(espeak: Espeak, *, casting: Casting, index: int) -> Recording:
    rng = np.random.default_rng([casting.seed, PARTS.index(casting.part), index])
    espeak.seed_breath(int(rng.integers(1 << 31)))
    _choose_voice(espeak, rng=rng, casting=casting)
    talk = [_choose_line(rng, casting=casting)[1] for _ in range(TALKER_SENTENCES)]
    talker = np.concatenate([espeak.say(line).waveform for line in talk])
    voice = _choose_voice(espeak, rng=rng, casting=casting)
    channel = acoustics.draw_channel(rng, talker=talker)
    warp = 1.0 if casting.clean else np.exp(rng.uniform(-LONGEST_WARP, LONGEST_WARP))
    bank = features.build_mel_bank(warp)

    takes: list[tuple[int, Spoken, features.Frames]] = []
    for _ in range(SENTENCES_PER_SESSION):
        number, line = _choose_line(rng, casting=casting)
        spoken = espeak.say(line)
        if len(spoken.waveform) < SHORTEST * SAMPLE_RATE or not spoken.phones:
            continue
        heard = spoken.waveform
        if not casting.clean:
            heard = acoustics.record(heard, channel=channel, rng=rng)
        takes.append((number, spoken, features.extract(heard, bank=bank)))
    return _bind(voice, takes)


def label_frames(
    centres: NDArray[np.int64], *, onsets: NDArray[np.int64], n_samples: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The segment in which each frame has its centre, and which third of it.

    Args:
        centres: (frames,), sample index.
        onsets: (segments,), sample index where each segment begins, ascending.
        n_samples: where the last segment ends.

    Returns:
        segment and position of each frame, (frames,) both.
    """
    ends = np.append(onsets[1:], n_samples)
    segments = np.searchsorted(onsets, centres, side="right") - 1
    segments = np.maximum(segments, 0)  # before the first onset lies silence's start
    elapsed = centres - onsets[segments]
    durations = np.maximum(1, ends[segments] - onsets[segments])
    return segments, np.clip(elapsed * N_POSITIONS // durations, 0, N_POSITIONS - 1)


def _bind(voice: str, takes: Sequence[tuple[int, Spoken, features.Frames]]) -> Recording:
    """Join the sentences of a session, its phones numbered in order of name."""
    spoken_phones = {phone for _, spoken, _ in takes for phone in spoken.phones}
    names = sorted(spoken_phones | {SILENCE})
    numbers = {name: number for number, name in enumerate(names)}
    contexts = [np.empty((0, 4), np.int16)]
    for _, spoken, frames in takes:
        padded = [SILENCE, *spoken.phones, SILENCE]
        phones = np.array([numbers[phone] for phone in padded], np.int16)
        segments, positions = label_frames(
            frames.centres, onsets=spoken.onsets, n_samples=len(spoken.waveform)
        )
        neighbours = [phones[segments + shift] for shift in range(3)]
        contexts.append(np.stack([*neighbours, positions.astype(np.int16)], axis=1))
    energies = [np.empty((0, features.N_MELS), np.float32)]
    energies.extend(frames.energies for _, _, frames in takes)
    return Recording(
        voice=voice,
        energies=np.concatenate(energies).astype(np.float16),
        contexts=np.concatenate(contexts),
        phones=tuple(names),
        lengths=np.array([len(take[2].centres) for take in takes], np.int64),
        sentences=np.array([take[0] for take in takes], np.int64),
    )


def _choose_voice(espeak: Espeak, *, rng: np.random.Generator, casting: Casting) -> str:
    """Draw a speaker and a way of speaking, and set them; returns the voice's name."""
    accent = ACCENTS[int(rng.integers(len(ACCENTS)))]
    variant = casting.variants[int(rng.integers(len(casting.variants)))]
    name = f"{accent}+{variant}"
    rate, pitch, pitch_range = rng.integers([130, 15, 20], [240, 86, 91])
    espeak.set_voice(name, rate=int(rate), pitch=int(pitch), pitch_range=int(pitch_range))
    return name


def _choose_line(rng: np.random.Generator, *, casting: Casting) -> tuple[int, str]:
    number = int(rng.integers(len(casting.sentences)))
    return number, casting.sentences[number]
