"""Pushes whose dense layers go as factors: the words stand for the very bits of the gradient.

    staging    p       the next push, filled tensor by tensor as a dense one
    encode     E^T A   rebuilt as a shard will; has it not the bits of p, numbers are sent

So no use of a weight can go wrong: tied to another, used twice or outside its module, with hooks,
clipped. Whatever has another gradient than its layer's factors goes as numbers, and after a few
times without a try. Nothing is held back.

Where a push is the sum of several gradients, their factors, one below the other, have that sum as
their product, but for rounding: then the product is what is pushed, if it is as near.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, final

import numpy as np
import torch

from distbelief.parameter_server.client.residuals import EncodedPush, Figures, Residuals
from distbelief.parameter_server.codecs import Auto, Factors, Residual, Words, exactness, factors
from distbelief.parameter_server.layout import PartialView
from distbelief.parameter_server.tensor_copies import N_PUSH_BUFFERS, PUSH_WORD


Pair = tuple[torch.Tensor, torch.Tensor]  # E (K, M) and A (K, N) of a weight (M, N)

N_TRIES: Final = 3  # in a row, until a tensor whose product is not its gradient goes as it is
N_NAMED: Final = 12  # in a message
_ROUNDING: Final = 1e-5  # of sums of float32 in another order, by their norm


class FactorSource(Protocol):
    """The model of a worker."""

    workers: int  # of the job
    # Whether a push is the sum of several gradients: their factors one below the other have it as
    # their product, but for rounding.
    is_sum: bool

    def take(self) -> Mapping[int, Pair]:
        """Return the factors of tensors, by index, since the last time."""
        ...


@final
class FactoredPushes:
    """Runs in the compute executor, but for `news`; in place of `Residuals`."""

    def __init__(self, codec: Factors | Auto, view: PartialView, source: FactorSource) -> None:
        self._codec, self._view, self._source = codec, view, source
        sizes = {index: held.n_elements for index, held in view.slices.items()}
        self._staging = {index: np.zeros(n, np.float32) for index, n in sizes.items()}
        # Push s is written into words[s mod 2]; only what is sent takes memory.
        self._words = {
            index: [np.empty(1 + n, PUSH_WORD) for _ in range(N_PUSH_BUFFERS)]
            for index, n in sizes.items()
        }
        # By tensor: shard, place in its vector, and the first element there.
        self._places: dict[int, list[tuple[int, slice[int, int, None], int]]] = {}
        ends: dict[int, int] = {}
        for tensor, index, places in view.placed_parameters():
            for place in places:
                start = ends.get(tensor, 0)
                self._places.setdefault(tensor, []).append((index, place, start))
                ends[tensor] = start + place.stop - place.start
        self._takes: dict[int, bool] = {}  # by tensor; where chosen once, with its first push
        self._n_failed: dict[int, int] = {}  # in a row
        self._n_told = -1  # tensors that the last news had as factors
        self.news: str | None = None  # to be told once
        self.figures = Figures()

    def staging(self, index: int) -> Residual:
        """Return where the next push to a shard is put, (n_elements,)."""
        return self._staging[index]

    def forget(self, shards: object) -> None:
        """Nothing is held back."""

    def opened(self, index: int, samples: int) -> None:
        """Nothing is held back, so nothing of a former incarnation."""

    def encode(
        self,
        sequence: int,
        *,
        is_last: bool,  # noqa: ARG002 -- as every other one
        touched: Sequence[object | None] | None,  # noqa: ARG002 -- others are zeros
    ) -> EncodedPush | list[int]:
        """Return what was put, in words."""
        for vector in self._staging.values():
            exactness.check_residual(vector)
        layers: dict[int, list[factors.Layer]] = {index: [] for index in self._staging}
        sent: list[int] = []
        for tensor, (errors, inputs) in sorted(self._source.take().items()):
            if self._chooses(tensor, errors, inputs):
                found = self._layers_of(tensor, errors.numpy(), inputs.numpy())
                self._note(tensor, is_gradient=found is not None)
                for index, layer in found or ():
                    layers[index].append(layer)
                sent += [tensor] if found else []
        words: dict[int, Words] = {}
        for index, numbers in self._staging.items():
            n = self._view.slices[index].n_parameters
            parts = sorted(layers[index], key=lambda one: one.first)
            out = self._words[index][sequence % N_PUSH_BUFFERS]
            n_words = factors.write(numbers[:n], parts, out)
            words[index] = out[: n_words + len(numbers) - n]
            words[index][n_words:] = numbers[n:].view(PUSH_WORD)
            self.figures.n_numbers += n
        self._tell(sent)
        n_words = sum(map(len, words.values()))
        self.figures.n_words = n_words
        self.figures.n_words_max = max(self.figures.n_words_max, n_words)
        self.figures.n_sent += n_words
        return EncodedPush(form=self._codec.form, words=words)

    def _chooses(self, tensor: int, errors: torch.Tensor, inputs: torch.Tensor) -> bool:
        (k, m), (_, n) = errors.shape, inputs.shape
        if self._n_failed.get(tensor, 0) >= N_TRIES:
            return False
        if tensor not in self._takes or isinstance(self._codec, Factors):
            workers, shards = self._source.workers, self._view.layout.n_shards
            self._takes[tensor] = self._codec.takes(k, m, n, workers=workers, shards=shards)
        # Fewer bits, if a user has chosen these, may be kept here and not at the shards.
        is_exact = torch.get_float32_matmul_precision() == "highest"
        return self._takes[tensor] and is_exact

    def _layers_of(
        self, tensor: int, errors: factors.Matrix, inputs: factors.Matrix
    ) -> list[tuple[int, factors.Layer]] | None:
        """Return what each shard gets as factors; None if they are not those of the gradient."""
        (_, m), (k, width) = errors.shape, inputs.shape
        # What is compared is what is sent, whatever becomes of the memory of these.
        errors, own = factors.copy_of(errors).numpy(), factors.copy_of(inputs)
        all_blocks, found = factors.blocks(m), []
        rows: set[tuple[int, int]] = set()  # to be compared
        wanted: list[tuple[int, Residual]] = []
        for index, place, start in self._places[tensor]:
            n = place.stop - place.start
            here = [
                (top, bottom)
                for top, bottom in all_blocks
                if top * width < start + n and bottom * width > start
            ]
            first, last = here[0][0], here[-1][1]
            if not factors.pays(k, last - first, width, n):
                continue
            rows.update(here)
            wanted.append((start, self._staging[index][place]))
            offset = start - first * width
            layer = factors.Layer(place.start, n, offset, errors[:, first:last], own.numpy())
            found.append((index, layer))
        for top, bottom in sorted(rows):
            elements = factors.rebuilt(errors[:, top:bottom], own)
            is_gradient = _is_near if self._source.is_sum else _has_bits
            if not all(map(is_gradient, *_both(elements, top * width, wanted))):
                return None
        return found

    def _note(self, tensor: int, *, is_gradient: bool) -> None:
        self._n_failed[tensor] = 0 if is_gradient else self._n_failed.get(tensor, 0) + 1
        if self._n_failed[tensor] == N_TRIES:
            name = self._view.tensors[tensor].name
            self.news = (
                f"{name} goes as it is from now on: its gradient is not the product of its layer's "
                "factors (it is tied, or used elsewhere, or hooks change it)"
            )

    def _tell(self, sent: Sequence[int]) -> None:
        if not self._takes or self._n_told >= len(sent):
            return
        self._n_told = len(sent)
        specs = self._view.tensors
        names = [specs[tensor].name for tensor in sent]
        n_others = sum(spec.kind == "parameter" for spec in specs) - len(names)
        more = f", {len(names) - N_NAMED} more" if len(names) > N_NAMED else ""
        listed = f"factors for {', '.join(names[:N_NAMED])}{more}" if names else "no factors"
        self.news = f"{listed}; {n_others} others as they are"


def _both(
    elements: Residual,  # of a tensor, from `first` on
    first: int,
    wanted: Sequence[tuple[int, Residual]],  # parts of the gradient, and where they begin
) -> tuple[list[Residual], list[Residual]]:
    """Return what was rebuilt, and what was wanted of that."""
    stop, rebuilt, parts = first + len(elements), [], []
    for start, part in wanted:
        begin, end = max(start, first), min(start + len(part), stop)
        if begin < end:
            rebuilt.append(elements[begin - first : end - first])
            parts.append(part[begin - start : end - start])
    return rebuilt, parts


def _has_bits(one: Residual, other: Residual) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


def _is_near(one: Residual, other: Residual) -> bool:
    # Of float32 sums in another order; factors of anything else are far off.
    # What is exactly 0, such as by a mask, stays that.
    is_near = np.linalg.norm(one - other) <= _ROUNDING * np.linalg.norm(other)
    return bool(is_near and not one[other == 0].any())


PushEncoder = Residuals | FactoredPushes
"""What puts encoded pushes together."""
