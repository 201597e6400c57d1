"""Sequential nets: AlexNet, VGG-16, MobileNet."""

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override


class AlexNet(nn.Module):
    """Krizhevsky et al. 2012: groups of channels, local response normalization."""

    def __init__(self, *, width: int = 4, n_classes: int = 7, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5, alpha=1e-1, beta=0.75, k=2.0),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(width, 2 * width, 5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5, alpha=1e-1, beta=0.75, k=2.0),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(2 * width, 3 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(3 * width, 2 * width, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(2 * width * 2 * 2, 12),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(12, n_classes),
        )

    @override
    def forward(self, images: torch.Tensor) -> object:
        x = torch.flatten(self.features(images), 1)
        return self.classifier(x)


class Vgg16(nn.Module):
    """Simonyan and Zisserman 2014, configuration D."""

    def __init__(self, *, width: int = 2, n_classes: int = 7, dropout: float = 0.0) -> None:
        super().__init__()
        plan = [1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0]
        layers: list[nn.Module] = []
        n_channels = 3
        for factor in plan:
            if not factor:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(n_channels, factor * width, 3, padding=1), nn.ReLU()]
            n_channels = factor * width
        self.features = nn.Sequential(*layers)
        self.fc6 = nn.Linear(n_channels, 16)
        self.fc7 = nn.Linear(16, 16)
        self.fc8 = nn.Linear(16, n_classes)
        self.dropout = dropout

    @override
    def forward(self, images: torch.Tensor) -> object:
        x = self.features(images)
        x = x.view(x.size(0), -1)
        for layer in (self.fc6, self.fc7):
            x = functional.dropout(
                functional.relu(layer(x)), p=self.dropout, training=self.training
            )
        return self.fc8(x)


class MobileNet(nn.Module):
    """Howard et al. 2017: depthwise, then pointwise convolutions."""

    def __init__(self, *, width: int = 4, n_classes: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        plan = [(1, 2, 1), (2, 4, 2), (4, 4, 1)]
        for before, after, stride in plan:
            inner, outer = before * width, after * width
            layers += [
                nn.Conv2d(*(inner, inner, 3), stride=stride, padding=1, groups=inner, bias=False),
                nn.BatchNorm2d(inner),
                nn.ReLU6(),
                nn.Conv2d(inner, outer, 1, bias=False),
                nn.BatchNorm2d(outer),
                nn.ReLU6(),
            ]
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, n_classes)

    @override
    def forward(self, images: torch.Tensor) -> object:
        x = self.blocks(functional.hardswish(self.stem(images)))
        return self.head(x.mean([2, 3]))
