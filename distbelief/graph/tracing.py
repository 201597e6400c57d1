"""Traces a module with torch.fx on tensors without memory, so that shapes are known.

torch's modules and those with a lowering rule are leaves; others are traced through. A module
whose forward cannot be traced (it branches on its data, or calls a `torch.autograd.Function`,
whose gradient tracing would silently replace) becomes opaque, with the reason.

A node's `meta` holds: "value" (the result without memory), "changed" (nodes of arguments changed in
place), "constant" (a tensor that the forward made of numbers alone), "detached" (under
`no_grad`), "place" (the user's source line, for messages).
"""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target, map_aggregate, map_arg
from torch.utils import checkpoint
from typing_extensions import override

from distbelief.graph.fake_tensor import (
    FakeTensorProxy,
    accepted_as_tensors,
    run_on_noise,
    run_without_memory,
    without_memory,
)
from distbelief.graph.graph import GraphError
from distbelief.graph.lowering.registry import is_like_input, knows_module
from distbelief.graph.unsupported import (
    LostChangeError,
    UnsupportedError,
    Watch,
    has_gradient_hooks,
    is_replaced,
    tensors_kept,
)


_OURS: Final = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
# torch.fx could record source lines too, but imports compilers for it, which takes seconds.

# Name of a model that is traced or exported inside a wrapper.
ONLY: Final = "only"

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@final
class CustomFunctionError(Exception):
    """A `torch.autograd.Function` would be traced through."""


@final
class Tracer(fx.Tracer):
    """Traces one module once.

    Args:
        inputs: Arguments of its forward, without memory.
        whole: Paths of modules that stay opaque.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], whole: frozenset[str]) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self._inputs = inputs
        self._whole = whole
        self._evaluating = False
        self._watch: Watch | None = None  # set when the forward begins
        self.innermost = ""  # the innermost module whose forward is running

    @override
    def trace(self, root: object, concrete_args: object = None) -> fx.Graph:
        assert isinstance(root, nn.Module)
        self._watch = Watch(root)
        graph = super().trace(root, concrete_args)  # type: ignore[arg-type] # none
        self._watch.check(str)
        return graph

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._whole or is_leaf(m)

    @override
    def call_module(
        self, m: nn.Module, forward: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        assert callable(forward)
        if self._evaluating:
            return forward(*args, **kwargs)
        before = self.innermost
        self._check()
        path = self.path_of_module(m)
        if not self.is_leaf_module(m, path):  # errors in a leaf are blamed on its caller
            self.innermost = path
        result: object = super().call_module(m, forward, args, kwargs)
        self._check()
        self.innermost = before  # kept after an error, to tell where it was
        return result

    @override
    def getattr(
        self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]
    ) -> object:
        if self._evaluating:
            return attr_val
        result: object = super().getattr(attr, attr_val, parameter_proxy_cache)
        return result

    @override
    def create_args_for_root(
        self, root_fn: object, is_module: bool, concrete_args: object = None
    ) -> tuple[object, list[object]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._inputs]
        return root_fn, [self.root, *proxies]

    @override
    def create_arg(self, a: object) -> Argument:
        if isinstance(a, fx.Proxy):  # first, because a proxy claims to be a tensor
            return a.node
        if not isinstance(a, torch.Tensor):
            return super().create_arg(a)
        tensors = {
            id(tensor): name
            for name, tensor in (*self.root.named_parameters(), *self.root.named_buffers())
        }
        node = self.create_node("get_attr", tensors.get(id(a), "constant"), (), {})
        node.meta["value"] = without_memory(a)
        if id(a) not in tensors:
            if a.requires_grad:
                raise UnsupportedError(
                    "it uses parameters outside of its attributes, for example in a "
                    f"list{_place()}: use nn.ParameterList"
                )
            node.meta["constant"] = a
        return node

    @override
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return FakeTensorProxy(node, self)

    @override
    def create_proxy(
        self,
        kind: str,
        target: Target,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *more: object,
        **others: object,
    ) -> fx.Proxy:
        self._check()
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **others)  # type: ignore[arg-type]
        node = proxy.node
        read = [n for n in node.all_input_nodes if _is_tensor(n)]
        versions = [n.meta["value"]._version for n in read]  # noqa: SLF001 -- counts changes in place
        node.meta["place"] = _place()
        node.meta["detached"] = not torch.is_grad_enabled() and kind != "get_attr"
        self._evaluating = True
        try:
            with torch.no_grad():
                node.meta["value"] = self._value(node)
        except AttributeError as error:  # torch.fx would ask for it again for ever
            raise UnsupportedError(f"{error}{node.meta['place']}") from error
        finally:
            self._evaluating = False
        node.meta["changed"] = [
            n
            for n, version in zip(read, versions, strict=True)
            if n.meta["value"]._version != version  # noqa: SLF001
        ]
        return proxy

    def _check(self) -> None:
        # Effects that no node records, such as random numbers.
        assert self._watch is not None
        self._watch.check(_place)

    def _value(self, node: fx.Node) -> object:
        target = node.target
        args, kwargs = _without_memory(node.args), _without_memory(node.kwargs)
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        if node.op == "placeholder":
            return self._inputs[str(target)]
        if node.op == "get_attr":
            return without_memory(_tensor_at(self.root, str(target)))
        if node.op == "call_module":
            with torch.random.fork_rng(devices=[]):  # a leaf may draw random numbers
                result = self._called(self.root.get_submodule(str(target)), node)
            assert self._watch is not None
            self._watch.check_seeds(_place)
            return result
        if node.op == "call_method":
            return getattr(args[0], str(target))(*args[1:], **kwargs)
        assert callable(target), node
        return target(*args, **kwargs)

    def _called(self, module: nn.Module, node: fx.Node) -> object:
        args, kwargs = _without_memory(node.args), _without_memory(node.kwargs)
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        given_to_it = (*args, *kwargs.values())
        tensors = [value for value in given_to_it if isinstance(value, torch.Tensor)]
        if tensors and is_like_input(module):
            return torch.empty_like(tensors[0])
        try:
            _check_numbers(module, tensors)
            return run_without_memory(module, args, kwargs)
        except LostChangeError as error:
            raise GraphError(f"{_called_name(node, module)}: {error}") from error
        except Exception as error:  # noqa: BLE001 -- a module may raise anything on tensors without values
            batch = next(iter(self._inputs.values())).shape[0]
            try:
                return run_on_noise(module, args, kwargs, batch=batch)
            except LostChangeError as lost:
                raise GraphError(f"{_called_name(node, module)}: {lost}") from lost
            except Exception as second:  # noqa: BLE001
                shapes = [
                    "[" + ", ".join(["batch", *map(str, value.shape[1:])]) + "]"
                    for value in tensors
                ]
                # If the first run lacked values, the second error says why there are none.
                missing = isinstance(error, NotImplementedError) or "meta" in str(error)
                given = isinstance(second, GraphError) and missing
                reason = second if given else error
                why = explained(reason).replace(str(batch), "batch").rstrip(".")
                hint = _ONE_WAY if given else _hint(module, tensors)
                raise GraphError(
                    f"{_called_name(node, module)} cannot be run on "
                    f"{', '.join(shapes)}: {why}{hint}"
                ) from error


def _called_name(node: fx.Node, module: nn.Module) -> str:
    # The model itself by its type.
    kind = type(module).__name__
    return kind if node.target == ONLY else f"{node.target} ({kind})"


_ONE_WAY: Final = (
    ". Make it independent of values (torch.where), or compute the model in one process"
)


def _check_numbers(module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    # On the meta device torch accepts integers that it rejects elsewhere.
    own = list(module.parameters(recurse=False))
    looks_up = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if not own or looks_up or not type(module).__module__.startswith("torch."):
        return
    if tensors and not tensors[0].is_floating_point():
        raise TypeError(f"its tensors are {own[0].dtype}, its input is {tensors[0].dtype}")


def _hint(module: nn.Module, tensors: Sequence[torch.Tensor]) -> str:
    wants_words = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if wants_words and any(tensor.is_floating_point() for tensor in tensors):
        return (
            ". It needs integers but gets floats: give the number of values (--input "
            "128:30000), or an example with integers"
        )
    if not wants_words and any(not tensor.is_floating_point() for tensor in tensors):
        return ". It gets integers: embed them first, or give the input as floats"
    return ". Is the shape of the input right?"


def _place() -> str:
    # The innermost frame that is neither torch's nor this package's.
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if not path.startswith(_OURS):
            return f' (File "{path}", line {line})'
    return ""


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is not traced through: torch's, or one with a rule."""
    if is_replaced(module):
        return False
    of_torch = type(module).__module__.partition(".")[0] == "torch"
    return knows_module(module) or (of_torch and not isinstance(module, _CONTAINERS))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("value"), torch.Tensor)


def _tensor_at(root: nn.Module, path: str) -> torch.Tensor:
    parent, _, name = path.rpartition(".")
    found = getattr(root.get_submodule(parent), name)
    assert isinstance(found, torch.Tensor), path
    return found


def _without_memory(arguments: object) -> object:

    def placed(value: object) -> object:
        return torch.device("meta") if isinstance(value, torch.device) else value

    # In this order: the other one would turn torch.topk's named result into a plain tuple.
    moved = map_aggregate(arguments, placed)  # type: ignore[arg-type,type-var]
    result: object = map_arg(moved, lambda node: node.meta["value"])  # type: ignore[type-var]
    return result


def _is_fake(value: object) -> bool:
    return isinstance(value, fx.Proxy)


@contextmanager
def no_custom_functions(refused: Callable[[object], bool] = _is_fake) -> Iterator[None]:
    """Let no `torch.autograd.Function` be inlined: its backward would be lost.

    Args:
        refused: Whether an argument of it is being traced.
    """
    original = torch.autograd.Function.__dict__.get("apply")
    assert isinstance(original, classmethod)

    def refuse(cls: type, /, *args: object, **kwargs: object) -> object:
        if any(refused(value) for value in (*args, *kwargs.values())):
            raise CustomFunctionError(cls.__qualname__)
        return original.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign, assignment]


def explained(error: Exception) -> str:
    """Return in one sentence why something cannot be traced."""
    if isinstance(error, CustomFunctionError):
        return f"it calls {error}, a torch.autograd.Function with its own gradient"
    if isinstance(error, fx.proxy.TraceError):
        return "its forward depends on the values of its data (an `if`, a loop)"
    if isinstance(error, GraphError | UnsupportedError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


_GRADIENT_HOOKS: Final = "it has hooks on its gradients, so it cannot be split"


@final
class UntracedRootError(Exception):
    """The model's own forward cannot be traced."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The result of tracing a module."""

    graph: fx.Graph  # its operations
    # Opaque modules that cannot be traced, and why.
    whole: dict[str, str] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()  # those of them that torch.export has captured


def trace(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], *, whole: Mapping[str, str] | None = None
) -> Traced:
    """Trace `module`.

    Args:
        module: Its forward takes tensors only.
        inputs: Tensors without memory, the batch first, in the order of the forward's parameters;
            further parameters keep their defaults.
        whole: Paths of modules that stay opaque, and why.

    Raises:
        UntracedRootError: Its own forward cannot be traced.
        GraphError: A layer cannot be run on its input.
    """
    kept = dict(whole or {})
    for path, part in module.named_modules():
        if path and has_gradient_hooks(part):
            kept.setdefault(path, _GRADIENT_HOOKS)
    while True:
        tracer = Tracer(inputs, frozenset(kept))
        try:
            # Gradients are enabled, so that a no_grad in the forward shows.
            with (
                no_custom_functions(),
                _no_checkpoints(),
                tensors_kept(module),
                accepted_as_tensors(),
                torch.inference_mode(mode=False),
                torch.enable_grad(),
            ):
                graph = tracer.trace(module)
        except GraphError:
            raise
        except Exception as error:  # a forward may do anything with a proxy
            path = tracer.innermost
            if not path or path in kept:  # no further module can become opaque
                raise UntracedRootError(explained(error)) from error
            kept[path] = explained(error)
        else:
            return Traced(graph=graph, whole=kept)


@contextmanager
def _no_checkpoints() -> Iterator[None]:
    # torch.utils.checkpoint would take proxies for tensors and crash the process; what it saves
    # for the backward pass is not needed.
    original = checkpoint._checkpoint_without_reentrant_generator  # noqa: SLF001 -- torch has no public way

    def plain(*_: object, **__: object) -> Iterator[None]:
        yield

    checkpoint._checkpoint_without_reentrant_generator = plain  # noqa: SLF001
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original  # noqa: SLF001
