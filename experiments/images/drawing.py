"""Draws one image: a glyph as if photographed, seldom straight, clean or bright.

glyph -> turned, sheared, scaled, moved, tilted -> thicker strokes -> blur
-> contrast, light on dark or dark on light -> background texture -> noise
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from experiments.images.fonts import FontError


Pixels = NDArray[np.uint8]  # (size, size)
TEXTURE_GRIDS: Final = (3, 5, 9)
_FILL: Final = 0.86  # of the glyph's square is filled by its longer side


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How far images may be from a clean print; widths of the distributions."""

    turn: float = 0.08  # standard deviation of the angle, radians
    shear: float = 0.08  # standard deviation
    scale: tuple[float, float] = (0.85, 1.05)  # least and greatest size
    shift: float = 0.04  # greatest, as a share of the image
    tilt: float = 0.03  # standard deviation of the perspective
    contrast: tuple[float, float] = (0.35, 0.75)  # least and greatest, of 1
    texture: float = 0.08  # greatest strength of the background
    noise: float = 0.08  # greatest standard deviation


def draw_glyph(face: Path, text: str, *, size: int) -> Image.Image:
    """Return it light on black, as large as fits, on twice `size` rows and columns.

    Raises:
        FontError: the font cannot be read, or draws nothing.
    """
    extent = 2 * size
    font = _font(face, extent)
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    longest = max(right - left, bottom - top)
    if longest <= 0:
        raise FontError(f"{face} draws nothing for {text!r}: remove it")
    font = _font(face, max(1, round(_FILL * extent * extent / longest)))
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    image = Image.new("L", (extent, extent))
    at = ((extent - left - right) / 2, (extent - top - bottom) / 2)
    ImageDraw.Draw(image).text(at, text, fill=255, font=font, anchor="ls")
    return image


def photograph(
    glyph: Image.Image, rng: np.random.Generator, *, size: int, conditions: Conditions
) -> Pixels:
    """Return an image of a glyph.

    Args:
        glyph: As `draw_glyph` made it.
        rng: All that is left to chance.
        size: Rows and columns.
        conditions: What may happen to it.
    """
    way = _perspective(rng, size, glyph.width, conditions)
    shown = glyph.transform(
        (size, size), Image.Transform.PERSPECTIVE, way, Image.Resampling.BILINEAR
    )
    if rng.random() < 0.15:
        shown = shown.filter(ImageFilter.MaxFilter(3))
    blur = rng.uniform(0, size / 50)
    if blur > 0.3:
        shown = shown.filter(ImageFilter.GaussianBlur(blur))
    ink = np.asarray(shown, np.float32) / 255
    light = rng.uniform(0.15, 0.85)
    contrast = rng.uniform(*conditions.contrast) * (1 if light < 0.5 else -1)
    noise = rng.standard_normal((size, size), np.float32)
    image = light + contrast * ink
    image += rng.uniform(0, conditions.texture) * _texture(rng, size)
    image += rng.uniform(0, conditions.noise) * noise
    pixels: Pixels = np.clip(image * 255, 0, 255).astype(np.uint8)
    return pixels


@functools.lru_cache(maxsize=64)
def _font(face: Path, size: int) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype(face, size, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise FontError(f"{face} cannot be read: {error}") from error


def _perspective(
    rng: np.random.Generator, size: int, extent: int, conditions: Conditions
) -> tuple[float, ...]:
    """Return Pillow's eight numbers: from a place in the image to one in the glyph."""
    angle = rng.normal(0, conditions.turn)
    cosine, sine = np.cos(angle), np.sin(angle)
    turn = np.array([[cosine, -sine], [sine, cosine]])
    shear = np.array([[1, rng.normal(0, conditions.shear)], [0, rng.uniform(0.9, 1.1)]])
    zoom = extent / size / rng.uniform(*conditions.scale)
    a, b, d, e = (turn @ shear * zoom).ravel()
    g, h = rng.normal(0, conditions.tilt / size, 2)
    middle = extent / 2
    x, y = size / 2 + rng.uniform(-1, 1, 2) * conditions.shift * size
    # The middle of the image, moved by the shift, shows the middle of the glyph.
    w = 1 - g * x - h * y
    ways = (
        *(a + middle * g, b + middle * h, middle * w - a * x - b * y),
        *(d + middle * g, e + middle * h, middle * w - d * x - e * y),
        *(g, h),
    )
    return tuple(float(way / w) for way in ways)


def _texture(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    clouds = np.zeros((size, size), np.float32)
    for grid in rng.choice(TEXTURE_GRIDS, 2, replace=False):
        coarse = Image.fromarray(rng.standard_normal((grid, grid), np.float32))
        clouds += np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))
    clouds -= clouds.mean()
    scaled: NDArray[np.float32] = clouds / (clouds.std() + 1e-6)
    return scaled
