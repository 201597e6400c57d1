"""How this process asks the system for memory: large blocks are kept, not given back.

A step allocates as many bytes of gradients as the model has, and frees them. The C
library maps blocks beyond 32 MiB from the system and unmaps them each time, and trims
what lies free at the end of the heap; then every page is zeroed by the kernel and
faulted in anew, step after step. For 42 million parameters that is 34,000 page faults
and a quarter of the processor time of a step of 64 samples. Kept, the memory is no more
at its peak; only it does not shrink in between.
"""

import ctypes
import sys
from typing import Final


# malloc.h of glibc
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8

_INT_MAX: Final = 2**31 - 1
_TOP_PAD_BYTES: Final = 1 << 26

KEPT_BYTES_MAX: Final = 1 << 25
"""For who only sends and receives: blocks of messages are kept, vectors are not.
As much as glibc would come to by itself, once a block of that size has been freed."""


def keep_memory(*, block_bytes_max: int | None = None) -> bool:
    """Let the C library keep what is freed, for the rest of this process's life.

    Call before there are threads: one arena serves them all, so that what one of them
    frees another can have.

    Args:
        block_bytes_max: Larger blocks are given back at once; None keeps them all.

    Returns:
        Whether it does: only glibc can be told.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: _INT_MAX}
    if block_bytes_max is None:
        settings |= {_M_MMAP_MAX: 0, _M_TOP_PAD: _TOP_PAD_BYTES}
    else:
        settings[_M_MMAP_THRESHOLD] = block_bytes_max
    taken = [bool(mallopt(what, value)) for what, value in settings.items()]
    return all(taken)
