"""The paper's image net: three stages of filtering, pooling and normalization."""

import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.ops.local_norms import LocalContrastNorm2d
from distbelief.graph.ops.locally_connected import LocallyConnected2d
from distbelief.graph.ops.windows import L2Pool2d


class LocalNet(nn.Module):
    """Dean et al. 2012, section 5: windows of 10 x 10 in the paper, weights not shared."""

    def __init__(
        self,
        *,
        size: int = 14,
        maps: tuple[int, int, int] = (2, 3, 2),
        window: int = 3,
        n_classes: int = 6,
        device: str | None = None,
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        n_maps = 3
        for after in maps:
            connected = LocallyConnected2d(n_maps, after, window, input_size=size, device=device)
            stages += [
                connected,
                nn.ReLU(),
                L2Pool2d(3, stride=1, epsilon=1e-3),
                LocalContrastNorm2d(5, epsilon=0.1),
            ]
            n_maps, size = after, connected.output_size[0] - 2
        self.stages = nn.Sequential(*stages)
        self.classes = nn.Linear(n_maps * size**2, n_classes, device=device)

    @override
    def forward(self, images: torch.Tensor) -> object:
        return self.classes(self.stages(images).flatten(1))
