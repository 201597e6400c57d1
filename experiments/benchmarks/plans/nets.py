"""Known nets at full size for the planner: the pair of the paper, three of torch alone, the zoo's.

They are only ever captured, on the meta device: nothing of them is computed, so what
their numbers begin with does not matter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import LayerGraph
from distbelief.plans.cluster import Cluster
from distbelief.plans.planner.cost_model import AnalyticCosts, single_sample
from distbelief.plans.planner.search import PlanningRequest
from experiments.images.model import paper_net
from experiments.speech import model as speech
from experiments.zoo.models import MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    make: Callable[[], nn.Module]  # makes it
    input: InputSpec  # of one sample
    batch: int  # samples of a step
    loss: str = "cross_entropy"  # its name
    classes: int = 0  # the dimension of the classes in its output

    def graph(self) -> LayerGraph:
        with torch.device("meta"):
            module = self.make()
        return append_loss(capture(module, [self.input]), self.loss, dim=self.classes)

    def order(self, cluster: Cluster) -> PlanningRequest:
        """Capture it, to be planned by arithmetic and search."""
        graph = self.graph()
        costs = AnalyticCosts(cluster, batch=self.batch, single=single_sample(graph))
        return PlanningRequest(
            graph=graph, cluster=cluster, batch=self.batch, costs=costs, pins={}, search=True
        )


def convolution(before: int, after: int) -> list[nn.Module]:
    connected = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return [connected, nn.BatchNorm2d(after), nn.ReLU()]


class UNet(nn.Module):
    """Ronneberger et al. 2015, with edges padded: long skips over four levels."""

    def __init__(self, *, width: int = 64, n_levels: int = 4, n_classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(n_levels + 1)]
        before = [3, *widths[:-2]]
        self.down = nn.ModuleList(map(self._pair, before, widths[:-1]))
        self.bottom = self._pair(widths[-2], widths[-1])
        self.raised = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * n, n, 3, padding=1))
            for n in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(self._pair(2 * n, n) for n in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, n_classes, 1)

    @staticmethod
    def _pair(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(*convolution(before, after), *convolution(after, after))

    @override
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x, skips = image, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for raised, up in zip(self.raised, self.up, strict=True):
            x = up(torch.cat([skips.pop(), raised(x)], 1))
        result: torch.Tensor = self.head(x)
        return result


class Lstm(nn.Module):
    """Zaremba et al. 2014: the next word; the medium one of their nets."""

    def __init__(self, *, n_words: int = 10_000, size: int = 650) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, size)
        self.lstm = nn.LSTM(size, size, num_layers=2, batch_first=True)
        self.next = nn.Linear(size, n_words)

    @override
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.words(words))
        scores: torch.Tensor = self.next(x)
        return scores


class Encoder(nn.Module):
    """Vaswani et al. 2017: the encoder of their base model, words at its end."""

    def __init__(self, *, n_words: int = 30_000, size: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, size)
        layer = nn.TransformerEncoderLayer(
            *(size, size // 64, 4 * size), dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(size, n_words)

    @override
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encoder(self.words(words)))
        return scores


_OF_TORCHVISION: Final = (
    *("alexnet", "vgg11", "mobilenet_v2", "resnet18", "resnet50", "googlenet", "densenet121"),
)
_IMAGE: Final = InputSpec(shape=(3, 224, 224))
SPEECH: Final = Net(make=speech.paper_net, input=InputSpec(shape=(speech.N_INPUTS,)), batch=100)
# The pair of Dean et al. 2012, section 5.
IMAGES: Final = Net(
    make=paper_net, input=InputSpec(shape=(3, 100, 100)), batch=100, loss="one_vs_all"
)

NETS: Final[Mapping[str, Net]] = {
    "speech": SPEECH,
    "images 80M": Net(
        make=lambda: paper_net("80M"), input=IMAGES.input, batch=100, loss="one_vs_all"
    ),
    "unet": Net(make=UNet, input=_IMAGE, batch=8),
    "lstm": Net(make=Lstm, input=InputSpec(shape=(35,), n_values=10_000), batch=20, classes=1),
    "encoder": Net(
        make=Encoder, input=InputSpec(shape=(128,), n_values=30_000), batch=32, classes=1
    ),
    **{
        name: Net(make=MODELS[name].published.make, input=_IMAGE, batch=32)
        for name in _OF_TORCHVISION
        if find_spec("torchvision")  # of the extra `zoo`
    },
}
