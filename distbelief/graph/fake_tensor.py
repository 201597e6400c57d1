"""Fake tensors: proxies with shapes and no values, and ways to run a module on them.

Shapes are known during tracing, so a forward may branch and loop on them. A leaf module runs on
torch's meta device. If it needs values (it branches on them), it runs once for real, on a few
samples of noise, to find the shape of its result.
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


# Samples of noise for a module that needs values.
N_TRIED: Final = 3

# Bytecode instructions by which Python code, not C code, asks for an object's class.
_ASKED_BY_PYTHON: Final = frozenset({"LOAD_ATTR", "MATCH_CLASS"})


@final
class FakeTensorProxy(fx.Proxy):
    """A torch.fx proxy that knows its shape."""

    _is_param = False  # what `isinstance(x, nn.Parameter)` asks tensors

    @property  # type: ignore[misc] # that is how a class is asked for
    @override
    def __class__(self) -> type:
        # A tensor's class where Python code asks (`match`, `x.__class__`). C code gets the true
        # class: it would read memory that does not exist and crash (`torch.pow(x, 3)`).
        asking = sys._getframe(1)  # noqa: SLF001 -- the only way to know who asks
        word = dis.opname[asking.f_code.co_code[asking.f_lasti]]
        return self.python_class if word in _ASKED_BY_PYTHON else FakeTensorProxy

    @property
    def python_class(self) -> type:
        value = self.node.meta.get("value")
        return torch.Tensor if isinstance(value, torch.Tensor) else FakeTensorProxy

    @property
    def value(self) -> object:
        return self.node.meta["value"]

    @property
    def tensor(self) -> torch.Tensor:
        assert isinstance(self.value, torch.Tensor), self.node
        return self.value

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        # Constants that a forward makes need values, so not meta.
        return torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return False

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.tensor.dim()

    def numel(self) -> int:
        return self.tensor.numel()

    def is_floating_point(self) -> bool:
        return self.tensor.is_floating_point()

    # torch.fx would record x += y as x = x + y, which other names of x do not see.
    def __iadd__(self, other: object) -> fx.Proxy:
        return self._changed(operator.iadd, other)

    def __isub__(self, other: object) -> fx.Proxy:
        return self._changed(operator.isub, other)

    def __imul__(self, other: object) -> fx.Proxy:
        return self._changed(operator.imul, other)

    def __itruediv__(self, other: object) -> fx.Proxy:
        return self._changed(operator.itruediv, other)

    def __ipow__(self, other: object) -> fx.Proxy:
        return self._changed(operator.ipow, other)

    def _changed(self, function: Target, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    @override
    def __len__(self) -> int:
        assert isinstance(self.value, torch.Tensor | tuple | list), self.node
        return len(self.value)

    @override
    def __iter__(self) -> Iterator[fx.Proxy]:
        return (
            self.tracer.create_proxy("call_function", operator.getitem, (self, i), {})
            for i in range(len(self))
        )


@contextmanager
def accepted_as_tensors() -> Iterator[None]:
    # Only for Python's isinstance: C code would read their memory.
    original = builtins.isinstance

    def is_instance(value: object, kinds: type, /) -> bool:
        if original(value, kinds):
            return True
        return type(value) is FakeTensorProxy and issubclass(value.python_class, kinds)

    builtins.isinstance = is_instance  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.isinstance = original


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape on the meta device; floats become float32."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def run_without_memory(
    module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> object:
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
    """Return the result of `module`, run for real on a few samples of noise.

    Args:
        module: The module; it is not changed.
        arguments: Tensors without memory among them are replaced by noise.
        keywords: Keyword arguments, treated the same way.
        batch: Extent of the batch in them, and in the result.

    Raises:
        GraphError: The module's own tensors have no values.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if any(tensor.is_meta for _, tensor in tensors):
        raise GraphError("its result depends on values, and its tensors are on the meta device")
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
    # Running statistics may change.
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
