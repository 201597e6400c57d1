"""Makes a call of a module one operation of the exported graph.

Modules with a split rule of their own, and opaque ones, are such leaves: while torch.export runs,
their forwards are replaced by a custom operation that gets the tensors of the call and the key of
everything else.
"""

import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce, wraps
from itertools import count
from types import NoneType
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from distbelief.graph.graph import GraphError, below
from distbelief.graph.unsupported import (
    Attributes,
    Change,
    Reading,
    RememberedError,
    attributes_kept,
    lost_change,
    opaque_reason,
    refuse_progress,
)


LEAF: Final = "distbelief::leaf"
EXPERTS: Final = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_PLAIN: Final = (NoneType, bool, int, float, str, torch.dtype, torch.device, torch.SymInt)
_LIBRARY: Final = torch.library.Library("distbelief", "DEF")
_LIBRARY.define("leaf(Tensor[] inputs, int key) -> Tensor[]")
N_TRIED: Final = 3  # samples of noise for a module that needs values
N_WITHOUT_MEMORY: Final = 1009  # a prime that no model uses


@final
class LeafCall:
    """One call of the leaf module at `path`; `arguments` are positional and keyword arguments."""

    def __init__(self, module: nn.Module, path: str, arguments: object, hooks: "_Hooks") -> None:
        self.module = module
        self.path = path
        self.hooks = hooks
        self.operations = 0.0  # floating point operations for one sample, if known
        self.shapes_found: list[tuple[int, ...]] = []  # extents of the batch are symbols
        self._returned: object = None
        self._given = arguments
        leaves = pytree.tree_leaves(arguments)
        self.tensors = [value for value in leaves if isinstance(value, torch.Tensor)]

    def arguments(self, tensors: Sequence[object]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors in their places."""
        arguments, keywords = _with(self._given, tensors)
        return list(arguments), dict(keywords)

    def check_arguments(self) -> None:
        """Raise `OpaqueError` for the caller if an argument may hide a tensor."""
        # A packed sequence has no row for each sample.
        for given in pytree.tree_leaves(self._given, is_leaf=_is_packed):
            if not isinstance(given, (torch.Tensor, *_PLAIN)):
                raise OpaqueError(
                    self.path.rpartition(".")[0],
                    f"its part {self.path} cannot be split and gets an object of type "
                    f"{type(given).__name__}, which cannot be sent",
                )

    def result(self, tensors: Sequence[object]) -> object:
        return _with(self._returned, tensors)

    def shapes(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors like the result's, for fake inputs."""
        if is_experts(self.module):  # its result is like its tokens; running it may take long
            self._returned, self.shapes_found = inputs[0], [tuple(inputs[0].shape)]
            return [torch.empty_like(inputs[0])]
        symbols = (n for x in inputs for n in x.shape if type(n) is not int)
        extent: Any = next(symbols, 1)
        batch = extent if type(extent) is int else extent // n_samples_in(extent, 1)
        # A thread of its own has none of the modes that torch.export has set in this one.
        with ThreadPoolExecutor(1) as thread:
            for device, n_samples in (("meta", N_WITHOUT_MEMORY), ("cpu", N_TRIED)):
                try:
                    run = thread.submit(self._run, inputs, n_samples, torch.device(device))
                    self._returned = run.result()
                    break
                except (LostChangeError, RememberedError):
                    raise
                except Exception as error:  # a forward that needs values may raise anything
                    if device == "cpu":
                        raise GraphError(self._refusal(inputs, error)) from error
        leaves = pytree.tree_leaves(self._returned)
        found = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.shapes_found = [
            tuple(
                batch * (n // n_samples) if i in _samples(x, n_samples) else n
                for i, n in enumerate(x.shape)
            )
            for x in found
        ]
        floats = next((x.dtype for x in inputs if x.is_floating_point()), torch.float32)
        return [
            torch.empty(
                shape, dtype=floats if x.is_floating_point() else x.dtype, device=inputs[0].device
            )
            for shape, x in zip(self.shapes_found, found, strict=True)
        ]

    def _refusal(self, inputs: Sequence[torch.Tensor], error: Exception) -> str:
        kind = type(self.module).__name__
        shapes = ", ".join(
            "x".join(str(n) if type(n) is int else "batch" for n in x.shape) for x in inputs
        )
        wants_words = isinstance(self.module, nn.Embedding | nn.EmbeddingBag)
        hint = f"Is the shape of the input right, for any number of samples ({N_TRIED} here)?"
        embeds = not wants_words and any(
            isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in self.module.modules()
        )
        if not embeds and any(x.is_floating_point() == wants_words for x in inputs):
            hint = "It gets integers: embed them first, or give the input as floats"
            if wants_words:
                hint = (
                    "It needs integers but gets floats: give the number of values (--input "
                    "128:30000), or an example with integers"
                )
        why = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        why = why if type(error) is RuntimeError and why else f"{type(error).__name__}: {why}"
        what = f"{self.path} ({kind})" if self.path else kind
        return f"{what} cannot be run on {shapes}: {why}. {hint}"

    def _run(self, inputs: Sequence[torch.Tensor], n_samples: int, device: torch.device) -> object:
        # On zeros in place of the module's tensors; without memory, or for real on a few samples.
        def like(x: torch.Tensor, *, is_input: bool, has_gradient: bool = False) -> torch.Tensor:
            shape = [n_samples_in(n, n_samples) for n in x.shape]
            dtype = torch.float32 if x.is_floating_point() else x.dtype
            dtype = torch.complex64 if x.is_complex() else dtype
            made = torch.zeros(shape, dtype=dtype, device=device)
            if is_input and x.is_floating_point() and device.type != "meta":
                made.uniform_()
            # A copy of a leaf may be changed in place, as the output of a layer may.
            return made.requires_grad_().clone() if has_gradient else made

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            state = {
                name: like(x, is_input=False).requires_grad_(x.requires_grad)
                for name, x in (*self.module.named_parameters(), *self.module.named_buffers())
            }
            arguments, keywords = self.arguments(
                [
                    like(x, is_input=True, has_gradient=given.requires_grad)
                    for x, given in zip(inputs, self.tensors, strict=True)
                ]
            )
            before = dict(state)
            counter = FlopCounterMode(display=False)
            # Its hooks on gradients would make torch.autograd.grad fail in the forward.
            counter.mod_tracker = _NoTracker()  # type: ignore[assignment] # it is all that is asked for
            # Ranks run it without compiling; a forward may ask.
            is_eager = patch.multiple(
                torch.compiler, _is_compiling_flag=False, _is_exporting_flag=False
            )
            # torch.export replaces `__call__` to count calls of modules; this one is only for
            # shapes, and `_call_impl` is what it replaced.
            plain_calls = patch.object(nn.Module, "__call__", nn.Module._call_impl)  # noqa: SLF001

            def called(kept: Sequence[Change] = ()) -> tuple[object, list[Change]]:
                attributes = Attributes(self.module)
                data = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
                reading = Reading(data, state.values(), kept)
                with plain_calls, is_eager, counter, (writes := _Writes()), reading:
                    result: object = functional_call(self.module, state, tuple(arguments), keywords)
                self.operations = counter.get_total_flops() / n_samples
                _refuse_change(self.path, self.module, before, state, writes.storages)
                return result, reading.left(attributes.changes())

            with attributes_kept(self.module):
                result, left = called()
                if left:  # it runs for real on ranks, which call it at other times
                    _, again = called(left)
                    refuse_progress(left, again)
            return result


@final
class _Writes(TorchDispatchMode):
    # Notes what operations change in place, also where they do not count it.

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types here
        self.storages: set[int] = set()

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        for argument, given in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001 -- torch's own name
            if argument.is_write and isinstance(given, torch.Tensor):
                self.storages.add(given.untyped_storage()._cdata)  # noqa: SLF001 -- as above
        return func(*args, **(kwargs or {}))


def _is_packed(given: object) -> bool:
    return isinstance(given, PackedSequence)


class _NoTracker(nullcontext[None]):
    parents = ("Global",)


def _with(tree: object, tensors: Sequence[object]) -> Any:  # noqa: ANN401 -- a tree
    given = iter(tensors)
    return pytree.tree_map_only(torch.Tensor, lambda _: next(given), tree)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a mixture, as transformers builds them.

    Its tensors have one row for each expert; it returns, for each token, the sum of the experts of
    these numbers times their weights, and computes the first `num_experts`.
    """
    n_experts = getattr(module, "num_experts", None)
    tensors = [*module.parameters(), *module.buffers()]
    rows = {tensor.shape[0] if tensor.dim() > 1 else 0 for tensor in tensors}
    if not isinstance(n_experts, int) or rows != {n_experts}:
        return False
    return tuple(inspect.signature(type(module).forward).parameters)[1:] in EXPERTS


def n_samples_in(extent: Any, n: int) -> int:  # noqa: ANN401 -- an int or a symbol
    """Return an extent for n samples."""
    if type(extent) is int:
        return extent
    expression = extent.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, n)))


def _refuse_change(
    path: str,
    module: nn.Module,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    written: Collection[int],
) -> None:
    # Running statistics may change: `whole` refuses them where they would be lost.
    apart = {
        below(inner, word)
        for inner, part in module.named_modules()
        if isinstance(part, _NormBase)
        for word, _ in (*part.named_buffers(), *part.named_parameters())
    }
    for name, tensor in before.items():
        same = after[name] is tensor and not tensor._version  # noqa: SLF001 -- counts changes in place
        same = same and tensor.untyped_storage()._cdata not in written  # noqa: SLF001 -- as above
        if not same and name not in apart:
            raise LostChangeError(lost_change(below(path, name)))


class LostChangeError(GraphError):
    """An opaque module changes its tensors."""


@final
class OpaqueError(Exception):
    """The module at `path` must be computed whole; "" is the model itself."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def _samples(x: torch.Tensor, n_samples: int) -> Sequence[int]:
    # The dimension that holds the samples; several if it mixes them.
    found = [i for i, n in enumerate(x.shape) if n and not n % n_samples]
    return found if n_samples == N_WITHOUT_MEMORY else found[:1]


_CALLS: Final[dict[int, LeafCall]] = {}  # of running exports: the operation only gets a key
_KEYS: Final = count()
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Hooks = list[tuple[dict[str, Any], dict[str, Any]]]  # attributes of modules, their hooks
_INSIDE: Final[list[nn.Module]] = []  # modules whose shapes are being found


@torch.library.register_fake(LEAF, lib=_LIBRARY)  # type: ignore[untyped-decorator] # torch has no types here
def _leaf(inputs: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    call = _CALLS[key]
    forward = call.module.__dict__.pop("forward", None)
    for attributes, own in call.hooks:
        attributes.update(own)
    _INSIDE.append(call.module)
    try:
        return call.shapes(inputs)
    finally:
        _INSIDE.pop()
        for attributes, own in call.hooks:
            attributes.update({word: OrderedDict() for word in own})
        if forward is not None:
            call.module.__dict__["forward"] = forward


def own_path(path: str) -> str:
    """Return the path in the model of what torch.export names with its wrapper, "inner"."""
    return path.removeprefix("inner").removeprefix(".")


def is_inside() -> bool:
    """Return whether a leaf runs, to find the shapes of its result."""
    return bool(_INSIDE)


def is_outside(value: object) -> bool:
    """Return whether this is a tensor of the exported forward, not of a leaf's."""
    return isinstance(value, torch.Tensor) and not _INSIDE


@contextmanager
def leaves(
    module: nn.Module, calls: dict[int, LeafCall], is_leaf: Callable[[str, nn.Module], bool]
) -> Iterator[None]:
    """Make each call of a leaf one operation; `calls` gets the calls, by the operation's key."""
    above: list[str] = []
    with ExitStack() as stack:
        for child in module.children():  # the wrapper's own attributes tell what was called
            stack.enter_context(attributes_kept(child))
        for path, part in module.named_modules():
            if not path or any(path.startswith(f"{other}.") for other in above):
                continue
            if is_leaf(own_path(path), part):
                above.append(path)
                hooks: _Hooks = []  # an opaque module runs its hooks itself
                for inner in part.modules():
                    attributes = inner.__dict__
                    hooks.append((attributes, {word: attributes[word] for word in _HOOKS}))
                    attributes.update({word: OrderedDict() for word in _HOOKS})
                part.__dict__["forward"] = _forward(part, own_path(path), calls, hooks)
            elif _has_plain_heads(part):
                part.__dict__["forward"] = partial(_attention, part)
        try:
            yield
        finally:
            for key in calls:
                _CALLS.pop(key, None)


@final
class AppliedFunction(nn.Module):
    """Calls a `torch.autograd.Function`, whose own gradient torch.export would not see."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    @override
    def forward(self, *arguments: object, **keywords: object) -> object:
        return self.function.apply(*arguments, **keywords)


def module_at(root: nn.Module, path: str) -> nn.Module:
    """Return the module of a model that a layer names.

    A path with a colon, "package.module:Name", is that of a function with a gradient of its own,
    whose module the model's has imported.
    """
    place, colon, name = path.partition(":")
    if not colon:
        return root.get_submodule(path)
    function = getattr(sys.modules.get(place), name, None)
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise GraphError(f"there is no torch.autograd.Function {path!r} here: import {place}")
    return AppliedFunction(function)


def path_of(function: type, given: Sequence[object]) -> str | None:
    """Return the path by which ranks find a function, for these arguments; None if they cannot."""
    place, name = function.__module__, function.__qualname__
    plain = all(isinstance(one, (torch.Tensor, *_PLAIN)) for one in pytree.tree_leaves(given))
    is_found = getattr(sys.modules.get(place), name, None) is function
    return f"{place}:{name}" if plain and is_found and place != "__main__" else None


def leaf_call(part: nn.Module, path: str, calls: dict[int, LeafCall]) -> Callable[..., object]:
    """Return a function that calls this module as one operation."""
    return _forward(part, path, calls, [])


def _forward(
    part: nn.Module, path: str, calls: dict[int, LeafCall], hooks: _Hooks
) -> Callable[..., object]:
    def forward(*arguments: object, **keywords: object) -> object:
        call = LeafCall(part, path, (arguments, keywords), hooks)
        if not call.tensors:
            raise GraphError(f"{path} is called without a tensor")
        call.check_arguments()
        key = next(_KEYS)
        calls[key] = _CALLS[key] = call
        tensors: list[object] = torch.ops.distbelief.leaf(call.tensors, key)
        return call.result(tensors)

    return wraps(part.forward)(forward)  # so that it has the same signature


# --- attention ---


def _has_plain_heads(part: nn.Module) -> bool:
    if type(part) is not nn.MultiheadAttention or opaque_reason(part) is not None:
        return False
    return part.batch_first and not part.add_zero_attn and part.bias_k is None


def _attention(  # noqa: PLR0913, PLR0917 -- as torch's
    module: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,  # noqa: FBT001, FBT002 -- as torch's
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: FBT001, FBT002 -- as torch's
    is_causal: bool = False,  # noqa: FBT001, FBT002 -- as torch's
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # What the module computes, as operations that are split by heads:
    #
    # x (positions, features) -> linear (positions, heads * size)
    #     -> reshape (positions, heads, size) -> permute (heads, positions, size)
    #
    # Everything up to the last projection stays on one rank: its rows of the weights, its heads.
    joined: torch.Tensor | None = module.in_proj_weight
    weights: Sequence[torch.Tensor] = (
        (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if joined is None
        else joined.chunk(3)
    )
    bias: torch.Tensor | None = module.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    query, key, value = (
        functional.linear(x, w, b).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    masks = []
    if attn_mask is not None:
        by_heads = attn_mask.dim() > 2
        masks.append(attn_mask.unflatten(0, (-1, module.num_heads)) if by_heads else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None])
    added = [
        torch.where(m, -math.inf, 0.0).to(query.dtype) if m.dtype == torch.bool else m
        for m in masks
    ]
    is_causal = is_causal and len(masks) == 1  # the mask is known then
    mask = None if is_causal or not masks else reduce(torch.add, added)
    dropout = module.dropout if module.training else 0.0
    found = functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, is_causal=is_causal
    )
    found = module.out_proj(found.transpose(1, 2).flatten(2))
    if dropout or not need_weights:
        return found, None
    # Dropped from the graph if nobody reads them.
    scores = reduce(torch.add, added, query @ key.mT * query.shape[-1] ** -0.5)
    shares = scores.softmax(-1)
    return found, shares.mean(1) if average_attn_weights else shares


# --- bags of words ---

_embedding_bag: Callable[..., torch.Tensor] = functional.embedding_bag
_BAGS: Final = inspect.signature(_embedding_bag)


def bags(*arguments: object, **keywords: object) -> torch.Tensor:
    """Return what `embedding_bag` returns, by operations that are split if all bags have a size."""
    bound = _BAGS.bind(*arguments, **keywords)
    bound.apply_defaults()
    words, table, *_ = bound.args
    given: dict[str, Any] = bound.arguments
    more = ("offsets", "max_norm", "scale_grad_by_freq", "padding_idx")
    if words.dim() != 2 or any(given[word] not in {None, False} for word in more):
        return _embedding_bag(*arguments, **keywords)
    rows = functional.embedding(words, table)
    if given["per_sample_weights"] is not None:
        rows = rows * given["per_sample_weights"].unsqueeze(-1)
    return rows.max(1).values if given["mode"] == "max" else getattr(rows, given["mode"])(1)


# --- recurrent layers ---

_RECURRENT: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def shapes_of_recurrent_layers() -> Iterator[None]:
    """Give torch.export the shapes of recurrent layers at once.

    torch's own rules compute every step on tensors without memory: seconds for a long layer, and
    most of a minute if the samples are its steps, whose number is a symbol then.
    """
    with ExitStack() as stack:
        for name in _RECURRENT:
            operation = getattr(torch.ops.aten, name).input
            # What torch takes in place of its own code, where it has a rule.
            rules = dict.fromkeys(operation.py_kernels, _states)
            stack.enter_context(patch.dict(operation.py_kernels, rules))
            stack.enter_context(patch.object(operation, "_dispatch_cache", {}))
        yield


def _states(x: torch.Tensor, given: Any, params: list[torch.Tensor], *options: Any) -> object:  # noqa: ANN401 -- torch's arguments
    *_, bidirectional, batch_first = options
    last = list(given) if isinstance(given, list | tuple) else [given]
    has_gradient = any(tensor.requires_grad for tensor in (x, *last, *params))

    def like(*shape: Any) -> torch.Tensor:  # noqa: ANN401 -- numbers or symbols
        # A copy of a leaf may be changed in place.
        return x.new_empty(shape).requires_grad_(has_gradient).clone()

    steps, samples = (x.transpose(0, 1) if batch_first else x).shape[:2]
    states = like(steps, samples, last[0].shape[2] * (1 + bidirectional))
    return (states.transpose(0, 1) if batch_first else states, *(like(*h.shape) for h in last))
