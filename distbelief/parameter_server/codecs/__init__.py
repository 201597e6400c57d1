"""Codecs of pushes: words to send, and the rest that is kept. Nothing is lost between them.

    warm_up()                                    compiles kernels, where there is numba; seconds
    accumulate(residual, push) -> bool           the push becomes their sum; False: refuse it
    codec.choose(parts, history) -> cut          once per push, before it is cut into shards
    codec.encode(residual, cut, out) -> Encoded  each shard's words; the residual becomes the rest
    decoder(form, words, n_elements) -> add      at the shard, which adds it by pieces

decode(words) + rest == residual, with ==, in float32; where a rest is clipped, what is cut off is
counted, and is the third summand.
"""

from collections.abc import Mapping
from typing import Final, get_args

from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.exactness import (
    Adder,
    CodecTable,
    Cut,
    Encoded,
    Form,
    History,
    Residual,
    Words,
    accumulate,
)
from distbelief.parameter_server.codecs.factors import Auto, Factors, flops_of
from distbelief.parameter_server.codecs.kernels import warm_up
from distbelief.parameter_server.codecs.threshold import Threshold
from distbelief.parameter_server.codecs.top_k import TopK


__all__ = [
    "FORMS",
    "Adder",
    "Auto",
    "Bfloat16",
    "Codec",
    "Cut",
    "Encoded",
    "Factors",
    "Form",
    "History",
    "Int4",
    "Int8",
    "Residual",
    "Threshold",
    "TopK",
    "Words",
    "accumulate",
    "decoder",
    "flops_of",
    "n_words_max",
    "warm_up",
]

Codec = Bfloat16 | Int8 | Int4 | TopK | Threshold | Factors | Auto
"""A table of a job file: { codec = "top-k", share = 0.01 }."""

FORMS: Final[tuple[Form, ...]] = get_args(Form)
_READERS: Final[Mapping[Form, CodecTable]] = {
    codec.form: codec
    for codec in (Bfloat16(), Int8(), Int4(), TopK(), TopK(bits=2), Threshold(), Factors())
}


def decoder(form: Form, words: Words, n_elements: int) -> Adder:
    """Return what adds words of this form to a vector; RemoteProtocolError if they are invalid."""
    return _READERS[form].decoder(words, n_elements)


def n_words_max(n_elements: int) -> int:
    """Return a bound of the words of a shard with so many elements, of any form."""
    return max(codec.n_words_max(n_elements) for codec in _READERS.values())
