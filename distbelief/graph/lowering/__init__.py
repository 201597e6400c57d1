"""Lowering rules from operations of torch to layers; importing this package registers them."""

from distbelief.graph.lowering import layers, pointwise, reductions, views, windows


__all__ = ["layers", "pointwise", "reductions", "views", "windows"]
