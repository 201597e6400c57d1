"""Modules that were altered after they were made: hooks, and forwards replaced.

hooks of a forward        run with `__call__`: traced, or with the whole module
hooks on a gradient       with the whole module only
hooks on a parameter      never: a machine's tensors are its own; refused
a forward of the instance traced like any other
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
