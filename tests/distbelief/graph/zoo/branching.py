"""Nets with branches: ResNets, Inception, DenseNet, U-Net."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override


class Residual(nn.Module):
    """He et al. 2015: two 3 x 3 convolutions, or a bottleneck of three."""

    def __init__(
        self, n_inputs: int, width: int, *, stride: int = 1, bottleneck: bool = False
    ) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        shapes = (
            [(n_inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
            if bottleneck
            else [(n_inputs, width, 3, stride), (width, width, 3, 1)]
        )
        for number, (before, after, size, step) in enumerate(shapes, start=1):
            convolution = nn.Conv2d(before, after, size, stride=step, padding=size // 2, bias=False)
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", nn.BatchNorm2d(after))
        self.n_convolutions = len(shapes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or n_inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(n_inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    @override
    def forward(self, x: torch.Tensor) -> object:
        around = x if self.downsample is None else self.downsample(x)
        for number in range(1, self.n_convolutions + 1):
            x = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x))
            if number < self.n_convolutions:
                x = self.relu(x)
        x += around
        return self.relu(x)


class ResNet(nn.Module):
    """ResNet-18: counts (2, 2, 2, 2); ResNet-50: (3, 4, 6, 3) with bottlenecks."""

    def __init__(
        self,
        counts: Sequence[int] = (2, 2, 2, 2),
        *,
        width: int = 2,
        bottleneck: bool = False,
        n_classes: int = 6,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        n_channels = width
        stages = []
        for stage, count in enumerate(counts):
            blocks = []
            for index in range(count):
                stride = 2 if stage and not index else 1
                inner = width * 2**stage
                blocks.append(Residual(n_channels, inner, stride=stride, bottleneck=bottleneck))
                n_channels = 4 * inner if bottleneck else inner
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(n_channels, n_classes)

    @override
    def forward(self, images: torch.Tensor) -> object:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(images)), inplace=True))
        for stage in self.stages:
            x = stage(x)
        return self.fc(self.avgpool(x).flatten(1))


class Inception(nn.Module):
    """A block of Szegedy et al. 2014: four branches side by side."""

    def __init__(self, n_inputs: int = 5, *, width: int = 2) -> None:
        super().__init__()
        self.one = nn.Conv2d(n_inputs, width, 1)
        self.three = nn.Sequential(
            nn.Conv2d(n_inputs, width, 1), nn.ReLU(), nn.Conv2d(width, 3, (1, 3)),
        )  # fmt: skip
        self.five = nn.Sequential(
            nn.Conv2d(n_inputs, width, 1), nn.ReLU(), nn.Conv2d(width, width, 5, padding="same")
        )
        self.pool = nn.Conv2d(n_inputs, width, 1)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        three = functional.pad(self.three(x), (1, 1))
        pooled = functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        branches = [self.one(x), three, self.five(x), self.pool(pooled)]
        return functional.relu(torch.cat(branches, 1))


class DenseNet(nn.Module):
    """Huang et al. 2016: every layer reads all layers before it; pooled between blocks."""

    def __init__(
        self, counts: Sequence[int] = (3, 3), *, growth: int = 2, n_classes: int = 4
    ) -> None:
        super().__init__()
        n_channels = 2 * growth
        self.stem = nn.Conv2d(3, n_channels, 3, padding=1, bias=False)
        self.layers = nn.ModuleList()
        self.transitions = nn.ModuleList()
        self.counts = tuple(counts)
        for count in counts:
            for _ in range(count):
                self.layers.append(
                    nn.Sequential(
                        nn.BatchNorm2d(n_channels),
                        nn.ReLU(),
                        nn.Conv2d(n_channels, growth, 3, padding=1, bias=False),
                    )
                )
                n_channels += growth
            halved = n_channels // 2
            self.transitions.append(
                nn.Sequential(
                    nn.BatchNorm2d(n_channels),
                    nn.ReLU(),
                    nn.Conv2d(n_channels, halved, 1),
                    nn.AvgPool2d(2),
                )
            )
            n_channels = halved
        self.head = nn.Linear(n_channels, n_classes)

    @override
    def forward(self, images: torch.Tensor) -> object:
        x = self.stem(images)
        layers = iter(self.layers)
        for count, transition in zip(self.counts, self.transitions, strict=True):
            features = [x]
            for _ in range(count):
                features.append(next(layers)(torch.cat(features, 1)))
            x = transition(torch.cat(features, 1))
        return self.head(torch.amax(x, dim=(-2, -1)))


class UNet(nn.Module):
    """Ronneberger et al. 2015: long skips, cropped or padded to fit."""

    def __init__(self, *, width: int = 2, transposed: bool = False) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._pair(1, width), self._pair(width, 2 * width)])
        self.bottom = self._pair(2 * width, 4 * width)
        self.raised = nn.ModuleList(
            nn.ConvTranspose2d(2 * n, n, 2, stride=2)
            if transposed
            else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * n, n, 1))
            for n in (2 * width, width)
        )
        self.up = nn.ModuleList([self._pair(4 * width, 2 * width), self._pair(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _pair(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(2, after),
            nn.LeakyReLU(0.1),
            nn.Conv2d(after, after, 3, padding=1),
            nn.InstanceNorm2d(after, affine=True),
            nn.SiLU(),
        )

    @override
    def forward(self, image: torch.Tensor) -> object:
        x, skips = image, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for raised, up in zip(self.raised, self.up, strict=True):
            x, skip = raised(x), skips.pop()
            rows = skip.size(2) - x.size(2)
            columns = skip.size()[3] - x.size()[3]
            if rows or columns:
                x = functional.pad(
                    x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2]
                )
            x = up(torch.cat([skip, x], dim=1))
        return self.head(x)
