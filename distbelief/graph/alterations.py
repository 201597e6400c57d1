"""Modules that are altered: hooks, forwards replaced, tables that bound themselves.

hooks of a forward        run with `__call__`: traced, or with the whole module
hooks on a gradient       with the whole module only
hooks on a parameter      never: a machine's tensors are its own; refused
a forward of the instance traced like any other
max_norm of an embedding  rewrites rows as they are read, of which shards, who own the
                          parameters, would never know; refused
"""

from torch import nn

from distbelief.graph.layer import GraphError


def has_gradient_hooks(module: nn.Module) -> bool:
    """Return whether hooks are told the gradients of this module's tensors."""
    hooks = (module._backward_hooks, module._backward_pre_hooks)  # noqa: SLF001 -- torch has no public way to ask
    return any(hooks)


def has_hooks(module: nn.Module) -> bool:
    """Return whether anything runs before or after the forward, or its backward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001
    return any(hooks) or has_gradient_hooks(module)


def is_replaced(module: nn.Module) -> bool:
    """Return whether this very module has another forward than its class."""
    return "forward" in vars(module)


def is_altered(module: nn.Module) -> bool:
    """Return whether calling this module does more, or else, than its class says."""
    return has_hooks(module) or is_replaced(module)


def why_whole(module: nn.Module) -> str | None:
    """Return why a module cannot be split although its type could, if so."""
    for path, part in module.named_modules():
        whose = f"its part {path!r}" if path else "it"
        if has_hooks(part):
            return f"{whose} has hooks, which run with the whole module only"
        if is_replaced(part):
            return f"{whose} has a forward of its own, put in the place of its type's"
    return None


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Check that no parameter has hooks.

    Raises:
        GraphError: one has.
    """
    for name, parameter in module.named_parameters():
        later = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or later:  # noqa: SLF001
            raise GraphError(
                f"parameter {name!r} has a hook on its gradient (register_hook), which "
                "would not run: change the gradient in the model's forward instead"
            )


def refuse_bounded_tables(module: nn.Module) -> None:
    """Check that no table rewrites its rows when they are read.

    Raises:
        GraphError: one does.
    """
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm:
            raise GraphError(
                f"{path or 'the model'} is an {type(part).__name__} with max_norm = "
                f"{part.max_norm:g}: it rewrites rows when they are read, and the "
                "parameter server, which owns them, would not know; leave max_norm "
                "out, and bound what is read in the forward (torch.renorm, "
                "functional.normalize)"
            )
