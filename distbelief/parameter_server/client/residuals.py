"""What the pushes of a client have not sent yet, and the words of those that are encoded.

    residual   r        of each shard: the rest of all pushes so far
    staging    p        the next push, filled tensor by tensor
    encode     p := r + p;  r, p := p, r;  words, r := codec.encode(r)

decode(words) + rest == r + p, with ==: all that was put is either sent or in the residual, unless a
codec clips the rest or lets it decay: then `clipped` counts what is lost. A push
is encoded once, whatever becomes of its messages. One that is refused, because r + p is not finite,
leaves the residual as it was.

The last push of an orderly end is of bfloat16: at most 2^-9 of each number is left behind. Not of
`threshold`: its steps put no bound on what waits, which as one step may throw the model far off
(from 83.9 to 40.6 % of digits right, where tau was too small). It is left, and counted. Nor of
`top-k` with a decay: each round of local steps says again what waits, as a memory and not a debt
(preset `sparseloco`: at once, it took the held-out loss of a text from 2.55 to 4.46).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from distbelief.core.vectors import Vector
from distbelief.parameter_server.codecs import (
    Bfloat16,
    Codec,
    Cut,
    Encoded,
    History,
    Residual,
    Threshold,
    TopK,
    Words,
    accumulate,
    warm_up,
)
from distbelief.parameter_server.layout import PartialView
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.tensor_copies import N_PUSH_BUFFERS, PIECE, PUSH_WORD
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import NEWEST, Snapshot


@final
@dataclass(frozen=True, slots=True, eq=False)
class EncodedPush:
    form: pf.Form
    words: Mapping[int, Words]  # by shard


@final
@dataclass(slots=True, eq=False)
class _Shard:
    """The vectors of one shard, (n_elements,) each: parameters, then buffers."""

    residual: Residual
    staging: Residual
    n_parameters: int
    # Push s is written into words[s mod 2]; only what is sent takes memory.
    words: list[Words]


def _shard(codec: Codec, held: ShardSlice) -> _Shard:
    n, n_buffers = held.n_parameters, held.n_elements - held.n_parameters
    n_words = max(one.n_words_max(n) for one in (codec, Bfloat16())) + n_buffers
    return _Shard(
        residual=np.zeros(held.n_elements, np.float32),
        staging=np.zeros(held.n_elements, np.float32),
        n_parameters=n,
        words=[np.empty(n_words, PUSH_WORD) for _ in range(N_PUSH_BUFFERS)],
    )


def _sum_of_sizes(numbers: Residual) -> float:
    starts = range(0, len(numbers), PIECE)
    return sum(float(np.abs(numbers[i : i + PIECE]).sum(dtype=np.float64)) for i in starts)


@final
@dataclass(slots=True, kw_only=True)
class Figures:
    """Of one client; sums over its shards."""

    residual: float = 0.0  # sum of sizes of what is not sent yet
    lost: float = 0.0  # of what was held back, and dropped
    restored: float = 0.0  # of what a former incarnation had saved
    clipped: float = 0.0  # sum of sizes of what a codec has cut off or let decay, and is lost
    tau: float = 0.0  # the smallest size that the last push sent, or its step; 0: none
    n_words: int = 0  # of the last push
    n_words_max: int = 0
    n_numbers: int = 0  # that all pushes had to send
    n_sent: int = 0  # words of them

    def counters(self) -> dict[str, float]:
        return {
            "residual": self.residual,
            "residual_lost": self.lost,
            "residual_restored": self.restored,
            "clipped": self.clipped,
            "tau": self.tau,
            "words": float(self.n_words),
            "words_max": float(self.n_words_max),
            "numbers_pushed": float(self.n_numbers),
            "words_pushed": float(self.n_sent),
            "compression": self.n_numbers / max(self.n_sent, 1),
        }


@final
class Residuals:
    """Runs in the compute executor, but for `figures`."""

    def __init__(self, codec: Codec, view: PartialView) -> None:
        warm_up()
        self._codec, self._view = codec, view
        decays = isinstance(codec, TopK) and codec.decay < 1.0
        self._last = codec if decays or isinstance(codec, Bfloat16 | Threshold) else Bfloat16()
        self._pieces = view.placed_parameters()
        self._history = History()
        self._shards = {index: _shard(codec, held) for index, held in view.slices.items()}
        self._forgotten: set[int] = set()  # shards of which nothing is held back any more
        self._is_flushed = True  # nothing is held back that a last push would send
        self.restored: Snapshot | None = None  # of a former incarnation, until sessions are open
        self._samples: dict[int, int] = {}  # of the last push to each shard
        self.figures = Figures()

    def staging(self, index: int) -> Residual:
        """Return where the next push to a shard is put, (n_elements,)."""
        return self._shards[index].staging

    @property
    def is_owed(self) -> bool:
        """Whether something is held back that a last push would send."""
        is_all = self._forgotten == self._shards.keys()
        return bool(self.figures.residual) and not (self._is_flushed or is_all)

    def forget(self, shards: Iterable[int]) -> None:
        """Drop what is held back for these shards, before the next push; in the role's thread."""
        self._forgotten |= {*shards}

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            one = self._shards[self._forgotten.pop()]
            rest = one.residual[: one.n_parameters]
            self.figures.lost += _sum_of_sizes(rest)
            rest[:] = 0

    # --- what outlives this incarnation ---

    def snapshot(self, samples: int, *, incarnation: int) -> Snapshot:
        """Return what was held back before the push just encoded, and after it.

        `samples` is the client's total with that push. Before it is sent nobody knows which shards
        will have it; by their totals the next incarnation does. Valid until the next push is put.
        """
        arrays: dict[str, Vector] = {}
        facts = {"incarnation": str(incarnation), "layout": self._view.layout.fingerprint}
        for index, one in self._shards.items():
            before = self._samples.get(index, 0)
            facts[f"samples-{index}"] = f"{before} {samples}"
            arrays[f"before-{index}"] = one.staging[: one.n_parameters]
            arrays[f"after-{index}"] = one.residual[: one.n_parameters]
            self._samples[index] = samples
        return Snapshot(label=NEWEST, arrays=arrays, facts=facts)

    def opened(self, index: int, samples: int) -> None:
        """A shard has pushes up to so many samples: go on with what was held back then."""
        if index in self._samples:
            return
        self._samples[index] = samples
        saved = self.restored
        if saved is None or saved.facts.get("layout") != self._view.layout.fingerprint:
            return
        before, after = saved.facts.get(f"samples-{index}", "0 0").split()
        # Pushes of the same total cannot be told apart: the last one, of what is held back.
        if before != after and str(samples) in {before, after}:
            name = "before" if str(samples) == before else "after"
            rest = self._shards[index].residual[: self._shards[index].n_parameters]
            rest[:] = saved.arrays[f"{name}-{index}"]
            size = _sum_of_sizes(rest)
            self.figures.restored += size
            self.figures.residual += size
            self._is_flushed = False

    def encode(
        self, sequence: int, *, is_last: bool, touched: Sequence[object | None] | None
    ) -> EncodedPush | list[int]:
        """Return what was put, and what was held back, in words; both are the residual's now.

        Return the tensors of which the sum is not finite, if there are some: then nothing is sent
        and nothing is added. Tensors that are not `touched` are held back as they are.
        """
        self._drop_forgotten()
        sums = {index: one.staging[: one.n_parameters] for index, one in self._shards.items()}
        are_finite = [
            accumulate(one.residual[: one.n_parameters], sums[index])
            for index, one in self._shards.items()
        ]
        if not all(are_finite):
            return self._bad(sums)
        held = {}
        for tensor, index, places in self._pieces:
            for place in places if touched is not None and touched[tensor] is None else ():
                held[index, place.start, place.stop] = sums[index][place].copy()
                sums[index][place] = 0
        codec = self._last if is_last else self._codec
        parts = [sums[index][place] for _, index, places in self._pieces for place in places]
        cut = codec.choose(parts, self._history)
        encoded: list[Encoded] = []
        words: dict[int, Words] = {}
        for index, one in self._shards.items():
            out = one.words[sequence % N_PUSH_BUFFERS]
            encoded.append(codec.encode(sums[index], cut, out))
            buffers = one.staging[one.n_parameters :].view(PUSH_WORD)
            words[index] = out[: encoded[-1].n_words + len(buffers)]
            words[index][encoded[-1].n_words :] = buffers
            one.residual, one.staging = one.staging, one.residual
        if isinstance(codec, TopK) and codec.decay < 1.0:
            self._decay(sums.values(), codec.decay)
        for (index, start, stop), numbers in held.items():
            sums[index][start:stop] = numbers
        self._count(codec, cut, encoded, sums.values())
        return EncodedPush(form=codec.form, words=words)

    def _decay(self, rests: Collection[Residual], decay: float) -> None:
        # Error feedback with a decay of its own (SparseLoCo, Sarfi et al. 2025, algorithm 1).
        for rest in rests:
            self.figures.clipped += (1.0 - decay) * _sum_of_sizes(rest)
            np.multiply(rest, np.float32(decay), out=rest)

    def _bad(self, sums: Mapping[int, Residual]) -> list[int]:
        return sorted(
            {
                tensor
                for tensor, index, places in self._pieces
                if not all(np.isfinite(sums[index][place]).all() for place in places)
            }
        )

    def _count(
        self, codec: Codec, cut: Cut, encoded: Sequence[Encoded], rests: Collection[Residual]
    ) -> None:
        figures, n_elements = self.figures, sum(map(len, rests))
        if codec is self._codec:
            n_sent = sum(one.n_sent for one in encoded)
            self._history = self._codec.after(
                self._history, cut, n_sent=n_sent, n_elements=n_elements
            )
        self._is_flushed = codec is self._last
        figures.residual = sum(map(_sum_of_sizes, rests))
        figures.clipped += sum(one.clipped_size for one in encoded)
        figures.tau = cut.size
        figures.n_words = sum(one.n_words for one in encoded)
        figures.n_words_max = max(figures.n_words_max, figures.n_words)
        figures.n_sent += figures.n_words
        figures.n_numbers += n_elements
