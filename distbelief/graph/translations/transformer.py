"""Translations of torch's encoder layers: attention, feed-forward, norms."""

from torch import nn
from torch.nn import functional

from distbelief.graph.building import Builder, below
from distbelief.graph.layer import GraphError, Layer
from distbelief.graph.operation import Operand, Operation, Translated
from distbelief.graph.translation import translate_child, translates
from distbelief.graph.translations.attention import attend, masked, with_padding


@translates(nn.TransformerEncoder, like_input=True)
def encoder(builder: Builder, module: nn.TransformerEncoder, operation: Operation) -> Translated:
    """Add its layers, and the norm after them."""
    source = builder[operation.operand(0, "src").name]
    causal, mask = _mask(builder, operation, "mask", (2, 3))
    for index, layer in enumerate(module.layers):
        path = below(operation.target, f"layers.{index}")
        assert isinstance(layer, nn.TransformerEncoderLayer), path
        source = _layer(builder, layer, path, source, of=operation, causal=causal, mask=mask)
    if module.norm is not None:
        path = below(operation.target, "norm")
        source = translate_child(builder, module.norm, path, [source], of=operation)
    return source.name


@translates(nn.TransformerEncoderLayer, like_input=True)
def encoder_layer(
    builder: Builder, module: nn.TransformerEncoderLayer, operation: Operation
) -> Translated:
    """Add attention and feed-forward, with norms before or after."""
    source = builder[operation.operand(0, "src").name]
    causal, mask = _mask(builder, operation, "src_mask", (2, 3))
    return _layer(
        builder, module, operation.target, source, of=operation, causal=causal, mask=mask
    ).name


def _mask(
    builder: Builder, operation: Operation, word: str, places: tuple[int, int]
) -> tuple[bool, Layer | None]:
    padding, hint = places
    causal, mask = masked(builder, operation, operation.argument(1, word))
    if operation.argument(hint, "is_causal", default=False):
        causal, mask = True, None
    given = operation.argument(padding, "src_key_padding_mask")
    return causal, with_padding(builder, operation, mask, given)


def _layer(
    builder: Builder,
    module: nn.TransformerEncoderLayer,
    path: str,
    x: Layer,
    *,
    of: Operation,
    causal: bool,
    mask: Layer | None,
) -> Layer:
    def child(word: str, source: Layer) -> Layer:
        part = getattr(module, word)
        assert isinstance(part, nn.Module), word
        return translate_child(builder, part, below(path, word), [source], of=of)

    def attention(source: Layer) -> Layer:
        own = Operation(
            name=below(path, "self_attn"),
            target=below(path, "self_attn"),
            arguments=(Operand(name=source.name, shape=source.shape),),
            keywords={},
            result=of.result,
            batch=of.batch,
            trains=of.trains and module.self_attn.training,
        )
        sources = (source, source, source)
        name = attend(builder, module.self_attn, own, sources, causal=causal, mask=mask)
        return child("dropout1", builder[name])

    def feed_forward(source: Layer) -> Layer:
        inner = _activated(builder, module, path, child("linear1", source), of=of)
        return child("dropout2", child("linear2", child("dropout", inner)))

    def added(word: str, left: Layer, right: Layer) -> Layer:
        name = builder.add(
            below(path, word),
            "pointwise",
            [left.name, right.name],
            left.shape,
            options={"function": "add"},
        )
        return builder[name]

    if module.norm_first:
        x = added("add1", x, attention(child("norm1", x)))
        return added("add2", x, feed_forward(child("norm2", x)))
    x = child("norm1", added("add1", x, attention(x)))
    return child("norm2", added("add2", x, feed_forward(x)))


def _activated(
    builder: Builder, module: nn.TransformerEncoderLayer, path: str, source: Layer, *, of: Operation
) -> Layer:
    activation: object = module.activation
    if isinstance(activation, nn.Module):
        return translate_child(builder, activation, below(path, "activation"), [source], of=of)
    names: dict[object, str] = {functional.relu: "relu", functional.gelu: "gelu"}
    if activation not in names:
        raise GraphError(
            f"{path}: activation {activation!r} has no split rule: give it as a module"
        )
    name = builder.add(
        below(path, "activation"),
        "pointwise",
        [source.name],
        source.shape,
        options={"function": names[activation]},
    )
    return builder[name]
