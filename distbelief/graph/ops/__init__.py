"""Operators that can be split; importing this package registers them all."""

from distbelief.graph.ops import (
    attention,
    call,
    dropout,
    experts,
    linear,
    local_norms,
    locally_connected,
    losses,
    norms,
    opaque,
    reductions,
    views,
    windows,
)


__all__ = [
    "attention",
    "call",
    "dropout",
    "experts",
    "linear",
    "local_norms",
    "locally_connected",
    "losses",
    "norms",
    "opaque",
    "reductions",
    "views",
    "windows",
]
