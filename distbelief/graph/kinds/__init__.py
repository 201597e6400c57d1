"""The kinds of layers that can be split; importing this registers them all."""

from distbelief.graph.kind import LayerKind, register
from distbelief.graph.kinds.adaptive_pooling import AdaptiveAveragePool, AdaptiveMaxPool
from distbelief.graph.kinds.attention import Attention
from distbelief.graph.kinds.choosing import Compare, Where
from distbelief.graph.kinds.class_losses import ClassSums, CrossEntropy
from distbelief.graph.kinds.contrast import LocalContrast
from distbelief.graph.kinds.convolution import Convolution
from distbelief.graph.kinds.dropout import Dropout
from distbelief.graph.kinds.embedding import Embedding
from distbelief.graph.kinds.joining import Cat
from distbelief.graph.kinds.l2_pooling import L2Pool
from distbelief.graph.kinds.linear import Linear
from distbelief.graph.kinds.locally_connected import LocallyConnected
from distbelief.graph.kinds.moving import Expand, Pad, Permute, Slice
from distbelief.graph.kinds.normalisation import Normalise, RunningAverage
from distbelief.graph.kinds.parameter import Parameter
from distbelief.graph.kinds.place_losses import PlaceLoss
from distbelief.graph.kinds.pointwise import Pointwise
from distbelief.graph.kinds.pooling import AveragePool, MaxPool
from distbelief.graph.kinds.product import Product
from distbelief.graph.kinds.reduction import Maximum, Reduction
from distbelief.graph.kinds.reshaping import Reshape
from distbelief.graph.kinds.response import LocalResponse
from distbelief.graph.kinds.softmax import Softmax
from distbelief.graph.kinds.whole import Whole


KINDS: tuple[LayerKind, ...] = (
    # What has weights.
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
    Normalise(),
    RunningAverage(),
    Softmax(),
    Attention(),
    Product(),
    Compare(),
    Where(),
    # Place by place, or at another place.
    Pointwise(),
    Dropout(),
    Cat(),
    Reshape(),
    Permute(),
    Slice(),
    Expand(),
    Pad(),
    # Losses, and what nobody splits.
    PlaceLoss(),
    ClassSums(),
    CrossEntropy(),
    Whole(),
)

for _kind in KINDS:
    register(_kind)
