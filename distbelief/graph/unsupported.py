"""Refuses what a graph of operations would lose, and restores what a forward writes.

random numbers             of Python or NumPy: the graph would keep those that were drawn once
attributes                 that the forward writes: restored
hooks on a forward         are traced, or run with an opaque module
hooks on a gradient        run with an opaque module only
hooks on a parameter       never run: an error
a replaced forward         is traced like any other
max_norm of an embedding   would change rows behind the parameter server's back: an error
"""

import random  # noqa: TID251 -- to see whether a forward has used it
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from distbelief.graph.graph import GraphError


def has_gradient_hooks(module: nn.Module) -> bool:
    hooks = (module._backward_hooks, module._backward_pre_hooks)  # noqa: SLF001 -- torch has no public way to ask
    return any(hooks)


def is_replaced(module: nn.Module) -> bool:
    """Return whether the instance's forward differs from its class's."""
    return "forward" in vars(module)


def opaque_reason(module: nn.Module) -> str | None:
    """Return why a module cannot be split although its type could; None if it can."""
    for path, part in module.named_modules():
        whose = f"its part {path!r}" if path else "it"
        if part._forward_hooks or part._forward_pre_hooks or has_gradient_hooks(part):  # noqa: SLF001
            return f"{whose} has hooks, so it cannot be split"
        if is_replaced(part):
            return f"{whose} has a forward that was replaced on the instance"
    return None


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Raise `GraphError` if a parameter has a hook: a rank's tensors are copies without it."""
    for name, parameter in module.named_parameters():
        later = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or later:  # noqa: SLF001
            raise GraphError(
                f"parameter {name!r} has a hook on its gradient (register_hook), which would "
                "not run: change the gradient in the model's forward instead"
            )


def refuse_bounded_tables(module: nn.Module) -> None:
    """Raise `GraphError` for tables with `max_norm`, which rewrite their rows when read."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm:
            raise GraphError(
                f"{path or 'the model'} is an {type(part).__name__} with max_norm = "
                f"{part.max_norm:g}, which rewrites rows without the parameter server: leave it "
                "out, and bound the rows in the forward (torch.renorm)"
            )


def refuse_scripts(module: nn.Module) -> None:
    """Raise `GraphError` for modules of TorchScript: no rank can give them its tensors."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise GraphError(
                f"{path or 'the model'} is compiled by torch.jit.script or trace, which cannot be "
                "split: use the module that it was made from, or one process per replica "
                "(partitions = 1)"
            )


Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


@contextmanager
def no_other_generators(root: nn.Module) -> Iterator[None]:
    """Raise `GraphError` if numbers are drawn from any generator but torch's own meanwhile."""
    before = _states(root)
    yield
    for name, state in _states(root).items():
        if before.get(name, state) != state:
            raise GraphError(
                f"the forward draws random numbers of {name}: the ranks of a replica would draw "
                "different ones: use torch.nn.Dropout, or torch.rand in its own module"
            )


def _states(root: nn.Module) -> dict[str, str]:
    found = {
        "Python's `random`": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state()),  # noqa: NPY002 -- the user's
    }
    for path, part in root.named_modules():
        for word, value in vars(part).items():
            if isinstance(value, Generator):
                found[f"its {f'{path}.{word}'.lstrip('.')!r}"] = repr(_state(value))
    return found


def _state(generator: Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules, whatever a forward writes into them."""
    # Dictionaries, of tensors and of hooks, are changed in place; handles of hooks refer to them.
    # Those that nobody changed are left alone: some cannot be.
    before = [
        (part, dict(vars(part)), {k: dict(v) for k, v in vars(part).items() if isinstance(v, dict)})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes, tables in before:
            vars(part).clear()
            vars(part).update(attributes)
            for name, table in tables.items():
                if _items(attributes[name]) != _items(table):
                    attributes[name].clear()
                    attributes[name].update(table)


def _items(table: Mapping[object, object]) -> list[tuple[object, int]]:
    # Compared by identity: tensors have no plain equality.
    return [(key, id(value)) for key, value in table.items()]


def lost_change(name: str) -> str:
    return (
        f"the forward changes {name!r}, a tensor of the model, in place or by assigning "
        "another: the change would be lost: keep such state outside of the model"
    )
