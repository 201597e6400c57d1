"""From an `nn.Module` to a layer graph, without any of its numbers.

The module is traced (`tracing`), then run once on tensors without memory (torch's meta
device), so that models larger than this machine can be captured too. Each operation is
translated into layers by the table of its kind (`translation`). What has no translation
is kept whole, with the reason.

The batch is told from other dimensions by its size, a prime that no model uses: every
operation must keep it as the first dimension of its result, for a replica computes all
samples of a batch together, and regions know nothing of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast, final

import torch
from torch import fx, nn
from typing_extensions import override

from distbelief.graph.building import Builder
from distbelief.graph.layer import GraphError, LayerGraph
from distbelief.graph.region import Shape
from distbelief.graph.tracing import trace
from distbelief.graph.translation import (
    Operand,
    Operation,
    Translated,
    knows_module,
    translate_function,
    translate_module,
)


BATCH: Final = 1009


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One input of a model.

    Attributes:
        shape: Without the batch dimension.
        n_values: For whole numbers, how many values there are (words, classes); None
            for floating point.
    """

    shape: Shape
    n_values: int | None = None


def capture(module: nn.Module, inputs: Sequence[InputSpec]) -> LayerGraph:
    """Return the layer graph of `module`.

    Args:
        module: On any device; nothing of it is changed or copied.
        inputs: What its forward takes, in order.

    Raises:
        GraphError: it cannot be traced, takes other inputs, or loses the batch.
    """
    traced = trace(module, is_leaf=knows_module)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    wanted = [node for node in placeholders if not node.args]  # others have a default
    if not len(wanted) <= len(inputs) <= len(placeholders):
        raise GraphError(
            f"{type(module).__name__}.forward takes {len(wanted)} inputs "
            f"({', '.join(node.name for node in wanted)}), but {len(inputs)} shapes "
            "are given"
        )
    builder = Builder(aliases=_aliases(module))
    translator = _Translator(module, traced.graph, builder, whole=traced.whole)
    examples = []
    for node, spec in zip(placeholders, inputs, strict=False):
        name = builder.input(
            node.name, spec.shape, is_integer=spec.n_values is not None
        )
        translator.known[node] = name
        dtype = torch.float32 if spec.n_values is None else torch.int64
        examples.append(torch.empty(BATCH, *spec.shape, dtype=dtype, device="meta"))
    return builder.finish(translator.outputs(examples))


@final
class _Translator(fx.Interpreter):
    """Runs a traced module on meta tensors, and translates what it meets."""

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph,
        builder: Builder,
        *,
        whole: Mapping[str, str],
    ) -> None:
        super().__init__(fx.GraphModule(module, graph))
        self._root = module
        self._graph = graph
        self._builder = builder
        self._whole = whole
        self.known: dict[fx.Node, Translated] = {}

    def outputs(self, examples: Sequence[torch.Tensor]) -> list[str]:
        """Translate everything; return the layers that are the model's outputs."""
        state = {
            **dict(self._root.named_parameters()),
            **dict(self._root.named_buffers()),
        }
        meta = {
            name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
            for name, tensor in state.items()
        }
        runner = _Runner(self)
        torch.func.functional_call(
            runner,
            {f"root.{name}": tensor for name, tensor in meta.items()},
            tuple(examples),
        )
        (output,) = [node for node in self._graph.nodes if node.op == "output"]
        flat: list[fx.Node] = []
        fx.map_arg(output.args, flat.append)
        names = [self.known.get(node) for node in flat]
        if not names or not all(isinstance(name, str) for name in names):
            raise GraphError("the model's outputs must be tensors with a batch")
        return cast("list[str]", names)

    @override
    def run_node(self, n: fx.Node) -> object:
        result: object = super().run_node(n)
        if n.op in {"call_module", "call_function", "call_method"}:
            self._translate(n, result)
        elif n.op == "get_attr":
            self.known[n] = self._tensor(n)
        return result

    def _tensor(self, node: fx.Node) -> Translated:
        raise GraphError(
            f"the forward uses the tensor {node.target!r} directly: put what is done "
            "with it into a module of its own, which is then computed whole"
        )

    def _translate(self, node: fx.Node, result: object) -> None:
        """Make the layers of one operation, if it is about tensors with a batch."""
        arguments = [self._operand(argument) for argument in node.args]
        keywords = {word: self._operand(value) for word, value in node.kwargs.items()}
        if not any(
            isinstance(argument, Operand)
            for argument in (*arguments, *keywords.values(), *_inner(arguments))
        ):
            return  # sizes and other numbers
        if not isinstance(result, torch.Tensor | tuple | list):
            return  # x.size(0), x.dim()
        operation = Operation(
            name=str(node.target) if node.op == "call_module" else node.name,
            target=str(node.target),
            arguments=tuple(arguments),
            keywords=keywords,
            shape=_shape(node, result),
        )
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            reason = self._whole.get(str(node.target))
            self.known[node] = translate_module(
                self._builder, module, operation, whole=reason
            )
        else:
            self.known[node] = translate_function(self._builder, node.target, operation)

    def _operand(self, argument: object) -> object:
        """Return the argument with layers in the place of nodes."""
        if isinstance(argument, fx.Node):
            known = self.known.get(argument)
            if isinstance(known, str):
                layer = self._builder[known]
                return Operand(name=known, shape=layer.shape)
            if isinstance(known, tuple):
                return tuple(
                    Operand(name=name, shape=self._builder[name].shape)
                    for name in known
                )
            return self.env[argument]
        if isinstance(argument, list | tuple):
            return tuple(self._operand(item) for item in argument)
        return argument


@final
class _Runner(nn.Module):
    """Lets the tensors of the root be replaced while an interpreter runs."""

    def __init__(self, translator: _Translator) -> None:
        super().__init__()
        self.root = translator.module
        self._translator = [translator]  # hidden from nn.Module

    @override
    def forward(self, *examples: torch.Tensor) -> object:
        result: object = self._translator[0].run(*examples)
        return result


def _aliases(module: nn.Module) -> dict[str, str]:
    """Return, for tensors with several names, which name stands for each."""
    first: dict[int, str] = {}
    aliases = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return aliases


def _inner(arguments: Sequence[object]) -> list[object]:
    return [
        item
        for argument in arguments
        if isinstance(argument, tuple)
        for item in argument
    ]


def _shape(node: fx.Node, result: object) -> Shape | tuple[Shape, ...]:
    """Return the shape of the result, or of each, without the batch."""
    if isinstance(result, torch.Tensor):
        if not result.dim() or result.shape[0] != BATCH:
            raise GraphError(
                f"{node.target!r} ({node.name}) gives {list(result.shape)}: its "
                "first dimension is not the batch, but a layer must keep samples apart"
            )
        return tuple(result.shape[1:])
    assert isinstance(result, tuple | list)
    return tuple(
        cast("Shape", _shape(node, item))
        for item in result
        if isinstance(item, torch.Tensor)
    )
