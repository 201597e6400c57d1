"""What is written in an image of a category: a character, or a pair of letters.

    han     20,902 characters, U+4E00 to U+9FA5
    latin   21,025 ordered pairs of 145 letters and digits that do not look alike

In their own order neighbours look alike, and a task of few categories would be harder
than one of many. So they are shuffled once and for all, and a task has the first ones.
"""

from itertools import chain
from typing import Final

import numpy as np

from experiments.images.errors import ImagesError
from experiments.images.fonts import Script


N_CATEGORIES_MAX: Final = 20_902
HAN_FIRST: Final = 0x4E00

_SHUFFLE_SEED: Final = 1

# Letters that all fonts of matplotlib have, less those whose images, of one size,
# differ by less than 7.5 % of the ink: c and C, o and 0, many Latin and Cyrillic ones.
_SPANS: Final = (
    *((0x30, 0x39), (0x41, 0x5A), (0x61, 0x6E), (0x70, 0x72), (0x74, 0x75)),
    *((0x79, 0x79), (0xC6, 0xC6), (0xD0, 0xD0), (0xD8, 0xD8), (0xDE, 0xDF)),
    *((0xE6, 0xE6), (0xF0, 0xF0), (0xF8, 0xF8), (0xFE, 0xFE), (0x127, 0x127)),
    *((0x141, 0x142), (0x14A, 0x14B), (0x152, 0x153), (0x393, 0x394)),
    *((0x39E, 0x39E), (0x3A0, 0x3A0), (0x3A3, 0x3A3), (0x3A6, 0x3A6)),
    *((0x3A8, 0x3A9), (0x3B1, 0x3B4), (0x3B6, 0x3B6), (0x3B8, 0x3B8)),
    *((0x3BA, 0x3BA), (0x3BC, 0x3BE), (0x3C0, 0x3C0), (0x3C2, 0x3C9)),
    *((0x409, 0x40B), (0x411, 0x411), (0x414, 0x414), (0x416, 0x416)),
    *((0x418, 0x418), (0x41B, 0x41B), (0x426, 0x42B), (0x42D, 0x42F)),
    *((0x431, 0x431), (0x434, 0x434), (0x43A, 0x43A), (0x43C, 0x43C)),
    *((0x43F, 0x43F), (0x444, 0x444), (0x446, 0x446), (0x449, 0x449)),
    *((0x44B, 0x44B), (0x44D, 0x44F), (0x452, 0x452), (0x459, 0x45B)),
    *((0x462, 0x463), (0x472, 0x472), (0x490, 0x491), (0x254, 0x254)),
    *((0x259, 0x259), (0x263, 0x265), (0x26F, 0x26F), (0x283, 0x283)),
    (0x28C, 0x28C),
)
LETTERS: Final = "".join(chr(code) for code in chain(*(range(a, b + 1) for a, b in _SPANS)))


def texts(script: Script, categories: int) -> list[str]:
    """Return what is written in images of categories 0, 1, ...

    Raises:
        ImagesError: there are not so many.
    """
    if not 2 <= categories <= N_CATEGORIES_MAX:
        raise ImagesError(f"categories = {categories}: use a number from 2 to {N_CATEGORIES_MAX:,}")
    n_all = N_CATEGORIES_MAX if script == "han" else len(LETTERS) ** 2
    chosen = np.random.default_rng(_SHUFFLE_SEED).permutation(n_all)[:categories]
    if script == "han":
        return [chr(HAN_FIRST + int(number)) for number in chosen]
    pairs = (divmod(int(number), len(LETTERS)) for number in chosen)
    return [LETTERS[first] + LETTERS[second] for first, second in pairs]
