"""Known nets at their full size, written with torch alone, for the planner to split.

They are only ever captured, on the meta device: nothing of them is computed, so what
their numbers begin with does not matter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import LayerGraph
from distbelief.graph.losses import append_loss
from experiments.images.model import paper_net
from experiments.speech.model import acoustic_net


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A net and what a step of it is."""

    make: Callable[[], nn.Module]  # makes it
    input: InputSpec  # of one sample
    batch: int  # samples of a step
    loss: str = "cross_entropy"  # its name
    classes: int = 0  # the dimension of the classes in its output

    def graph(self) -> LayerGraph:
        with torch.device("meta"):
            module = self.make()
        return append_loss(capture(module, [self.input]), self.loss, dim=self.classes)


def alexnet(n_classes: int = 1000) -> nn.Module:
    """Krizhevsky et al. 2012."""
    return nn.Sequential(
        *(nn.Conv2d(3, 96, 11, stride=4, padding=2), nn.ReLU()),
        *(nn.LocalResponseNorm(5, k=2.0), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU()),
        *(nn.LocalResponseNorm(5, k=2.0), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU()),
        *(nn.MaxPool2d(3, stride=2), nn.Flatten()),
        *(nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, n_classes)),
    )


def vgg16(n_classes: int = 1000) -> nn.Module:
    """Simonyan and Zisserman 2014, configuration D."""
    layers: list[nn.Module] = []
    before = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *(*layers, nn.Flatten()),
        *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, n_classes)),
    )


def mobilenet(n_classes: int = 1000) -> nn.Module:
    """Howard et al. 2017: depthwise, then pointwise convolutions."""
    layers: list[nn.Module] = [*convolution(3, 32, 3, stride=2)]
    before = 32
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
    for width, stride in (*plan, *[(512, 1)] * 5, (1024, 2), (1024, 1)):
        layers += convolution(before, before, 3, stride=stride, groups=before)
        layers += convolution(before, width, 1)
        before = width
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pooled, nn.Linear(before, n_classes))


def resnet(counts: Sequence[int], *, bottleneck: bool, n_classes: int = 1000) -> nn.Module:
    """He et al. 2015: 18 layers are (2, 2, 2, 2), 50 are (3, 4, 6, 3) bottlenecks."""
    layers: list[nn.Module] = [
        *convolution(3, 64, 7, stride=2),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage and not index else 1
            block = Residual(before, 64 * 2**stage, stride=stride, bottleneck=bottleneck)
            layers.append(block)
            before = block.n_outputs
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pooled, nn.Linear(before, n_classes))


def googlenet(n_classes: int = 1000) -> nn.Module:
    """Szegedy et al. 2014: nine blocks of four branches, with batch normalisation."""
    layers: list[nn.Module] = [
        *(*convolution(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)),
        *(*convolution(64, 64, 1), *convolution(64, 192, 3)),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = 192
    for widths in (
        *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None),
        *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64)),
        *((128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64)),
        *((256, 160, 320, 32, 128, 128), None),
        *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    ):
        if widths is None:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            continue
        layers.append(Inception(before, widths))
        before = widths[0] + widths[2] + widths[4] + widths[5]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pooled, nn.Linear(before, n_classes))


def densenet(
    counts: Sequence[int] = (6, 12, 24, 16), growth: int = 32, n_classes: int = 1000
) -> nn.Module:
    """Huang et al. 2016; by default their 121 layers."""
    layers: list[nn.Module] = [
        *convolution(3, 64, 7, stride=2),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = 64
    for index, count in enumerate(counts):
        layers.append(DenseBlock(before, count, growth))
        before += count * growth
        if index < len(counts) - 1:
            halving = nn.Conv2d(before, before // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(before), nn.ReLU(), halving, nn.AvgPool2d(2)]
            before //= 2
    layers += [nn.BatchNorm2d(before), nn.ReLU()]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pooled, nn.Linear(before, n_classes))


def convolution(
    before: int, after: int, size: int, *, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    connected = nn.Conv2d(
        *(before, after, size), stride=stride, padding=size // 2, groups=groups, bias=False
    )
    return [connected, nn.BatchNorm2d(after), nn.ReLU()]


class Residual(nn.Module):
    """What is added to a shortcut: two convolutions, or a bottleneck of three."""

    def __init__(self, before: int, width: int, *, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.n_outputs = 4 * width if bottleneck else width
        layers = (
            [
                *convolution(before, width, 1),
                *convolution(width, width, 3, stride=stride),
                *convolution(width, self.n_outputs, 1),
            ]
            if bottleneck
            else [*convolution(before, width, 3, stride=stride), *convolution(width, width, 3)]
        )
        self.added = nn.Sequential(*layers[:-1])
        shortcut = convolution(before, self.n_outputs, 1, stride=stride)[:-1]
        changes = stride != 1 or before != self.n_outputs
        self.shortcut = nn.Sequential(*(shortcut if changes else []))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.added(x) + self.shortcut(x))


class Inception(nn.Module):
    """Four branches side by side; widths are those of the paper's table 1."""

    def __init__(self, before: int, widths: Sequence[int]) -> None:
        super().__init__()
        one, three_before, three, five_before, five, pooled = widths
        self.branches = nn.ModuleList(
            nn.Sequential(*layers)
            for layers in (
                convolution(before, one, 1),
                [*convolution(before, three_before, 1), *convolution(three_before, three, 3)],
                [*convolution(before, five_before, 1), *convolution(five_before, five, 5)],
                [nn.MaxPool2d(3, stride=1, padding=1), *convolution(before, pooled, 1)],
            )
        )

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class DenseBlock(nn.Module):
    """Every layer reads all before it."""

    def __init__(self, before: int, count: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(n_inputs), nn.ReLU()),
                *convolution(n_inputs, 4 * growth, 1),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for n_inputs in range(before, before + count * growth, growth)
        )

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


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
        return nn.Sequential(*convolution(before, after, 3), *convolution(after, after, 3))

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


_IMAGE: Final = InputSpec(shape=(3, 224, 224))

SPEECH: Final = Net(
    make=lambda: acoustic_net([2560] * 4, 8192), input=InputSpec(shape=(440,)), batch=100
)
# The pair of Dean et al. 2012, section 5.
IMAGES: Final = Net(
    make=paper_net, input=InputSpec(shape=(3, 100, 100)), batch=100, loss="one_vs_all"
)

NETS: Final[Mapping[str, Net]] = {
    "speech": SPEECH,
    "images 80M": Net(
        make=lambda: paper_net("80M"), input=IMAGES.input, batch=100, loss="one_vs_all"
    ),
    "alexnet": Net(make=alexnet, input=_IMAGE, batch=32),
    "vgg16": Net(make=vgg16, input=_IMAGE, batch=32),
    "mobilenet": Net(make=mobilenet, input=_IMAGE, batch=32),
    "resnet18": Net(make=lambda: resnet((2, 2, 2, 2), bottleneck=False), input=_IMAGE, batch=32),
    "resnet50": Net(make=lambda: resnet((3, 4, 6, 3), bottleneck=True), input=_IMAGE, batch=32),
    "googlenet": Net(make=googlenet, input=_IMAGE, batch=32),
    "densenet121": Net(make=densenet, input=_IMAGE, batch=32),
    "unet": Net(make=UNet, input=_IMAGE, batch=8),
    "lstm": Net(make=Lstm, input=InputSpec(shape=(35,), n_values=10_000), batch=20, classes=1),
    "encoder": Net(
        make=Encoder, input=InputSpec(shape=(128,), n_values=30_000), batch=32, classes=1
    ),
}
