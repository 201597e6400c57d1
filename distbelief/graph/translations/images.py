"""Translations of what image nets are made of besides convolutions.

Our own modules for locally connected nets, and what enlarges maps.
"""

from typing import cast

from torch import nn
from torch.nn import functional

from distbelief.graph.building import Builder, uses
from distbelief.graph.kinds.contrast import LocalContrastNorm2d
from distbelief.graph.kinds.l2_pooling import L2Pool2d
from distbelief.graph.kinds.locally_connected import LocallyConnected2d
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.translation import source_of, translates, translates_function
from distbelief.graph.wholes import whole_module


@translates(LocallyConnected2d)
def locally_connected(
    builder: Builder, module: LocallyConnected2d, operation: Operation
) -> Translated:
    """Add a locally connected layer."""
    return builder.add(
        operation.name,
        "locally_connected",
        operation.inputs,
        operation.output,
        options={"size": module.kernel_size, "stride": module.stride, "padding": module.padding},
        tensors=uses(module, operation.target),
    )


@translates(L2Pool2d)
def l2_pool(builder: Builder, module: L2Pool2d, operation: Operation) -> Translated:
    """Add an L2 pooling."""
    return builder.add(
        operation.name,
        "l2_pool",
        operation.inputs,
        operation.output,
        options={
            "size": module.kernel_size,
            "stride": module.stride,
            "padding": module.padding,
            "epsilon": module.epsilon,
            "gaussian": module.gaussian,
        },
    )


@translates(LocalContrastNorm2d, like_input=True)
def local_contrast(
    builder: Builder, module: LocalContrastNorm2d, operation: Operation
) -> Translated:
    """Add a local contrast normalisation."""
    return builder.add(
        operation.name,
        "local_contrast",
        operation.inputs,
        operation.output,
        options={"size": module.size, "epsilon": module.epsilon},
    )


@translates(nn.Upsample, nn.UpsamplingNearest2d)
def upsample(builder: Builder, module: nn.Upsample, operation: Operation) -> Translated:
    """Add each place several times; other ways to enlarge are computed whole."""
    name = _repeated(builder, operation, module.mode)
    if name is not None:
        return name
    reason = f"enlarging with mode {module.mode!r} to this size has no split rule"
    return whole_module(builder, module, operation, reason=reason)


@translates_function(functional.interpolate)
def interpolate(builder: Builder, operation: Operation) -> Translated:
    """Add each place several times."""
    mode = cast("str", operation.argument(3, "mode", "nearest"))
    name = _repeated(builder, operation, mode)
    if name is None:
        raise GraphError(
            f"{operation.name} with mode {mode!r} to {list(operation.output)} has no "
            "split rule: use nn.Upsample, which is then computed whole"
        )
    return name


def _repeated(builder: Builder, operation: Operation, mode: str) -> str | None:
    """Add (c, h, w) -> (c, h, 1, w, 1) -> (c, h, a, w, b) -> (c, h a, w b)."""
    name, source, (n_channels, *sizes) = source_of(builder, operation)
    extents = source.shape[1:]
    if mode not in {"nearest", "nearest-exact"} or any(
        size % extent for size, extent in zip(sizes, extents, strict=True)
    ):
        return None
    thin, wide = [n_channels], [n_channels]
    for size, extent in zip(sizes, extents, strict=True):
        thin += [extent, 1]
        wide += [extent, size // extent]
    apart = builder.add_layer(reshape_layer(f"{name}.apart", source, shape=tuple(thin)))
    repeated = builder.add(f"{name}.repeated", "expand", [apart], tuple(wide))
    last = reshape_layer(name, builder[repeated], shape=(n_channels, *sizes))
    return builder.add_layer(last)
