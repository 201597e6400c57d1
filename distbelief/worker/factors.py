"""Factors of a model's dense layers: what each got, and the gradient of what it gave.

Only of plain nn.Linear in float32, called once in a backward pass. Whether their product is the
gradient of the weight is not assumed here: a push compares (`parameter_server.client.factored`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, final

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from distbelief.parameter_server.client.factored import Pair


_PLAIN: Final = (torch.Tensor, nn.Parameter)  # subclasses may compute otherwise


def _is_plain(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in _PLAIN
        and tensor.dtype == torch.float32
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not is_functorch_wrapped_tensor(tensor)
    )


@final
class _Call:
    """One call of a layer."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs
        self.errors: torch.Tensor | None = None
        self._n_gradients = 0

    def note(self, gradient: torch.Tensor) -> None:
        # A graph that is kept for a second pass gives two.
        self._n_gradients += 1
        is_one = self._n_gradients == 1 and _is_plain(gradient)
        self.errors = gradient.detach() if is_one else None


@final
class _Layer:
    def __init__(self, n_calls: int) -> None:
        self._n_calls = n_calls  # that may follow each other
        self._calls: list[_Call] = []

    def note(self, module: nn.Module, given: tuple[object, ...], output: object) -> None:
        """Note a call: a forward hook."""
        del module
        if torch.compiler.is_compiling() or not isinstance(output, torch.Tensor):
            return
        inputs = given[0] if given else None
        is_plain = isinstance(inputs, torch.Tensor) and _is_plain(inputs) and _is_plain(output)
        if not (is_plain and output.requires_grad):
            return
        assert isinstance(inputs, torch.Tensor)
        if len(self._calls) <= self._n_calls:  # one more shows that there are too many
            self._calls.append(_Call(inputs.detach()))
            output.register_hook(self._calls[-1].note)

    def take(self) -> Pair | None:
        calls, self._calls = self._calls, []
        found = [(one.errors, one.inputs) for one in calls if one.errors is not None]
        if not 0 < len(found) == len(calls) <= self._n_calls:
            return None
        errors = torch.cat([one.reshape(-1, one.shape[-1]) for one, _ in found])
        inputs = torch.cat([one.reshape(-1, one.shape[-1]) for _, one in found])
        return (errors, inputs) if len(errors) == len(inputs) > 0 else None


@final
class LayerFactors:
    """Collects the factors of one module, by hooks on its layers.

    Where a push is of several backward passes (`n_calls`), factors are those of all, one after the
    other: their product is the sum of the gradients, but for rounding.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: Mapping[str, torch.Tensor],  # of the model, in the order of its items
        *,
        workers: int,  # of the job
        n_calls: int = 1,
    ) -> None:
        self.workers, self.is_sum = workers, n_calls > 1
        items = {id(tensor): item for item, tensor in enumerate(tensors.values())}
        uses = Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
        self._layers: dict[int, _Layer] = {}
        for layer in module.modules():
            # Subclasses, and parametrized layers, may compute otherwise.
            if type(layer) is not nn.Linear or "forward" in vars(layer):
                continue
            weight = layer.weight
            is_own = uses[id(weight)] == 1 and id(weight) in items and weight.requires_grad
            if is_own and _is_plain(weight):
                found = self._layers[items[id(weight)]] = _Layer(n_calls)
                layer.register_forward_hook(found.note)

    def take(self) -> dict[int, Pair]:
        """Return the factors since the last time, by item; of layers that have some."""
        found = {item: layer.take() for item, layer in self._layers.items()}
        return {item: pair for item, pair in found.items() if pair is not None}


@final
class SummedFactors:
    """Factors of copies of a module, of the small batches whose gradients are summed."""

    is_sum = True

    def __init__(self, copies: Sequence[LayerFactors]) -> None:
        self.workers = copies[0].workers
        self._copies = copies
        self._found: list[list[dict[int, Pair]]] = [[] for _ in copies]

    def note(self, copy: int, *, counts: bool) -> None:
        """A copy has a gradient, which is skipped unless it `counts`; in the copy's thread."""
        pairs = self._copies[copy].take()
        if counts:
            self._found[copy].append(pairs)

    def take(self) -> dict[int, Pair]:
        """Return the factors of all small batches since the last time, by item."""
        found = [pairs for of_copy in self._found for pairs in of_copy]
        for of_copy in self._found:
            of_copy.clear()
        whole = set.intersection(*map(set, found)) if found else set()
        stacked: dict[int, Pair] = {}
        for item in whole:
            errors, inputs = zip(*(pairs[item] for pairs in found), strict=True)
            stacked[item] = torch.cat(errors), torch.cat(inputs)
        return stacked
