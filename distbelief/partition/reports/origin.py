"""Where costs are from: measured or assumed, which machine, when; in a sentence."""

from typing import Final

from distbelief.graph.layer import INPUT
from distbelief.partition.planning import Order
from distbelief.partition.profiling.measuring import is_too_large
from distbelief.partition.profiling.profiled_costs import ProfiledCosts
from distbelief.program.cluster import Cluster


LOAD_MAX: Final = 1.5
"""Programs per processor above which measurements are not to be trusted."""


def origin(order: Order) -> str:
    """Say it, for below the table and for the plan."""
    cluster, costs = order.cluster, order.costs
    if isinstance(costs, ProfiledCosts):
        said = f"{_profiled(costs, cluster)}{_left(order, costs)}."
        if costs.profile.replaced:
            said += (
                " It replaced a profile from when this host was "
                f"{costs.profile.replaced:.1f} times as slow."
            )
        if costs.slower > 1.0:
            said += (
                f" This host is {costs.slower:.1f} times as slow now as it was then, "
                "perhaps because others use it: to measure again, delete "
                f"{costs.profile.host.path}."
            )
        if costs.profile.load > LOAD_MAX:
            said += (
                f" Others used this host meanwhile ({costs.profile.load:.1f} programs "
                "per processor), so times may be too long: to measure again, delete "
                f"{costs.profile.host.path}."
            )
    else:
        said = f"Costs: {cluster.origin} figures of cluster {cluster.name!r}, no measured layer."
    return f"{said} {cluster.note}".strip()


def _profiled(costs: ProfiledCosts, cluster: Cluster) -> str:
    profile = costs.profile
    host = profile.host
    threads = "thread" if host.n_threads == 1 else "threads"
    what = "layer times" if costs.is_absolute else "layer efficiency"
    machines = (
        "machines like it" if costs.is_absolute else f"machines from cluster {cluster.name!r}"
    )
    return (
        f"Costs: {what} from profile of {profile.date[:10]} on this host "
        f"({host.processor}, {host.n_threads} {threads}; measured), {machines} "
        f"({cluster.origin})"
    )


def _left(order: Order, costs: ProfiledCosts) -> str:
    """Say how many layers are left to arithmetic, and why."""
    layers = [layer for layer in order.graph.layers if layer.kind != INPUT]
    unknown = [layer for layer in layers if not costs.knows(layer)]
    if not unknown:
        return ""
    n_large = sum(is_too_large(layer, batch=order.batch) for layer in unknown)
    reasons = [
        f"{count} {why}"
        for count, why in (
            (n_large, "too large to be measured here"),
            (len(unknown) - n_large, "not measured in time, or at all"),
        )
        if count
    ]
    return f"; {len(unknown)} of {len(layers)} layers by arithmetic: " + ", ".join(reasons)
