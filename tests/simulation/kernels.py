"""Which operations of torch a run consists of, and how they round on this processor.

torch has kernels for several kinds of processor, and one kernel may compute by two
formulas: whole blocks of numbers by one, what is left over by the other. So it depends on
the processor, the operation *and* the size whether two machines find the same bits. An
example, found by a golden run that failed on some machines only: AVX2 computes the sigmoid
of eight doubles as one block; AVX-512 has blocks of sixteen, and computes them one by one.

Bits are known to agree where each operation of a run, at its sizes, makes of drawn numbers
what it made of them where the run was recorded.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Final, Protocol, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from typing_extensions import override


N_TRIALS: Final = 16
"""Of each operation. Formulas that differ do so for every tenth number or so, or oftener."""

SHIFTS: Final = (0, 16)  # bytes: numpy aligns to 16, torch to 64


class Operation(Protocol):
    is_view: bool

    def name(self) -> str: ...

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class Operations(TorchDispatchMode):
    """Notes each kind of operation that runs meanwhile: its name, and what it is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    @override
    def __torch_dispatch__(
        self,
        func: Operation,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not func.is_view and "empty" not in func.name():
            self.seen.add(json.dumps([func.name(), *tree_map(_described, (args, kwargs))]))
        return func(*args, **kwargs)


def _described(value: object) -> object:
    match value:
        case torch.Tensor():
            return {"tensor": f"{value.dtype}", "size": [*value.shape], "stride": [*value.stride()]}
        case torch.Generator():
            return {"generator": 1}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": f"{value}"}
        case torch.device():
            return None
        case float() if value not in (0.0, 1.0):
            return 0.3  # which number it is selects no kernel
        case _:
            return value


def digest(texts: set[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:8]


@cache
def rounding(operation: str) -> str:
    """Return a digest of what an operation makes of drawn numbers."""
    name, args, kwargs = json.loads(operation)
    space, _, called = name.partition("::")
    packet, _, overload = called.partition(".")
    operate = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    found = hashlib.sha256(operation.encode())
    for trial in range(N_TRIALS):
        for shift in SHIFTS:
            stream = np.random.default_rng(trial)
            built = [_built(value, stream, shift) for value in args]
            named = {key: _built(value, stream, shift) for key, value in kwargs.items()}
            result = operate(*built, **named)
            for tensor in tree_iter((result, built)):  # some write to what they are given
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    found.update(torch.nan_to_num(tensor).contiguous().numpy().tobytes())
    return found.hexdigest()[:8]


def _built(value: object, stream: np.random.Generator, shift: int) -> object:
    """Return what a description stands for."""
    match value:
        case list():
            return [_built(item, stream, shift) for item in value]
        case {"tensor": str(name), "size": [*size], "stride": [*stride]}:
            return _drawn(_of_torch(name), size, stride, stream, shift)
        case {"torch": str(name)}:
            return _of_torch(name)
        case {"generator": int(seed)}:
            return torch.Generator().manual_seed(seed)
        case _:
            return value


def _drawn(
    dtype: object,
    size: Sequence[int],
    stride: Sequence[int],
    stream: np.random.Generator,
    shift: int,
) -> torch.Tensor:
    """Return a tensor of drawn numbers, or of zeros if they are whole, which may be indices."""
    assert isinstance(dtype, torch.dtype)
    n_skipped = shift // dtype.itemsize
    n = 1 + sum((a - 1) * b for a, b in zip(size, stride, strict=True)) if all(size) else 0
    drawn = torch.from_numpy(stream.standard_normal(n_skipped + n)).to(dtype)
    if not dtype.is_floating_point:
        drawn.zero_()
    return drawn.as_strided(size, stride, n_skipped)


def _of_torch(name: str) -> object:
    return cast("object", getattr(torch, name.removeprefix("torch.")))
