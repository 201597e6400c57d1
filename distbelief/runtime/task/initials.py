"""How torch draws a layer's parameters, as distributions that shards can draw from.

The same distributions as the layers' own `reset_parameters`; not the same numbers,
since torch draws them one after another from one stream, and a shard must draw its part
alone. A tensor whose elements are all equal in the module as built (a norm's weight, a
zero bias, a counter) begins with that value, whatever its layer.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.parameter_server.layout.initial import Initial


def initials_of(module: nn.Module, names: Sequence[str]) -> Mapping[str, Initial]:
    """Return a distribution for each of these tensors of `module`.

    Args:
        module: As its factory made it.
        names: Of parameters and buffers, as `named_parameters` has them.

    Raises:
        JobError: a tensor is not constant, and its layer's rule is not known.
    """
    return {name: _initial(module, name) for name in names}


def _initial(module: nn.Module, name: str) -> Initial:
    owner_name, _, own_name = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    tensor = getattr(owner, own_name)
    assert isinstance(tensor, torch.Tensor), name
    constant = _constant(tensor)
    if constant is not None:
        return Initial(distribution="constant", value=constant)
    bound = _bound(owner, own_name, tensor)
    if bound is not None:
        return Initial(distribution="uniform", low=-bound, high=bound)
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return Initial(distribution="normal", mean=0.0, std=1.0)
    raise JobError(
        f"[model] initial = 'seed' does not know how {type(owner).__name__} draws "
        f"{name!r}: use initial = 'module', or a .safetensors file"
    )


def _constant(tensor: torch.Tensor) -> float | None:
    """Return the value of all elements, if they have one and are more than one."""
    if tensor.numel() == 0:
        return 0.0
    low, high = float(tensor.detach().min()), float(tensor.detach().max())
    return low if low == high and _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """One single drawn number looks constant, and must not be taken for it."""
    return tensor.numel() > 1 or float(tensor.detach().reshape(-1)[0]).is_integer()


def _bound(owner: nn.Module, name: str, tensor: torch.Tensor) -> float | None:
    """Return b where `owner` draws this tensor uniformly from [-b, b]."""
    match owner:
        case nn.Linear() | nn.Bilinear():
            return 1.0 / math.sqrt(owner.weight.shape[1])
        case nn.modules.conv._ConvNd():  # noqa: SLF001 -- the only name they share
            fan_in = owner.weight.shape[1] * math.prod(owner.kernel_size)
            return 1.0 / math.sqrt(fan_in)
        case nn.RNNBase() | nn.RNNCellBase():
            return 1.0 / math.sqrt(owner.hidden_size)
        case nn.MultiheadAttention() if tensor.ndim == 2 and name.endswith("_weight"):
            # Xavier's (Glorot & Bengio 2010), over what was stacked into one.
            return math.sqrt(6.0 / (tensor.shape[0] + tensor.shape[1]))
        case _:
            return None
