"""Scalars of numpy as Python's own: what users compute with, and job files hold not."""

from collections.abc import Mapping

import numpy as np


def plain(value: object) -> object:
    """Return a value of a job file, with Python's own numbers in place of numpy's.

    A numpy float is a Python float that prints as "np.float64(0.5)", an integer of
    numpy is none of Python's.
    """
    match value:
        case np.generic():
            return value.item()
        case Mapping():
            return {key: plain(one) for key, one in value.items()}
        case list() | tuple():
            return [plain(one) for one in value]
        case _:
            return value
