"""Layers put side by side.

    kind      "cat"
    inputs    any number; their extents differ in dimension `dim` only
    options   dim: without the batch, from 0

    stack_layers(name, sources, *, dim)     reshapes, then cat
"""
