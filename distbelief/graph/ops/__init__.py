"""Operators that can be split; importing this package registers them all."""

from distbelief.graph.ops import (
    attention as attention,
    call as call,
    dropout as dropout,
    experts as experts,
    linear as linear,
    local_norms as local_norms,
    locally_connected as locally_connected,
    loss_layers as loss_layers,
    norms as norms,
    recurrent as recurrent,
    reductions as reductions,
    views as views,
    windows as windows,
)
