"""This host as a cluster of machines like it: figures measured once and kept in its profile.

    flops        a large matrix product, with torch's number of threads
    memory rate  a large copy: every byte is read once and written once
    message rate numbers through the loopback network, both ends in one thread
    overhead     a layer with almost no work, forward or backward
    jitter       spread of the times of that product
    memory       of this machine, or of the container

A short probe shows whether the profile still holds. The network between machines is not measured.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple, final

import msgspec
import torch
from torch.nn import functional

from distbelief.core import units
from distbelief.core.errors import StorageError
from distbelief.graph.graph import GraphError
from distbelief.plans.cluster import Cluster, Machine
from distbelief.plans.cluster_file import N_MACHINES_MAX
from distbelief.plans.planner.profile import Figures, Profile, add, load, this_host
from distbelief.plans.planner.profiling.layer_timer import busy_seconds, undisturbed


# --- figures: each is the median of short runs after a warm-up, about a second in all ---

HERE: Final = "here"  # name of the cluster

Clock = Callable[[], float]

_N_RUNS: Final = 15
_N_RUNS_MIN: Final = 5
_SECONDS_MAX: Final = 0.8  # per figure, after `_N_RUNS_MIN` runs
_SECONDS_OF_ONE: Final = 0.1  # if only `flops` is measured
# A product takes tens of milliseconds, like a layer: shorter ones vary with every time slice of
# another program.
_WIDTH: Final = 1024
_N_COPIED: Final = 1 << 24  # numbers, 64 MiB: more than caches hold
_N_SENT: Final = 1 << 18  # numbers, 1 MiB: a message
_BLOCK_BYTES: Final = 1 << 16  # sent at a time
_QUARTILES: Final = 1.349  # interquartile range of a normal distribution, in standard deviations
_CONTAINER: Final = Path("/sys/fs/cgroup/memory.max")


@final
class Network(NamedTuple):
    bandwidth: float  # bytes per second that each machine can send, and also receive
    latency: float  # seconds from the end of sending to arrival
    message_overhead: float  # seconds per message at both ends
    handling: float = 0.0  # core seconds per message at each end


# Measured between processes of two cores: 0.17 to 0.24 ms of a core at each end for a message of
# 256 bytes through ZeroMQ and a role
HANDLING: Final = 2e-4

ASSUMED: Final = Network(bandwidth=1.25e8, latency=1e-4, message_overhead=1e-4)


def here(n: int, *, network: Network = ASSUMED, clock: Clock = busy_seconds) -> Cluster:
    """Return n machines like this one; measure it if it has no profile. GraphError for a bad n."""
    if not 1 <= n <= N_MACHINES_MAX:
        raise GraphError(f"machines = {n} for cluster 'here': use 1 to {N_MACHINES_MAX}")
    measured = msgspec.structs.asdict(figures(clock=clock))
    machine = Machine(bandwidth=network.bandwidth, handling=network.handling, **measured)
    return Cluster(
        name=HERE,
        machines=(machine,) * n,
        latency=network.latency,
        message_overhead=network.message_overhead,
        origin="measured",
        note=(
            f"The network is {'assumed' if network == ASSUMED else 'as given'}: "
            f"{units.show(network.bandwidth, 'rate')}, latency {network.latency * 1e6:.0f} us, "
            f"and {network.message_overhead * 1e6:.0f} us of overhead per message."
        ),
    )


def figures(*, clock: Clock = busy_seconds) -> Figures:
    """Return the figures of this host; measure them if its profile has none."""
    known = _known()
    if known is None:
        known = measured(clock=clock)
        add(this_host(), figures=known)
    return known


def flops(*, clock: Clock = busy_seconds) -> float:
    """Return `flops` only: in a few tenths of a second, and not kept."""
    known = _known()
    if known is not None:
        return known.flops
    return 2.0 * _WIDTH**3 / median(_products(clock, seconds_max=_SECONDS_OF_ONE))


def _known() -> Figures | None:
    profile = load(this_host())
    if profile is None or profile.figures is None:
        return None
    # A container of the same processor may have another limit now; looking costs nothing.
    return msgspec.structs.replace(profile.figures, memory=memory())


def measured(*, clock: Clock = busy_seconds) -> Figures:
    with undisturbed():
        products = _products(clock)
        return Figures(
            flops=2.0 * _WIDTH**3 / median(products),
            memory_rate=_memory_rate(clock),
            message_rate=_message_rate(clock),
            memory=memory(),
            overhead=_overhead(clock),
            jitter=spread(products),
        )


def spread(times: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of times, outliers left out.

    That of a normal distribution with the same quartiles: a run disturbed by another program does
    not count.
    """
    low, _, high = quantiles([math.log(seconds) for seconds in times])
    return (high - low) / _QUARTILES


def _products(clock: Clock, *, seconds_max: float = _SECONDS_MAX) -> list[float]:
    one, other = _random(_WIDTH, _WIDTH), _random(_WIDTH, _WIDTH)
    result = torch.empty_like(one)
    return _times(lambda: torch.mm(one, other, out=result), clock, seconds_max=seconds_max)


def _memory_rate(clock: Clock) -> float:
    source = _random(_N_COPIED)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / median(_times(lambda: target.copy_(source), clock))


def _message_rate(clock: Clock) -> float:
    # Bytes per second that one end handles if it does nothing else. One thread is both ends, so
    # nothing waits, and sends through TCP as the transport does. Each message is copied twice more:
    # out of a result, and into an input. It keeps one processor busy; what all processors compute
    # meanwhile takes longer by its share.
    source = _random(_N_SENT)
    target, sent = torch.empty_like(source), bytearray(source.nbytes)
    received = bytearray(source.nbytes)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname(), _SECONDS_MAX)
            other, _ = server.accept()
    except OSError:  # a sandbox may have no network
        one, other = socket.socketpair()

    def exchange() -> None:
        torch.frombuffer(sent, dtype=torch.float32).copy_(source)
        done = 0
        while done < len(sent):
            end = done + one.send(memoryview(sent)[done : done + _BLOCK_BYTES])
            while done < end:
                done += other.recv_into(memoryview(received)[done:end])
        target.copy_(torch.frombuffer(received, dtype=torch.float32))

    with one, other:
        times = _times(exchange, clock)
    n_processors = min(torch.get_num_threads(), os.cpu_count() or 1)
    return n_processors * 2.0 * source.nbytes / median(times)


def _overhead(clock: Clock) -> float:
    # Half the seconds of a forward and backward pass.
    value, weight = (_random(1, 2).requires_grad_() for _ in range(2))
    ones = torch.ones(1, 1, dtype=torch.float32, device="cpu")

    def pass_through() -> None:
        torch.autograd.grad(functional.linear(value, weight), (value, weight), ones)

    return median(_times(pass_through, clock)) / 2


def memory() -> float:
    """Return the bytes of this machine, or of the container."""
    n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or "max": no limit
        n_bytes = min(n_bytes, int(_CONTAINER.read_text(encoding="ascii")))
    return float(n_bytes)


def _times(
    action: Callable[[], object],
    clock: Clock,
    *,
    n_runs: int = _N_RUNS,
    seconds_max: float = _SECONDS_MAX,
) -> list[float]:
    # Fewer runs if they take long.
    action()
    action()
    times: list[float] = []
    while len(times) < min(n_runs, _N_RUNS_MIN) or (
        len(times) < n_runs and sum(times) <= seconds_max
    ):
        began = clock()
        action()
        # A coarse clock may show 0: avoid an infinite speed.
        times.append(max(clock() - began, 1e-9))
    return times


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


# --- probe ---

DIFFERENCE_MAX: Final = 0.25  # share; smaller differences of the probe do not count

_N_PROBE_RUNS: Final = 60
_PROBE_WIDTH: Final = 512  # of the layer: a few milliseconds for 256 samples
_BATCH: Final = 256
_N_PROBE_COPIED: Final = 1 << 22  # numbers, 16 MiB, from one place to another


def recheck(notify: Callable[[str], None]) -> float:
    """Discard the profile of this host if it was measured when the host was slower.

    A profile measured beside other programs would spoil all later plans. If the probe is much
    faster now, the profile is discarded and measured again; if it is much slower, other programs
    may be running now: the profile stays, and the report says so. Return how many times as long
    the probe takes now; 1 if the difference is small.
    """
    host = this_host()
    known = load(host)
    now = seconds()
    if known is None or known.probe is None:
        add(host, probe=now)
        return 1.0
    if known.probe > (1.0 + DIFFERENCE_MAX) * now:
        notify(f"measuring this machine again: it was {known.probe / now:.1f} times as slow before")
        with suppress(StorageError):  # a read-only home keeps the old profile
            Profile(host=host, date=known.date, layers={}, probe=now).save()
    return now / known.probe if now > (1.0 + DIFFERENCE_MAX) * known.probe else 1.0


def seconds(*, clock: Clock = time.perf_counter) -> float:
    """Return how long the probe takes: the median of many runs.

    Half of it is a linear layer, which stays in the caches, half a copy, which does not. The
    minimum would not show that a host is shared: some runs are always undisturbed.
    """
    value, weight = _random(_BATCH, _PROBE_WIDTH), _random(_PROBE_WIDTH, _PROBE_WIDTH)
    source = _random(_N_PROBE_COPIED)
    target = torch.empty_like(source)

    def run() -> None:
        functional.linear(value, weight)
        target.copy_(source)

    with torch.inference_mode():
        return median(_times(run, clock, n_runs=_N_PROBE_RUNS, seconds_max=math.inf))
