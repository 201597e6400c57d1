"""What a forward is traced with: tensors without numbers, and how to compute with them.

Shapes are known while tracing, so that a forward may branch and loop on them. A module
that is not looked into is run on torch's meta device, its tensors replaced by ones
without memory; if it needs values (it branches on them), it is run once for real, on a
few samples of noise, to see what shape comes out.
"""

import builtins
import dis
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, final

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.node import Target
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map
from typing_extensions import override

from distbelief.graph.graph import GraphError
from distbelief.graph.unsupported import LostChangeError, lost_change


N_TRIED: Final = 3
"""Samples of noise for a module that needs values."""

_ASKED_BY_PYTHON: Final = frozenset({"LOAD_ATTR", "MATCH_CLASS"})
"""Instructions that ask an object for its class; calls of C functions are others."""


@final
class StandIn(fx.Proxy):
    """Records what is done with it, and knows its shape."""

    _is_param = False  # what `isinstance(x, nn.Parameter)` asks tensors

    @property  # type: ignore[misc] # that is how a class is asked for
    @override
    def __class__(self) -> type:
        """A tensor's class where Python code asks (`match`, `x.__class__`).

        C code gets the true class: torch's own would read the memory of a tensor that
        there is none of, and the process would die (`torch.pow(x, 3)`).
        """
        asking = sys._getframe(1)  # noqa: SLF001 -- the only way to know who asks
        word = dis.opname[asking.f_code.co_code[asking.f_lasti]]
        return self.told if word in _ASKED_BY_PYTHON else StandIn

    @property
    def told(self) -> type:
        """The class that Python code in a forward sees."""
        value = self.node.meta.get("value")
        return torch.Tensor if isinstance(value, torch.Tensor) else StandIn

    @property
    def value(self) -> object:
        """The result without memory: a tensor, or a tuple of such."""
        return self.node.meta["value"]

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor without memory."""
        assert isinstance(self.value, torch.Tensor), self.node
        return self.value

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return self.tensor.dim()

    @property
    def dtype(self) -> torch.dtype:
        """As of a tensor."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Where a forward may make tensors of constants: they need values."""
        return torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        """As of a tensor."""
        return False

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.tensor.dim()

    def numel(self) -> int:
        """As of a tensor."""
        return self.tensor.numel()

    def is_floating_point(self) -> bool:
        """As of a tensor."""
        return self.tensor.is_floating_point()

    # torch.fx takes x += y for x = x + y, of which other names of x see nothing.
    def __iadd__(self, other: object) -> fx.Proxy:
        """Record a change in place."""
        return self._changed(operator.iadd, other)

    def __isub__(self, other: object) -> fx.Proxy:
        """Record a change in place."""
        return self._changed(operator.isub, other)

    def __imul__(self, other: object) -> fx.Proxy:
        """Record a change in place."""
        return self._changed(operator.imul, other)

    def __itruediv__(self, other: object) -> fx.Proxy:
        """Record a change in place."""
        return self._changed(operator.itruediv, other)

    def __ipow__(self, other: object) -> fx.Proxy:
        """Record a change in place."""
        return self._changed(operator.ipow, other)

    def _changed(self, function: Target, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    @override
    def __len__(self) -> int:
        """As of a tensor, or a tuple."""
        assert isinstance(self.value, torch.Tensor | tuple | list), self.node
        return len(self.value)

    @override
    def __iter__(self) -> Iterator[fx.Proxy]:
        """As of a tensor, or a tuple."""
        return (
            self.tracer.create_proxy("call_function", operator.getitem, (self, i), {})
            for i in range(len(self))
        )


@contextmanager
def taken_for_tensors() -> Iterator[None]:
    """Let `isinstance` take stand-ins for tensors, wherever Python code calls it.

    Not C code, which would read their memory: see `StandIn`.
    """
    original = builtins.isinstance

    def told(value: object, kinds: type, /) -> bool:
        if original(value, kinds):
            return True
        return type(value) is StandIn and issubclass(value.told, kinds)

    builtins.isinstance = told  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.isinstance = original


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape on the meta device; floats are float32."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def run_without_memory(
    module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> object:
    """Return what `module` returns, its own tensors replaced by some without memory."""
    state = {
        name: without_memory(tensor)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    before = dict(state)
    result: object = functional_call(module, state, arguments, dict(keywords))
    _refuse_change(module, before, state)
    return result


def run_on_noise(
    module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object], *, batch: int
) -> object:
    """Return what `module` returns, after it was run for real on a few samples.

    Args:
        module: Nothing of it changes.
        arguments: Tensors without memory among them are replaced by noise.
        keywords: Likewise.
        batch: Extent of the batch in them, and in what is returned.

    Raises:
        GraphError: its tensors have no values themselves.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if any(tensor.is_meta for _, tensor in tensors):
        raise GraphError(
            "what it returns depends on values, and its tensors are on the meta device"
        )
    place = tensors[0][1] if tensors else torch.empty(())
    floats = next((t for _, t in tensors if t.is_floating_point()), torch.empty(()))
    state = {name: tensor.detach().clone() for name, tensor in module.named_buffers()}

    def noise(value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        shape = tuple(value.shape)
        if shape[:1] == (batch,):
            shape = (N_TRIED, *shape[1:])
        if not value.is_floating_point():
            return torch.zeros(shape, dtype=value.dtype, device=place.device)
        return torch.rand(shape, dtype=floats.dtype, device=place.device)

    def forget(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        shape = tuple(value.shape)
        if shape[:1] == (N_TRIED,):
            shape = (batch, *shape[1:])
        return torch.empty(
            shape, dtype=torch.float32 if value.is_floating_point() else value.dtype, device="meta"
        )

    before = dict(state)
    with torch.random.fork_rng(devices=_cuda(t for _, t in tensors)):
        torch.manual_seed(0)
        result: object = functional_call(
            module, state, tree_map(noise, arguments), tree_map(noise, dict(keywords))
        )
    _refuse_change(module, before, state)
    found: object = tree_map(forget, result)
    return found


def _refuse_change(
    module: nn.Module, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> None:
    """Check that a forward has changed no tensor of its module, statistics apart.

    Raises:
        LostChangeError: it has.
    """
    apart = {
        f"{path}.{word}".lstrip(".")
        for path, part in module.named_modules()
        if isinstance(part, _NormBase)
        for word, _ in (*part.named_buffers(), *part.named_parameters())
    }
    for name, tensor in before.items():
        same = after[name] is tensor and not tensor._version  # noqa: SLF001 -- counts changes in place
        if not same and name not in apart:
            raise LostChangeError(lost_change(name))


def _cuda(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    return sorted({t.device for t in tensors if t.is_cuda}, key=str)
