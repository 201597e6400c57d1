"""A module's operations as a graph of torch.fx, whatever its forward looks like.

Modules that have a translation, and torch's own, are kept whole; the user's are traced
through, with stand-ins that know their shapes. A module whose forward cannot be traced
(it branches on its data, or calls a `torch.autograd.Function`, whose gradient tracing
would silently replace) is kept whole as well, with the reason, and tried no further.
What is known of results stands in the nodes, as `tracer` says.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import fx, nn
from torch.utils import checkpoint

from distbelief.graph.alterations import has_gradient_hooks
from distbelief.graph.layer import GraphError
from distbelief.graph.stand_in import taken_for_tensors
from distbelief.graph.tracer import Tracer, explained, no_custom_functions
from distbelief.graph.unseen import tensors_kept


_GRADIENT_HOOKS: Final = "it has hooks on its gradients, which run with the whole module only"


@final
class UntracedRootError(Exception):
    """The model's own forward cannot be traced; says why."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What tracing a module has come to.

    Attributes:
        graph: Its operations.
        whole: Modules kept whole because they cannot be traced, and why.
        exported: Of these, the ones that torch.export has looked into after all.
    """

    graph: fx.Graph
    whole: dict[str, str] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()


def trace(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], *, whole: Mapping[str, str] | None = None
) -> Traced:
    """Trace `module`.

    Args:
        module: Whose forward takes tensors only.
        inputs: Tensors without memory, the batch first, in the order of the forward's
            arguments; it takes their defaults for the rest.
        whole: Paths of modules that are not to be looked into, and why.

    Raises:
        UntracedRootError: its own forward cannot be traced.
        GraphError: a layer cannot be run on what it is given.
    """
    kept = dict(whole or {})
    for path, part in module.named_modules():
        if path and has_gradient_hooks(part):
            kept.setdefault(path, _GRADIENT_HOOKS)
    while True:
        tracer = Tracer(inputs, frozenset(kept))
        try:
            # With gradients, so that a no_grad of the forward's is seen.
            with (
                no_custom_functions(),
                _no_checkpoints(),
                tensors_kept(module),
                taken_for_tensors(),
                torch.inference_mode(mode=False),
                torch.enable_grad(),
            ):
                graph = tracer.trace(module)
        except GraphError:
            raise
        except Exception as error:  # whatever the user's forward does with a proxy
            path = tracer.innermost
            if not path or path in kept:  # there is nothing more to keep whole
                raise UntracedRootError(explained(error)) from error
            kept[path] = explained(error)
        else:
            return Traced(graph=graph, whole=kept)


@contextmanager
def _no_checkpoints() -> Iterator[None]:
    """Let `torch.utils.checkpoint` call what it is given, and save nothing.

    What is kept for the backward pass is of no account here, and torch would end the
    process: it takes stand-ins for tensors.
    """
    original = checkpoint._checkpoint_without_reentrant_generator  # noqa: SLF001 -- torch has no public way

    def plain(*_: object, **__: object) -> Iterator[None]:
        yield

    checkpoint._checkpoint_without_reentrant_generator = plain  # noqa: SLF001
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original  # noqa: SLF001
