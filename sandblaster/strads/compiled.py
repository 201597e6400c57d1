"""Kernels compiled by numba, where that is installed."""

import re
from collections.abc import Sequence
from typing import Final, TypeVar, cast


Kernel = TypeVar("Kernel")

_COMPILED: Final[dict[object, object]] = {}


def compiled(kernel: Kernel, *signatures: str, otherwise: Kernel) -> Kernel:
    """Return a kernel as compiled, or `otherwise` without numba.

    The first call takes seconds, to compile it or to load it from numba's cache. In signatures
    `read(int32, 1)` is an array of that type and number of dimensions that is only read.
    """
    if kernel not in _COMPILED:
        _COMPILED[kernel] = _by_numba(kernel, signatures) or otherwise
    return cast("Kernel", _COMPILED[kernel])


def _by_numba(kernel: object, signatures: Sequence[str]) -> object:
    try:
        import numba  # noqa: PLC0415 -- an extra, and slow to import
    except ImportError:
        return None
    if numba.config.DISABLE_JIT:  # Python would take minutes
        return None
    types = [re.sub(r"read\((.*?)\)", r"Array(\1, 'C', readonly=True)", one) for one in signatures]
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(types, cache=True, **options)(kernel)
    except RuntimeError:  # there is no folder for a cache
        return numba.njit(types, **options)(kernel)
