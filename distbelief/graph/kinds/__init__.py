"""The kinds of layers that can be split; importing this registers them all."""

from distbelief.graph.kind import LayerKind, register
from distbelief.graph.kinds.convolution import Convolution
from distbelief.graph.kinds.linear import Linear
from distbelief.graph.kinds.pointwise import Pointwise


KINDS: tuple[LayerKind, ...] = (Linear(), Convolution(), Pointwise())

for _kind in KINDS:
    register(_kind)
