"""What every codec has: its interface, and why nothing is lost: decode(words) + rest == residual.

Of each element r of a residual a codec sends a number d, 0 for most, and keeps r - d. If r - d is
a float32, it is computed without rounding, and so is d + (r - d), which is r. It is a float32 if

    kept        d = 0
    near        r and d have one sign, and |d| / 2 <= |r| <= 2 |d|             (Sterbenz 1974)
    short       r and d have one sign, |d| <= 2 |r|, |r| < 2^16 |d|, and d is a bfloat16

Short: d has 8 significant bits; with 2^e <= |d| < 2^(e + 1) it is a multiple of 2^(e - 7). The last
bit of r is at most 2^(e + 16 - 23), the same. So d and r - d are multiples of it, and |r - d| is at
most |r|. The last bits of subnormal numbers are 2^-133 and 2^-149, which changes nothing of this.

What is none of these is sent whole (d = r), or kept until it may be. Underflow must be gradual:
`check_residual` refuses arithmetic that flushes subnormal numbers to zero.

Which elements are sent, and as which numbers, depends on the cut, on the element and on the other
elements of its 64: shards begin and end at multiples of 64 of a tensor (`layout`), so their number
changes no bit. How a message is written depends on its size alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from distbelief.core.arguments import CheckedArguments
from distbelief.core.errors import JobError, LocalProtocolError, RemoteProtocolError
from distbelief.core.vectors import ALIGNMENT
from distbelief.parameter_server.codecs import kernels


Residual = NDArray[np.float32]  # (n_elements,) of the parameters that a client holds of a shard
Words = NDArray[np.uint32]
Indices = NDArray[np.intp]  # of elements, rising
Piece: TypeAlias = "slice[int, int, int]"
Form = Literal["bfloat16", "int8", "int4", "top-k", "top-k-2", "threshold", "factors"]
"""How words are to be read."""

PIECE: Final = 1 << 16  # elements at a time: all passes after the first find them in the cache
_SPARSE_PIECE: Final = 1 << 17  # elements at a time, where one pass finds the few that are sent
SIZE: Final = kernels.SIZE
INFINITY: Final = kernels.INFINITY
UPPER: Final = kernels.UPPER
SHORT_MAX: Final = 0x7F7F  # the bits of the largest bfloat16
SHORT_RANGE: Final = 2.0**16
LARGEST: Final = float(np.finfo(np.float32).max)
N_ELEMENTS_MAX: Final = 1 << 31  # an index and a sign share a word

_N_SAMPLED: Final = 1 << 17
_GOLDEN: Final = (5**0.5 - 1) / 2
_TINY: Final = np.array([2.0**-149], np.float32)


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole of one push decides, before it is cut into shards."""

    size: float = 0.0  # the smallest size that is sent, or the step tau
    levels: tuple[float, float] = (0.0, 0.0)  # bfloat16, where values have 2 bits
    # Of elements of exactly that size only those are sent that lie at these places of each 64,
    # from the first on, around the end.
    first_place: int = 0
    n_places: int = ALIGNMENT
    clip: float | None = None  # the largest size of the rest, a bfloat16


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What a client remembers of its pushes; it belongs to the residual."""

    n_pushes: int = 0
    tau: float | None = None  # of the next one, before it is made short


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    n_words: int
    n_sent: int  # elements of which something is sent
    clipped: float = 0.0  # the sum of what was cut off the rest, and is lost
    clipped_size: float = 0.0  # the sum of its sizes


# Adds elements [start, stop) of a push to a vector, (stop - start,); start is a multiple of 64.
Adder = Callable[[int, int, Residual], None]


class CodecTable(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="codec",
    metaclass=CheckedArguments,
):
    """Base of the codecs, which are the tables of a job file that choose them. They hold no state.

    Words are self-contained: a shard needs their form and the words. Retries, takeover and backup
    copies move words; nobody encodes twice.
    """

    @property
    def form(self) -> Form:
        return cast("Form", self.__struct_config__.tag)

    def choose(
        self,
        parts: Sequence[Residual],  # of the whole residual, in an order that no shards decide
        history: History,
    ) -> Cut:
        raise NotImplementedError

    def n_words_max(self, n_elements: int) -> int:
        """Return a bound of the words of a shard with so many elements, whatever their values."""
        raise NotImplementedError

    @property
    def words_per_element(self) -> float:
        """About what a long push takes."""
        return self.n_words_max(1 << 20) / (1 << 20)

    def encode(self, residual: Residual, cut: Cut, out: Words) -> Encoded:
        """Write words to `out`, with room for `n_words_max`; the residual becomes the rest.

        The residual is finite: LocalProtocolError if a number is found that is not.
        """
        raise NotImplementedError

    def decoder(self, words: Words, n_elements: int) -> Adder:
        """Return what adds these words to a vector; RemoteProtocolError if they are invalid.

        Whatever the words are, this takes time and memory in proportion to words and elements.
        """
        raise NotImplementedError

    def after(self, history: History, cut: Cut, *, n_sent: int, n_elements: int) -> History:  # noqa: ARG002
        """Return the history after a push; the counts are those of all shards."""
        return History(n_pushes=history.n_pushes + 1)


# --- sums ---


def accumulate(residual: Residual, push: Residual) -> bool:
    """Set the push to residual + push, and return whether all of that is finite.

    If it is not, the push is refused: the residual is as before.
    """
    return (kernels.compiled(kernels.accumulate) or _accumulate)(residual, push)


@np.errstate(over="ignore", invalid="ignore")
def _accumulate(residual: Residual, push: Residual) -> bool:
    assert len(residual) == len(push)
    is_finite = True
    for piece in pieces(len(push)):
        total = np.add(residual[piece], push[piece], out=push[piece])
        is_finite = bool(np.isfinite(total).all()) and is_finite
    return is_finite


# --- numbers ---


def shorten(number: float) -> float:
    """Return the nearest positive bfloat16 that is no infinity and not subnormal."""
    bits = int(np.float32(min(max(number, 2.0**-126), 3e38)).view(np.uint32))
    return from_short(min((bits + 0x8000) >> 16, SHORT_MAX))


def number_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def from_short(bits: int) -> float:
    return number_of(bits << 16)


def to_short(number: float) -> int:
    """Return the bits of a number that is a bfloat16."""
    return int(np.float32(number).view(np.uint32)) >> 16


def short_of(word: int) -> float | None:
    """Return the number if these are the bits of a bfloat16 above 0 that is finite, or None."""
    return from_short(word) if 0 < word <= SHORT_MAX else None


def short_end(number: float) -> np.float32:
    """Return the size from which on a finite element is not short beside this number."""
    end = number * SHORT_RANGE
    return np.float32(end if end < LARGEST else np.inf)


def sampled_sizes(parts: Sequence[Residual], history: History) -> Words:
    """Return the bits of sizes of elements all over the parts, the same however they are cut.

    One of each stretch of equal length, at a place that changes from stretch to stretch and from
    push to push, so that no period of the tensors hides from it.
    """
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    n_elements = int(ends[-1]) if len(ends) else 0
    n_sampled = min(n_elements, _N_SAMPLED)
    steps = np.arange(n_sampled, dtype=np.float64)
    if n_elements > n_sampled:
        steps += (steps + 1 + history.n_pushes * 0.5**0.5) * _GOLDEN % 1.0
    places = (steps * (n_elements / max(n_sampled, 1))).astype(np.int64)
    np.minimum(places, n_elements - 1, out=places)
    bounds = np.searchsorted(places, [0, *ends.tolist()])
    sample = np.empty(n_sampled, np.float32)
    for index, part in enumerate(parts):
        here = slice(bounds[index], bounds[index + 1])
        sample[here] = part[places[here] - (int(ends[index]) - len(part))]
    sizes: Words = sample.view(np.uint32) & SIZE
    check_finite(not n_sampled or bool(sizes.max() < INFINITY))
    return sizes


def pieces(n_elements: int, size: int = PIECE) -> Iterator[Piece]:
    for start in range(0, n_elements, size):
        yield slice(start, min(start + size, n_elements))


def between(indices: Words, start: int, stop: int) -> Piece:
    """Return which of these rising numbers are in [start, stop)."""
    # Of the same type: numpy would convert all of them first.
    first, last = np.searchsorted(indices, np.array([start, stop], np.uint32))
    return slice(first, last)


# --- checks ---


def check_residual(residual: Residual) -> None:
    """Raise JobError where any codec would lose something."""
    if len(residual) >= N_ELEMENTS_MAX:
        raise JobError(
            f"a shard has {len(residual)} elements, and codecs 2^31 - 1: use more shards"
        )
    if not float((_TINY + _TINY)[0]):
        raise JobError(
            "this thread flushes subnormal numbers to zero, so that codecs would lose them: "
            "leave out torch.set_flush_denormal(True)"
        )


def check_finite(is_finite: object) -> None:
    if not is_finite:
        raise LocalProtocolError("a residual is not finite: check what is added to it")


def require_valid(is_valid: object, what: str) -> None:
    """Raise RemoteProtocolError unless a peer's words are valid."""
    if not is_valid:
        raise RemoteProtocolError(f"words of a push: {what}: use one codec and layout")


def require_indices(indices: Words, n_elements: int) -> None:
    is_valid = (indices[1:] > indices[:-1]).all() and (indices[-1:] < n_elements).all()
    require_valid(is_valid, f"indices do not rise, or some is beyond {n_elements} elements")


def require_finite(values: Words) -> None:
    for piece in pieces(len(values)):
        require_valid((values[piece] & SIZE).max() < INFINITY, "a number is not finite")


# --- some elements ---


def selected(
    residual: Residual, cut: Cut, end: np.float32, whole: list[Indices]
) -> Iterator[tuple[Piece, Indices, Residual]]:
    """Yield pieces, and of each the indices and numbers that the cut sends.

    Not those of size `end` or more: of these the ones that are to be sent whole go to `whole`.
    Indices are valid until the next are asked for.
    """
    least = np.float32(cut.size).view(np.uint32)
    select = kernels.compiled(kernels.select) or _select
    room = np.empty(min(_SPARSE_PIECE, len(residual)), np.intp)
    for piece in pieces(len(residual), _SPARSE_PIECE):
        bits = residual[piece].view(np.uint32)
        n = select(bits, least, cut.first_place, cut.n_places, room)
        if not n:
            continue
        indices = room[:n]
        numbers = residual[piece][indices]
        sizes = np.abs(numbers)
        if not sizes.max() < end:  # as for NaN
            check_finite((sizes < np.inf).all())
            is_short = sizes < end
            whole.append(first_of_blocks(indices[~is_short]) + piece.start)
            indices, numbers = indices[is_short], numbers[is_short]
        yield piece, indices, numbers


def _select(bits: Words, least: np.uint32, first_place: int, n_places: int, room: Indices) -> int:
    sizes = bits & SIZE
    indices = np.flatnonzero(sizes >= least)
    if n_places < ALIGNMENT:
        is_place = (indices - first_place) % ALIGNMENT < n_places
        indices = indices[is_place | (sizes[indices] > least)]
    room[: len(indices)] = indices
    return len(indices)


def adds_some(indices: Words, values: Residual) -> Adder:
    def add(start: int, stop: int, out: Residual) -> None:
        here = between(indices, start, stop)
        add_some = kernels.compiled(kernels.add_some) or _add_some
        add_some(out, indices[here], values[here], start)

    return add


@np.errstate(over="ignore")
def _add_some(out: Residual, indices: Words, values: Residual, start: int) -> None:
    out[indices - np.uint32(start)] += values


# --- elements that are sent whole ---


def first_of_blocks(indices: Indices) -> Indices:
    """Return the first of these in each 64 elements: so few may be sent whole in one push."""
    blocks = indices // ALIGNMENT
    is_first = np.ones(len(indices), np.bool_)
    is_first[1:] = blocks[1:] != blocks[:-1]
    return indices[is_first]


def n_whole_words_max(n_elements: int) -> int:
    return 2 * -(-n_elements // ALIGNMENT)


def put_whole(residual: Residual, whole: Sequence[Indices], out: Words) -> int:
    """Write elements as `pairs` reads them, and keep nothing of them; return how many there are."""
    indices = np.concatenate([np.zeros(0, np.intp), *whole])
    n = len(indices)
    out[:n], out[n : 2 * n] = indices, residual[indices].view(np.uint32)
    residual[indices] = 0
    return n


def pairs(words: Words, n_elements: int) -> Adder:
    """Read elements with a number each, by rising index: all indices, then all numbers."""
    n_pairs, odd = divmod(len(words), 2)
    require_valid(not odd, "an index has no number")
    require_indices(words[:n_pairs], n_elements)
    require_finite(words[n_pairs:])
    return adds_some(words[:n_pairs], words[n_pairs:].view(np.float32))


def adds_all(values: Residual) -> Adder:
    @np.errstate(over="ignore")
    def add(start: int, stop: int, out: Residual) -> None:
        out += values[start:stop]

    return add


def adds_both(one: Adder, other: Adder) -> Adder:
    def add(start: int, stop: int, out: Residual) -> None:
        one(start, stop, out)
        other(start, stop, out)

    return add
