"""Multi-head attention as layers: projections, heads apart, attention, and back.

    x (positions, features) -> linear (positions, heads * size)
        -> reshape (positions, heads, size) -> permute (heads, positions, size)

and so for queries, keys and values. Split by heads, everything up to the last
projection is one machine's own: its rows of the weights, its heads.
"""

from collections.abc import Mapping

from distbelief.graph.kinds.attention import attention_layer
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError, Layer, TensorUse


def multi_head_attention_layers(
    name: str,
    sources: tuple[Layer, Layer, Layer],
    *,
    n_heads: int,
    tensors: Mapping[str, TensorUse],
    causal: bool = False,
    mask: Layer | None = None,
    dropout: float = 0.0,
) -> list[Layer]:
    """Return the layers of `torch.nn.MultiheadAttention`, batch first.

    Args:
        name: Of the last one.
        sources: Query, key and value: (positions, features).
        n_heads: Divides the features.
        tensors: By torch's words: in_proj_weight, or q_proj_weight, k_proj_weight and
            v_proj_weight; in_proj_bias; out_proj.weight; out_proj.bias.
        causal: Whether position i sees positions 0 to i only.
        mask: What is added to the scores, if anything.
        dropout: Of the attention's weights.

    Raises:
        GraphError: it has biases added to keys and values (add_bias_kv).
    """
    if "bias_k" in tensors:
        raise GraphError(f"{name!r}: attention with add_bias_kv has no split rule")
    n_features = tensors["out_proj.weight"].shape[1]
    layers: list[Layer] = []
    heads = []
    for place, (letter, source) in enumerate(zip("qkv", sources, strict=True)):
        n_positions = source.shape[0]
        first = place * n_features
        own = "in_proj_weight" not in tensors
        uses = {"weight": tensors[f"{letter}_proj_weight" if own else "in_proj_weight"]}
        options = {"first_row": 0 if own else first}
        if "in_proj_bias" in tensors:
            uses["bias"] = tensors["in_proj_bias"]
            options["first_row_of_bias"] = first
        projected = Layer(
            name=f"{name}.{letter}",
            kind="linear",
            inputs=(source.name,),
            input_shapes=(source.shape,),
            shape=(n_positions, n_features),
            options=options,
            tensors=uses,
        )
        apart = reshape_layer(
            f"{name}.{letter}.heads", projected, shape=(n_positions, n_heads, n_features // n_heads)
        )
        heads.append(_swapped(f"{name}.{letter}.first", apart))
        layers += [projected, apart, heads[-1]]
    masks = [] if mask is None else [mask]
    attention = attention_layer(
        f"{name}.attention", [*heads, *masks], causal=causal, dropout=dropout
    )
    together = _swapped(f"{name}.positions", attention)
    joined = reshape_layer(f"{name}.joined", together, shape=(together.shape[0], n_features))
    words = {"weight": "out_proj.weight", "bias": "out_proj.bias"}
    out = Layer(
        name=name,
        kind="linear",
        inputs=(joined.name,),
        input_shapes=(joined.shape,),
        shape=(joined.shape[0], tensors["out_proj.weight"].shape[0]),
        tensors={word: tensors[long] for word, long in words.items() if long in tensors},
    )
    return [*layers, attention, together, joined, out]


def _swapped(name: str, source: Layer) -> Layer:
    """Return the layer that swaps the first two of three dimensions."""
    first, second, third = source.shape
    return Layer(
        name=name,
        kind="permute",
        inputs=(source.name,),
        input_shapes=(source.shape,),
        shape=(second, first, third),
        options={"dims": (1, 0, 2)},
    )
