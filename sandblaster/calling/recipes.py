"""How to build a module again in another process: its classes, and their arguments.

A module does not tell what it was built with, but most keep each argument under its own
name, as all of torch's layers do: Linear(in_features=4, out_features=3, bias=False).
`recipe_of` collects them, builds the module again, and compares the two in all that can
be compared: names, shapes and types of tensors, how they print, every plain attribute
of every layer. If they differ in anything, the module is refused.
"""

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.runtime.task.imports import call_factory
from sandblaster.calling.sources import import_path


Recipe = dict[str, object]
_NOT_ASKED_FOR = {"self", "device", "dtype"}
_PLAIN = (bool, int, float, str)


def build(recipe: Recipe, dtype: str) -> nn.Module:
    """Return the module of a recipe: the factory of job files."""
    return _build(recipe).to(getattr(torch, dtype))


def recipe_of(module: nn.Module) -> dict[str, object]:
    """Return the arguments of `build` that make a module like this one.

    Raises:
        JobError: it cannot be built again from what it tells of itself.
    """
    floats = {t.dtype for t in module.state_dict().values() if t.is_floating_point()}
    if len(floats) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in floats))
        raise _refusal(module, f"it has tensors of several types ({names})")
    dtype = str(next(iter(floats), torch.get_default_dtype())).removeprefix("torch.")
    recipe = _recipe(module)
    try:
        with torch.random.fork_rng(devices=[]):
            again = build(recipe, dtype)
    except JobError as error:
        raise _refusal(module, str(error)) from None
    difference = _difference(module, again)
    if difference is not None:
        raise _refusal(module, f"built again it differs: {difference}")
    return {"recipe": recipe, "dtype": dtype}


def _recipe(module: nn.Module) -> Recipe:
    if type(module) is nn.Sequential:
        layers = [[name, _recipe(layer)] for name, layer in module.named_children()]
        return {"layers": layers}
    kind = type(module)
    path = import_path(kind, what="a layer of the model:")
    arguments: dict[str, object] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        variable = parameter.kind in {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }
        if name in _NOT_ASKED_FOR or variable:
            continue
        default: object = parameter.default
        if hasattr(module, name):
            value = _value(getattr(module, name), default, of=module, name=name)
            if value is not None:
                arguments[name] = value
        elif default is inspect.Parameter.empty:
            raise _refusal(module, f"{kind.__name__} does not keep its {name!r}")
    return {"class": path, "arguments": arguments}


def _value(value: object, default: object, *, of: nn.Module, name: str) -> object | None:
    """Return an argument as plain data; None: leave it out, its default is meant."""
    if isinstance(default, bool) and not isinstance(value, bool):
        value = value is not None  # "bias" is asked for as a bool, kept as a tensor
    if value is None and default is None:
        return None
    plain = list(value) if isinstance(value, tuple) else value
    items = plain if isinstance(plain, list) else [plain]
    if not all(isinstance(item, _PLAIN) for item in items):
        raise _refusal(of, f"argument {name!r} of {type(of).__name__} is {value!r}")
    return None if value == default else plain


def _build(recipe: Mapping[str, object]) -> nn.Module:
    if "layers" in recipe:
        layers = cast("list[tuple[str, Recipe]]", recipe["layers"])
        return nn.Sequential(OrderedDict((name, _build(one)) for name, one in layers))
    path, arguments = cast("str", recipe["class"]), recipe["arguments"]
    made = call_factory(path, cast("Recipe", arguments), table="model")
    if not isinstance(made, nn.Module):
        raise JobError(f"{path} made {made!r}, not an nn.Module")
    return made


def _difference(module: nn.Module, again: nn.Module) -> str | None:
    if repr(module) != repr(again):
        return f"{again!r}"
    tensors, others = module.state_dict(), again.state_dict()
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if shapes != {name: (tuple(t.shape), t.dtype) for name, t in others.items()}:
        return "its tensors have other names, shapes or types"
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    if trained != {name: p.requires_grad for name, p in again.named_parameters()}:
        return "other parameters are trained"
    for (name, one), other in zip(module.named_modules(), again.modules(), strict=True):
        if _attributes(one) != _attributes(other):
            return f"attributes of {name or 'the module itself'}"
    return None


def _attributes(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (*_PLAIN, tuple)) and name != "training"
    }


def _refusal(module: nn.Module, why: str) -> JobError:
    return JobError(
        f"minimize: this {type(module).__name__} cannot be built again in another "
        f"process: {why}. Give the function that made it instead, as functools.partial "
        "with its arguments or as 'package.module:function'"
    )
