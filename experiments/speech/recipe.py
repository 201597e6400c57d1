"""What a corpus is made from, and therefore where it lies in the cache.

Two corpora are the same when part, hours, seed, interpreter and the code that makes
them are; the name of the folder says the first three and a digest says the rest. Of two
corpora that differ in hours alone, the shorter is the beginning of the longer.
"""

import ast
import functools
import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

from experiments.speech.casting import PARTS
from experiments.speech.errors import SpeechError
from experiments.speech.features import FRAMES_PER_HOUR, N_MELS


# The modules that decide what a frame holds.
MAKERS = ("text", "casting", "espeak", "acoustics", "features", "session")
DIGEST_LETTERS = 10
HOURS_MAX = 10_000.0
BYTES_PER_FRAME = 2 * N_MELS + 2 * 4  # features and context


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    part: str  # "train" or "test": voices and sentences of one are not in the other
    hours: float  # of audio, at least; a recording session is never cut
    seed: int = 0
    clean: bool = False  # no room, no noise, no warp: for checks of alignment

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise SpeechError(f"part = {self.part!r} must be 'train' or 'test'")
        if not 0.0 < self.hours <= HOURS_MAX:
            raise SpeechError(f"hours = {self.hours!r} must be above 0 and at most {HOURS_MAX:g}")
        if self.seed < 0:
            raise SpeechError(f"seed = {self.seed!r} must not be negative")

    @property
    def n_bytes(self) -> int:
        return round(1.1 * self.n_frames * BYTES_PER_FRAME)

    @property
    def n_frames(self) -> int:
        return max(1, round(self.hours * FRAMES_PER_HOUR))

    @property
    def name(self) -> str:
        return self.pattern.replace("*", f"{self.hours:g}", 1)

    @property
    def pattern(self) -> str:
        quality = "-clean" if self.clean else ""
        return f"{self.part}-*h-seed{self.seed}{quality}-{_digest_makers()}"


@functools.cache
def _digest_makers() -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256(platform.python_version().encode())
    for maker in MAKERS:
        # The syntax tree: layout and comments do not make another corpus.
        tree = ast.parse((folder / f"{maker}.py").read_bytes())
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:DIGEST_LETTERS]
