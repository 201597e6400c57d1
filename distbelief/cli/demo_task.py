"""What `distbelief demo` trains: a small convolutional net that reads noisy, shifted digits."""

import math
from typing import Final

import torch
from torch import nn
from torch.utils.data import TensorDataset


# Five columns and seven rows each, as on the displays of small devices.
_GLYPHS: Final = """
.###. ..#.. .###. .###. ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... .#... ....# #...# #...#
#...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#...# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
#...# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .##..
"""
SIDE: Final = 9  # of an image, in pixels
NOISE: Final = 0.35  # standard deviation; a stroke is 1


def glyphs() -> torch.Tensor:
    """Return the ten digits as (10, 7, 5), 1 where there is ink."""
    rows = [line.split() for line in _GLYPHS.split("\n") if line]
    inks = [[[pixel == "#" for pixel in glyph] for glyph in row] for row in rows]
    return torch.tensor(inks, dtype=torch.float32).transpose(0, 1)


def digits(n_samples: int, seed: int) -> TensorDataset:
    """Return images (n, 1, 9, 9), each of a digit somewhere in noise, and the digits (n,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n_samples,), generator=generator)
    images = NOISE * torch.randn(n_samples, 1, SIDE, SIDE, generator=generator)
    downs = torch.randint(SIDE - 6, (n_samples,), generator=generator)
    rights = torch.randint(SIDE - 4, (n_samples,), generator=generator)
    inks = glyphs()[labels]
    for image, ink, down, right in zip(images, inks, downs.tolist(), rights.tolist(), strict=True):
        image[0, down : down + 7, right : right + 5] += ink
    return TensorDataset(images, labels)


def net() -> nn.Module:
    """Return the net: images (n, 1, 9, 9) to logits (n, 10)."""
    channels, left = 32, (SIDE - 2) // 2
    return nn.Sequential(
        nn.Conv2d(1, channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * math.prod((left, left)), 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
