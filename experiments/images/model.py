"""Locally connected networks for images: the paper's, and smaller ones.

    images               [ 3, 100, 100]      36 maps        5 maps    parameters of
    stage 1   filtering  [36,  91,  91]    89,732,916   12,462,905    10 x 10 x 3 each
              pooling    [36,  87,  87]                               5 x 5
              contrast   [36,  87,  87]
    stage 2   filtering  [36,  78,  78]   788,705,424   15,240,420    10 x 10 x 36
              pooling    [36,  74,  74]                               5 x 5
              contrast   [36,  74,  74]
    stage 3   filtering  [36,  65,  65]   547,712,100   10,583,625    10 x 10 x 36
              pooling    [36,  20,  20]                               6 x 6, every third
              contrast   [36,  20,  20]
    outputs              [21000]          302,421,000   42,021,000    14,400 each
                                        1,728,571,440   80,307,950

A filter has weights of its own at every place. The logistic function of the outputs belongs to the
loss "one_vs_all".

What Dean et al. 2012 say (section 5, figure 3): images of 100 x 100; three stages of filtering,
pooling and local contrast normalisation; filters of 10 x 10, between 8 and 36 of them at a place;
21 thousand one-vs-all outputs; nets of 80, 330 and 1700 million parameters. They refer to Le et al.
2012, "Building high-level features using large scale unsupervised learning": filters are linear,
and pooling is the root of a sum of squares over windows that overlap. Windows of 5 x 5 for pooling
and contrast are Le's from memory, unchecked.

What neither says, and is chosen here: colour; windows that stay inside the image; a step of one
place everywhere but in the last pooling: a step of two in the first leaves a fifth of stage 2. The
last pooling is 6 x 6 with a step of 3 because then the largest net has 1.7 thousand million
parameters, five sixths of them where only neighbours talk to each other.

The two smaller nets differ by their maps only. The smallest has fewer than 8, for parameters grow
at most with the square of the maps: 20 times from 8 to 36, and 80 to 1700 million is 21 times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from torch import nn

from distbelief.graph.ops.local_norms import LocalContrastNorm2d
from distbelief.graph.ops.locally_connected import LocallyConnected2d
from distbelief.graph.ops.windows import L2Pool2d, Window


Maps = tuple[int, int, int]
Size = Literal["80M", "330M", "1.7B"]
N_CATEGORIES: Final = 21_000
IMAGE_SIZE: Final = 100
N_COLOURS: Final = 3
FILTER: Final = 10
CONTRAST: Final = 5
POOLS: Final = ((5, 1), (5, 1), (6, 3))  # of each stage: size, step
MAPS: Final[dict[Size, Maps]] = {"80M": (5, 5, 5), "330M": (13, 14, 13), "1.7B": (36, 36, 36)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    maps: int  # filters that look at the same place
    filter: int = FILTER  # rows and columns of what a filter sees
    pool: int = 5  # rows and columns of a pooling window
    step: int = 1  # from one pooling window to the next
    contrast: int = CONTRAST  # rows and columns of the window of normalisation, odd

    def n_outputs(self, extent: int) -> int:
        """Return the rows that come out of so many; 0 if no window fits."""
        filtered = Window(size=self.filter).n_outputs(extent)
        return Window(size=self.pool, stride=self.step).n_outputs(filtered)

    def n_inputs(self, extent: int) -> int:
        return (extent - 1) * self.step + self.pool + self.filter - 1


def image_net(maps: Maps, categories: int = N_CATEGORIES, size: int = IMAGE_SIZE) -> nn.Sequential:
    """Three stages of the paper's, then the outputs; (n, 3, size, size) in."""
    if len(maps) != len(POOLS) or min(maps) < 1:
        raise ValueError(f"maps = {list(maps)}: use three numbers of maps, 1 or more each")
    stages = [
        Stage(maps=n_maps, pool=pool, step=step)
        for n_maps, (pool, step) in zip(maps, POOLS, strict=True)
    ]
    return staged_net(stages, categories, size)


def staged_net(
    stages: Sequence[Stage | dict[str, int]], categories: int, size: int, colours: int = N_COLOURS
) -> nn.Sequential:
    """Stages of any size, then the outputs; (n, colours, size, size) in."""
    staged = [s if isinstance(s, Stage) else Stage(**s) for s in stages]
    numbers = [n for s in staged for n in (s.maps, s.filter, s.pool, s.step)]
    if min([*numbers, categories, colours]) < 1:
        raise ValueError(
            f"maps = {[s.maps for s in staged]}, categories = {categories}, colours = "
            f"{colours}: use at least one of each, and of filter, pool and step"
        )
    net = nn.Sequential()
    channels, extent = colours, size
    for number, stage in enumerate(staged, 1):
        if not stage.n_outputs(extent):
            raise ValueError(
                f"size = {size}: in stage {number} no window fits into the {extent} "
                f"rows that are left; use images of at least {_smallest(staged)} rows"
            )
        filtering = LocallyConnected2d(channels, stage.maps, stage.filter, input_size=extent)
        net.add_module(f"filter{number}", filtering)
        net.add_module(f"pool{number}", L2Pool2d(stage.pool, stride=stage.step))
        net.add_module(f"contrast{number}", LocalContrastNorm2d(stage.contrast))
        channels, extent = stage.maps, stage.n_outputs(extent)
    net.add_module("flat", nn.Flatten())
    outputs = nn.Linear(channels * extent**2, categories)
    # Every classifier begins at the share of its category: of many, nearly all have to
    # say no, and would spend the first thousands of steps learning that (Lin et al.
    # 2017, "Focal loss for dense object detection", section 4.1).
    nn.init.constant_(outputs.bias, -math.log(max(1, categories - 1)))
    net.add_module("categories", outputs)
    return net


def paper_net(size: Size = "1.7B") -> nn.Sequential:
    """The paper's network; 1,728,571,440 parameters, 6.4 GiB."""
    if size not in MAPS:
        raise ValueError(f"size = {size!r} must be one of {', '.join(MAPS)}")
    return image_net(MAPS[size])


def _smallest(stages: Sequence[Stage]) -> int:
    extent = 1
    for stage in reversed(stages):
        extent = stage.n_inputs(extent)
    return extent
