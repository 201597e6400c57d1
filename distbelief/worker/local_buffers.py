"""Buffers of one worker: what its steps change there outlives fetches, and is pushed once.

    sent     as the shards know it from this worker: fetched, or pushed
    push     a buffer: its value        a counter: value - sent
    fetch    value := fetched + (value - sent)        if it contains all pushes of this worker
             value stays                              if some are still under way

In the second case it is not known which of them the fetched values contain. So a worker that waits
for no push has statistics of its own after its first fetch, and the shards have the mean of all
workers'.
"""

from collections.abc import Mapping, Sequence
from typing import final

import torch

from distbelief.parameter_server.layout import PartialView


@final
class LocalBuffers:
    """Buffers among a worker's tensors. Used where those change: no install or step runs."""

    def __init__(self, view: PartialView, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        kinds = {item: spec.kind for item, spec in enumerate(view.tensors)}
        self._all = [item for item, kind in kinds.items() if kind != "parameter"]
        self._counters = [item for item, kind in kinds.items() if kind == "counter"]
        # Frozen parameters come once, and are not pushed.
        self.items = [item for item in self._all if view.tensors[item].name not in view.frozen]
        self._sent: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] | None = None  # while an install overwrites them

    def forget(self) -> None:
        """Let the next fetch overwrite everything."""
        self._sent.clear()
        self._held = None

    def hold(self) -> None:
        """Before an install, which may be repeated: keep the values."""
        if self._held is None:
            self._held = {item: self._values[item].clone() for item in self._sent}

    def merge(self, *, contains_pushes: bool) -> None:
        """After an install."""
        held, self._held = self._held or {}, None
        for item in self.items:
            value, own = self._values[item], held.get(item)
            # What is not finite comes from a skipped sample.
            if own is None or not bool(own.isfinite().all()):
                self._sent[item] = value.clone()
                continue
            sent = self._sent[item]
            if not contains_pushes or torch.equal(value, sent):
                value.copy_(own)  # to the bit
                continue
            self._sent[item] = value.clone()
            if not torch.equal(own, sent):
                value += own - sent

    def to_push(self, after: Mapping[int, torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
        """Return what is pushed of each, if the values become `after`."""
        after = after or {}
        pushed = {item: after.get(item, self._values[item]) for item in self._all}
        return pushed | {item: pushed[item] - self._sent[item] for item in self._counters}

    def pushed(self) -> None:
        """What is here now was pushed."""
        for item in self._sent:
            self._sent[item].copy_(self._values[item])


Bindings = Sequence[tuple[torch.nn.Module, str, torch.Tensor]]
"""Buffers of a module: owner, name there, and the tensor that is to stay bound to it."""


def bindings_of(module: torch.nn.Module) -> Bindings:
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]


def bind_again(bindings: Bindings) -> None:
    """Copy the values of buffers that forward has bound to new tensors into the old ones."""
    for owner, name, tensor in bindings:
        bound = owner._buffers[name]  # noqa: SLF001
        if bound is not tensor and bound is not None:
            tensor.copy_(bound)
            owner._buffers[name] = tensor  # noqa: SLF001
