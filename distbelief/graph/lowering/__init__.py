"""Lowering rules from operations of torch to layers; importing this package registers them."""

from distbelief.graph.lowering import calls, layers, noise, recurrent, reductions, views, windows


__all__ = ["calls", "layers", "noise", "recurrent", "reductions", "views", "windows"]
