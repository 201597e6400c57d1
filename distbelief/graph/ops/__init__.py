"""Operators that can be split; importing this package registers them all."""

from distbelief.graph.operator import Operator, register
from distbelief.graph.ops.attention import Attention
from distbelief.graph.ops.call import TorchCall
from distbelief.graph.ops.dropout import Dropout
from distbelief.graph.ops.experts import Experts, Routing
from distbelief.graph.ops.linear import Embedding, Linear, Product
from distbelief.graph.ops.local_norms import LocalContrast, LocalResponse
from distbelief.graph.ops.locally_connected import LocallyConnected
from distbelief.graph.ops.losses import ClassSums, CrossEntropy, ElementwiseLoss
from distbelief.graph.ops.norms import Normalize, RunningAverage
from distbelief.graph.ops.opaque import Opaque
from distbelief.graph.ops.reductions import Maximum, Reduction, Softmax
from distbelief.graph.ops.views import Cat, Expand, Pad, Parameter, Permute, Reshape, Slice
from distbelief.graph.ops.windows import (
    AdaptiveAveragePool,
    AdaptiveMaxPool,
    AveragePool,
    Convolution,
    L2Pool,
    MaxPool,
)


OPERATORS: tuple[Operator, ...] = (
    # Layers with weights.
    Linear(),
    Convolution(),
    LocallyConnected(),
    Embedding(),
    Parameter(),
    # Windows over space.
    MaxPool(),
    AveragePool(),
    L2Pool(),
    AdaptiveAveragePool(),
    AdaptiveMaxPool(),
    LocalContrast(),
    LocalResponse(),
    # Statistics and their use.
    Reduction(),
    Maximum(),
    Normalize(),
    RunningAverage(),
    Softmax(),
    Attention(),
    Product(),
    Routing(),
    Experts(),
    # Elementwise, or elements at other places.
    Dropout(),
    Cat(),
    Reshape(),
    Permute(),
    Slice(),
    Expand(),
    Pad(),
    # Losses, and modules that cannot be split.
    ElementwiseLoss(),
    ClassSums(),
    CrossEntropy(),
    Opaque(),
    TorchCall(),
)

for _kind in OPERATORS:
    register(_kind)
