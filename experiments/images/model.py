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

A filter has weights of its own at every place. Each output is a logistic classifier,
one category against all others; the function belongs to the loss "one_vs_all".

What Dean et al. 2012 say (section 5, figure 3): images of 100 x 100; three stages of
filtering, pooling and local contrast normalisation; filters of 10 x 10, between 8 and
36 of them at a place; 21 thousand one-vs-all outputs; nets of 80, 330 and 1700 million
parameters. They refer to Le et al. 2012, "Building high-level features using large
scale unsupervised learning": filters are linear, and pooling is the root of a sum of
squares over windows that overlap. Windows of 5 x 5 for pooling and contrast are Le's
from memory, unchecked.

What neither says, and is chosen here: colour; windows that stay inside the image; a
step of one place everywhere but in the last pooling. Only so do 36 maps have so many
parameters: a step of two in the first pooling leaves a fifth of stage 2. The last
pooling is 6 x 6 with a step of 3 because then the largest net has 1.7 thousand million
parameters, five sixths of them where only neighbours talk to each other.

The two smaller nets differ by their maps only. The smallest has fewer than 8, for
parameters grow at most with the square of the maps: 20 times from 8 to 36, and 80 to
1700 million is 21 times.
"""

from typing import Final, Literal

from torch import nn

from distbelief.graph.kinds.contrast import LocalContrastNorm2d
from distbelief.graph.kinds.l2_pooling import L2Pool2d
from distbelief.graph.kinds.locally_connected import LocallyConnected2d
from distbelief.graph.window import Window


Maps = tuple[int, int, int]
Size = Literal["80M", "330M", "1.7B"]

N_CATEGORIES: Final = 21_000
IMAGE_SIZE: Final = 100
N_COLOURS: Final = 3
FILTER: Final = 10
CONTRAST: Final = 5
POOLS: Final = ((5, 1), (5, 1), (6, 3))  # of each stage: size, step

MAPS: Final[dict[Size, Maps]] = {
    "80M": (5, 5, 5),
    "330M": (13, 14, 13),
    "1.7B": (36, 36, 36),
}


def image_net(
    maps: Maps, categories: int = N_CATEGORIES, size: int = IMAGE_SIZE
) -> nn.Sequential:
    """Three stages, then the outputs; (n, 3, size, size) -> (n, categories).

    Args:
        maps: Of each stage: filters that look at the same place.
        categories: Scores that come out.
        size: Rows and columns of an image.

    Raises:
        ValueError: a stage has no map, or the image is too small for the windows.
    """
    if len(maps) != len(POOLS) or min(*maps, categories) < 1:
        raise ValueError(
            f"maps = {list(maps)}, categories = {categories}: use three numbers of "
            "maps, and at least one of each"
        )
    net = nn.Sequential()
    channels, extent = N_COLOURS, size
    for stage, (n_maps, (pool, step)) in enumerate(zip(maps, POOLS, strict=True), 1):
        filtered = Window(size=FILTER).n_outputs(extent)
        pooled = Window(size=pool, stride=step).n_outputs(filtered)
        if not pooled:
            raise ValueError(
                f"size = {size}: in stage {stage} no window fits into the {extent} "
                f"rows that are left; use images of at least {_smallest()} rows"
            )
        filtering = LocallyConnected2d(channels, n_maps, FILTER, input_size=extent)
        net.add_module(f"filter{stage}", filtering)
        net.add_module(f"pool{stage}", L2Pool2d(pool, stride=step))
        net.add_module(f"contrast{stage}", LocalContrastNorm2d(CONTRAST))
        channels, extent = n_maps, pooled
    net.add_module("flat", nn.Flatten())
    net.add_module("categories", nn.Linear(channels * extent**2, categories))
    return net


def paper_net(size: Size = "1.7B") -> nn.Sequential:
    """The paper's network; 1,728,571,440 parameters, 6.4 GiB.

    Args:
        size: "80M", "330M" or "1.7B" parameters.
    """
    if size not in MAPS:
        raise ValueError(f"size = {size!r} must be one of {', '.join(MAPS)}")
    return image_net(MAPS[size])


def paper_net_330m() -> nn.Sequential:
    """The paper's network of 330 million parameters."""
    return paper_net("330M")


def paper_net_80m() -> nn.Sequential:
    """The paper's network of 80 million parameters."""
    return paper_net("80M")


def _smallest() -> int:
    """Return the rows of the smallest image."""
    extent = 1
    for pool, step in reversed(POOLS):
        extent = (extent - 1) * step + pool + FILTER - 1
    return extent
