"""Residuals of every kind of number, and one push of them, as a client and a shard do it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distbelief.parameter_server.codecs import Codec
from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.exactness import Cut, Encoded, History, Residual, Words
from distbelief.parameter_server.codecs.factors import Factors
from distbelief.parameter_server.codecs.threshold import Adaptive, Threshold
from distbelief.parameter_server.codecs.top_k import TopK


CODECS: Final[Sequence[Codec]] = (
    Bfloat16(),
    Int8(),
    Int4(),
    TopK(share=0.05),
    TopK(share=0.3),
    TopK(share=0.05, bits=2),
    Threshold(tau=2.0),
    Factors(),
    Threshold(tau=3e-4, adaptive=Adaptive(), clip=5.0, clip_every=1),
)
LARGEST: Final = np.finfo(np.float32).max


def name_of(codec: Codec) -> str:
    kind = str(codec.__struct_config__.tag)
    if isinstance(codec, TopK):
        return f"{kind}-{codec.share}-{codec.bits}"
    return f"{kind}-clipped" if isinstance(codec, Threshold) and codec.clip else kind


def residual(seed: int, n_elements: int) -> Residual:
    """Return finite numbers of one of the kinds below; all are drawn from the seed."""
    generator = np.random.default_rng(seed)
    kind = generator.integers(9)
    bits = generator.integers(0, 1 << 32, n_elements, np.uint32)
    if kind == 0:  # any exponents at all
        numbers = bits.view(np.float32)
    elif kind == 1:  # around one size, with bits of all places
        exponent = np.uint32(generator.integers(0, 255))
        numbers = (bits & np.uint32(0x80FFFFFF) | exponent >> np.uint32(1) << np.uint32(24)).view(
            np.float32
        )
    elif kind == 2:  # subnormal, and a little above
        numbers = (bits & np.uint32(0x81FFFFFF)).view(np.float32)
    elif kind == 8:  # subnormal only
        numbers = (bits & np.uint32(0x807FFFFF)).view(np.float32)
    elif kind == 3:  # close to the largest
        numbers = (bits | np.uint32(0x7F000000)).view(np.float32)
    elif kind == 4:  # a few sizes, so that many are equal; zeros of both signs
        sizes = np.array([0.0, 1.0, 2.0, 3e-4], np.float32)
        numbers = np.copysign(sizes[bits % 4], (bits >> 8 & 1) - np.float32(0.5))
    else:  # as gradients are, with a scale, and some huge or tiny ones
        scale = np.float32(2.0) ** np.float32(generator.integers(-30, 30))
        numbers = generator.standard_normal(n_elements).astype(np.float32) * scale
        if kind > 5:
            jumps = np.float32(2.0) ** generator.integers(-40, 41, n_elements).astype(np.float32)
            numbers = np.where(generator.random(n_elements) < 0.1, numbers * jumps, numbers)
    numbers = numbers.astype(np.float32)
    return np.where(np.isfinite(numbers), numbers, np.float32(LARGEST)).astype(np.float32)


def tuned(codec: Codec, numbers: Residual, seed: int) -> Codec:
    """Return the codec with a step that some of these numbers have, if it has steps."""
    if not isinstance(codec, Threshold) or not numbers.any():
        return codec
    sizes = np.abs(numbers[numbers != 0]).astype(np.float64)
    tau = float(sizes[seed % len(sizes)]) * (0.3 + seed % 7)
    return Threshold(
        tau=min(max(tau, 2.0**-100), 2.0**100),
        adaptive=codec.adaptive,
        clip=codec.clip,
        clip_every=codec.clip_every,
    )


def decoded(codec: Codec, words: Words, n_elements: int) -> Residual:
    """Return what words stand for, by pieces."""
    out = np.zeros(n_elements, np.float32)
    step = 64 if n_elements < 1000 else 1000 * 64
    add = codec.decoder(words, n_elements)
    for start in range(0, n_elements, step):
        add(start, min(start + step, n_elements), out[start : start + step])
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Pushed:
    before: Residual
    rest: Residual
    sent: Residual
    encoded: Encoded
    words: Words
    cut: Cut

    @property
    def beyond(self) -> NDArray[np.float32]:
        """What is neither sent nor kept."""
        return (self.before - self.sent) - self.rest


def push(codec: Codec, before: Residual, history: History | None = None) -> Pushed:
    rest = before.copy()
    cut = codec.choose([rest], history or History())
    room = np.full(codec.n_words_max(len(rest)) + 2, 0xA5A5A5A5, np.uint32)
    encoded = codec.encode(rest, cut, room[:-2])
    assert (room[-2:] == 0xA5A5A5A5).all()
    words = room[: encoded.n_words].copy()
    return Pushed(before, rest, decoded(codec, words, len(rest)), encoded, words, cut)


def assert_nothing_is_lost(pushed: Pushed) -> None:
    """Demand decode(words) + rest + clipped == before, and that no sum of them was rounded."""
    before, rest, sent = pushed.before, pushed.rest, pushed.sent
    assert np.isfinite(rest).all()
    clip = pushed.cut.clip
    is_clipped = np.zeros(len(rest), np.bool_) if clip is None else pushed.beyond != 0
    wide = np.longdouble
    total = sent.astype(wide) + rest.astype(wide)
    assert np.array_equal((sent + rest)[~is_clipped], before[~is_clipped])
    assert np.array_equal(total[~is_clipped], before.astype(wide)[~is_clipped])
    beyond = pushed.beyond.astype(wide)
    assert np.array_equal((total + beyond)[is_clipped], before.astype(wide)[is_clipped])
    if clip is not None:
        assert (np.abs(rest[is_clipped]) == np.float32(clip)).all()
    assert float(beyond.astype(np.float64).sum()) == pushed.encoded.clipped
    assert float(np.abs(beyond.astype(np.float64)).sum()) == pushed.encoded.clipped_size
