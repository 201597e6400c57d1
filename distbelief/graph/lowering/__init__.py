"""Lowering rules from torch operations to layers; importing this package registers them."""

from distbelief.graph.lowering import attention, layers, pointwise, reductions, views, windows


__all__ = ["attention", "layers", "pointwise", "reductions", "views", "windows"]
