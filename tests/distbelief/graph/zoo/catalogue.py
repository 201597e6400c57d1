"""The models of this zoo, and the expected result of capturing them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.capture import InputSpec
from distbelief.graph.region import Shape
from tests.distbelief.graph.zoo.branching import DenseNet, Inception, ResNet, UNet
from tests.distbelief.graph.zoo.local import LocalNet
from tests.distbelief.graph.zoo.plain import AlexNet, MobileNet, Vgg16
from tests.distbelief.graph.zoo.sequences import (
    Dictation,
    LstmTagger,
    TorchEncoder,
    VisionTransformer,
)


@final
class Applied(nn.Module):
    """A function of the input and of parts of the model: modules, parameters and buffers."""

    def __init__(self, function: Callable[..., object], **parts: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.names = tuple(parts)
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    @override
    def forward(self, x: torch.Tensor) -> object:
        return self.function(x, *(getattr(self, name) for name in self.names))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its input's shape, without the batch."""

    make: Callable[[], nn.Module]
    shape: Shape
    n_values: int | None = None  # of an integer input
    whole: Mapping[str, str] | None = None  # opaque layers, and a part of the reason
    dropping: Callable[[], nn.Module] | None = None  # makes the model with dropout

    @property
    def specs(self) -> list[InputSpec]:
        return [InputSpec(shape=self.shape, n_values=self.n_values)]

    def model(self, *, dropping: bool = False) -> nn.Module:
        """Return the model with the same values every time, in float64."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            make = self.dropping if dropping else self.make
            assert make is not None
            model = make().double()
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    if tensor.is_floating_point():
                        tensor.add_(0.1 * torch.rand_like(tensor))
        return model

    def input(self, *, batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        shape = (batch, *self.shape)
        if self.n_values is not None:
            return torch.randint(self.n_values, shape, generator=generator)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_()


ZOO: Final[Mapping[str, Case]] = {
    "alexnet": Case(make=AlexNet, shape=(3, 47, 47), dropping=lambda: AlexNet(dropout=0.5)),
    "vgg16": Case(make=Vgg16, shape=(3, 32, 32), dropping=lambda: Vgg16(dropout=0.5)),
    "mobilenet": Case(make=MobileNet, shape=(3, 12, 12)),
    "resnet18": Case(make=ResNet, shape=(3, 32, 32)),
    "resnet50": Case(
        make=lambda: ResNet((3, 4, 6, 3), width=1, bottleneck=True), shape=(3, 32, 32)
    ),
    "inception": Case(make=Inception, shape=(5, 6, 7)),
    "densenet": Case(make=DenseNet, shape=(3, 8, 8)),
    "unet": Case(make=UNet, shape=(1, 9, 11)),
    "unet, transposed": Case(make=lambda: UNet(transposed=True), shape=(1, 9, 11)),
    "lstm": Case(
        make=LstmTagger,
        shape=(5,),
        n_values=11,
        whole=dict.fromkeys(["lstm", "lstm.2"], "it has fewer than 512 units"),
    ),
    "dictation": Case(make=Dictation, shape=(3, 3)),
    "encoder": Case(
        make=lambda: TorchEncoder(padded=True),
        shape=(5,),
        n_values=11,
        dropping=lambda: TorchEncoder(padded=True, dropout=0.1),
    ),
    "encoder, causal, norm first": Case(
        make=lambda: TorchEncoder(norm_first=True, causal=True), shape=(5,), n_values=11
    ),
    "vision transformer": Case(make=VisionTransformer, shape=(3, 8, 8)),
    "local": Case(make=LocalNet, shape=(3, 14, 14)),
}

LARGE: Final = {"resnet50": [pytest.mark.soak]}  # of the kinds of layers that resnet18 has
MODELS: Final = [pytest.param(name, marks=LARGE.get(name, ())) for name in ZOO]
