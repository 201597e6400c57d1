"""The translations that come with this package; importing this registers them all."""

from distbelief.graph.translations import (
    attention,
    chance,
    choosing,
    functions,
    images,
    layers,
    norms,
    products,
    recurrent,
    reductions,
    shapes,
    slices,
    transformer,
    windows,
)


__all__ = [
    "attention",
    "chance",
    "choosing",
    "functions",
    "images",
    "layers",
    "norms",
    "products",
    "recurrent",
    "reductions",
    "shapes",
    "slices",
    "transformer",
    "windows",
]
