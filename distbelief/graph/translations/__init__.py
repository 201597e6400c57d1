"""The translations that come with this package; importing this registers them all."""

from distbelief.graph.translations import functions, layers


__all__ = ["functions", "layers"]
