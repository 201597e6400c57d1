"""A step that machines share: which net, with how many samples, always the same ones.

    speech   the paper's, 440, four times 2560, 8192: 41,777,152 parameters
    image    three stages of 10 x 10 locally connected filters, 12 maps each, and 256
             one-vs-all outputs on images of 64 x 64: 48,666,424 parameters

What a step is: forward and backward of one batch of random samples, the gradients left
where they are. Nothing is read, updated, fetched or pushed.
"""

from typing import Final, Literal

import msgspec
import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import LayerGraph
from experiments.images.model import image_net
from experiments.speech.model import acoustic_net


NetName = Literal["speech", "image"]
_LOSS: Final[dict[NetName, str]] = {"speech": "cross_entropy", "image": "one_vs_all"}


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    net: NetName  # which one
    batch_size: int  # samples of a step
    small: bool = False  # a tiny one of its kind, for a look

    @property
    def loss(self) -> str:
        return _LOSS[self.net]

    @property
    def input_shape(self) -> tuple[int, ...]:
        if self.net == "speech":
            return (440,)
        size = 44 if self.small else 64
        return (3, size, size)

    @property
    def n_classes(self) -> int:
        if self.net == "speech":
            return 64 if self.small else 8192
        return 16 if self.small else 256

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        if self.net == "speech":
            return acoustic_net([64 if self.small else 2560] * 4, self.n_classes)
        maps = 2 if self.small else 12
        return image_net((maps, maps, maps), self.n_classes, self.input_shape[-1])

    def graph(self) -> LayerGraph:
        with torch.device("meta"):
            module = self.module()
        return append_loss(capture(module, [InputSpec(shape=self.input_shape)]), self.loss)

    def samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch: (batch_size, *input_shape), and labels (batch_size,)."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch_size, *self.input_shape)
        inputs = torch.rand(shape, generator=generator)
        labels = torch.randint(self.n_classes, (self.batch_size,), generator=generator)
        return inputs, labels

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.module().state_dict()

    def mean_loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.net == "speech":
            return functional.cross_entropy(outputs, labels)
        wanted = functional.one_hot(labels, self.n_classes).to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="sum") / len(
            outputs
        )
