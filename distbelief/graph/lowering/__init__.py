"""Lowering rules from operations of torch to layers; importing this package registers them."""

from distbelief.graph.lowering import layers, losses, pointwise, reductions, views, windows


__all__ = ["layers", "losses", "pointwise", "reductions", "views", "windows"]
