"""A module's operations as a graph of torch.fx, whatever its forward looks like.

Modules that have a translation, and torch's own, are kept whole; the user's are traced
through, with stand-ins that know their shapes. A module whose forward cannot be traced
(it branches on its data, or calls a `torch.autograd.Function`, whose gradient tracing
would silently replace) is kept whole as well, with the reason, and tried no further.
What is known of results stands in the nodes, as `tracer` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import fx, nn

from distbelief.graph.layer import GraphError
from distbelief.graph.tracer import Tracer, explained, no_custom_functions


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What tracing a module has come to.

    Attributes:
        graph: Its operations.
        whole: Modules kept whole because they cannot be traced, and why.
    """

    graph: fx.Graph
    whole: dict[str, str] = field(default_factory=dict)


def trace(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    *,
    whole: Mapping[str, str] | None = None,
) -> Traced:
    """Trace `module`.

    Args:
        module: Whose forward takes tensors only.
        inputs: Tensors without memory, the batch first, in the order of the forward's
            arguments; it takes their defaults for the rest.
        whole: Paths of modules that are not to be looked into, and why.

    Raises:
        GraphError: its own forward cannot be traced, or a layer cannot be run on what
            it is given.
    """
    kept = dict(whole or {})
    while True:
        tracer = Tracer(inputs, frozenset(kept))
        try:
            with no_custom_functions(), torch.no_grad():
                graph = tracer.trace(module)
        except GraphError:
            raise
        except Exception as error:  # whatever the user's forward does with a proxy
            path = tracer.innermost
            if not path:
                raise GraphError(
                    f"{type(module).__name__}.forward cannot be traced: "
                    f"{explained(error)}. Move that part into a module of its own, "
                    "which is then computed whole on one machine"
                ) from error
            kept[path] = explained(error)
        else:
            return Traced(graph=graph, whole=kept)
