"""Codecs of pushes: words to send, and the rest that is kept, with books that balance to the bit.

    codec.choose(parts, history) -> cut          once per push, before it is cut into shards
    codec.encode(residual, cut, out) -> Encoded  each shard's words; the residual becomes the rest
    codec.decoder(words, n_elements) -> add      at the shard, which adds it by pieces

decode(words) + rest + what was clipped == residual before, with ==, in float32.
"""

from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.threshold import Threshold
from distbelief.parameter_server.codecs.top_k import TopK


Codec = Bfloat16 | Int8 | Int4 | TopK | Threshold
"""A table of a job file: { codec = "top-k", share = 0.01 }."""
