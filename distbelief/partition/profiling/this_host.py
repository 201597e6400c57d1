"""Whether what is kept of this host still holds: a short computation says, in a moment.

Who measured a host while others used it would plan with those times for good. So each
profile keeps how long a probe took then. If it takes much shorter now, what was
measured is thrown away, and measured again by those who want it. If it takes much
longer, others may be using the host now: what is kept is kept, and that is remarked.

The probe is a linear layer, which stays in the caches, and a copy, which does not; both
take about as long. The median of many counts. The least does not change where a host is
shared: it is a moment in which nobody was there (1.45 ms of such a layer, whether the
others took 1.6 or 2.9), and what takes a second has no such moment.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple, final

import torch
from torch.nn import functional

from distbelief.core import units
from distbelief.errors import StorageError
from distbelief.graph.graph import GraphError
from distbelief.partition.profiling.layer_timer import busy_seconds, undisturbed
from distbelief.partition.profiling.profile import Figures, Profile, add, load, this_host
from distbelief.program.cluster import Cluster, Machine
from distbelief.program.cluster_file import N_MACHINES_MAX


# This host as a cluster of machines like it: a few figures, measured once and kept.
#
#     flops        a large matrix product, with the threads that torch is set to
#     memory rate  a large copy: every byte is read once and written once
#     message rate numbers through this host's own network, to the same thread
#     overhead     a layer that has nothing to do, forward or backward
#     jitter       how far the times of that product lie apart
#     memory       what this machine has, or this container may use
#
# Each is the median of short runs after some that warm up; all take about a second. With
# one thread that is time of a processor, which others of this machine do not take. Of the
# network nothing is measured: this is one machine.

HERE: Final = "here"
"""What the cluster is called."""

Clock = Callable[[], float]

_N_RUNS: Final = 15
_N_RUNS_MIN: Final = 5
_SECONDS_MAX: Final = 0.8  # of one figure, once it has been run often enough
_SECONDS_OF_ONE: Final = 0.1  # of a figure that somebody waits for
# Of a large matrix. A product takes as long as a layer, tens of milliseconds: those of
# a short one would vary with every turn that another program gets.
_WIDTH: Final = 1024
_N_COPIED: Final = 1 << 24  # numbers, 64 MiB: more than caches hold
_N_SENT: Final = 1 << 18  # numbers, 1 MiB: a message
_BLOCK_BYTES: Final = 1 << 16  # of it, at a time
_QUARTILES: Final = 1.349  # apart they are, in standard deviations of a normal
_CONTAINER: Final = Path("/sys/fs/cgroup/memory.max")


@final
class Network(NamedTuple):
    """What lies between the machines.

    Attributes:
        bandwidth: Bytes per second that each can send, and likewise receive.
        latency: Seconds from the end of sending a message to its arrival.
        message_overhead: Seconds that a message, however small, keeps both its ends.
        handling: Seconds that it takes of a core at each end.
    """

    bandwidth: float
    latency: float
    message_overhead: float
    handling: float = 0.0


HANDLING: Final = 2e-4
"""Measured where this was written, between processes of two cores: 0.17 to 0.24 ms that
a message of 256 bytes takes of a core at each end, through ZeroMQ, a role and its lane.
"""

ASSUMED: Final = Network(bandwidth=1.25e8, latency=1e-4, message_overhead=1e-4)


def here(n: int, *, network: Network = ASSUMED, clock: Clock = busy_seconds) -> Cluster:
    """Return so many machines like this one; measure it if nobody has yet.

    Args:
        n: How many.
        network: Between them.
        clock: Seconds.

    Raises:
        GraphError: too many or too few machines.
    """
    if not 1 <= n <= N_MACHINES_MAX:
        raise GraphError(f"{n} machines like this one: use 1 to {N_MACHINES_MAX}")
    found = figures(clock=clock)
    machine = Machine(
        flops=found.flops,
        memory_rate=found.memory_rate,
        message_rate=found.message_rate,
        memory=found.memory,
        overhead=found.overhead,
        jitter=found.jitter,
        bandwidth=network.bandwidth,
        handling=network.handling,
    )
    how = "assumed" if network == ASSUMED else "as given"
    return Cluster(
        name=HERE,
        machines=(machine,) * n,
        latency=network.latency,
        message_overhead=network.message_overhead,
        origin="measured",
        note=(
            f"The network is {how}: {units.show(network.bandwidth, 'rate')}, latency "
            f"{_microseconds(network.latency)}, and "
            f"{_microseconds(network.message_overhead)} that a message keeps its ends."
        ),
    )


def figures(*, clock: Clock = busy_seconds) -> Figures:
    """Return what this host can do; measure it if nobody has yet."""
    host = this_host()
    known = load(host)
    if known is not None and known.figures is not None:
        return known.figures
    found = measured(clock=clock)
    add(host, figures=found)
    return found


def flops(*, clock: Clock = busy_seconds) -> float:
    """Return the first of the figures alone: in a few tenths of a second, not kept."""
    known = load(this_host())
    if known is not None and known.figures is not None:
        return known.figures.flops
    return 2.0 * _WIDTH**3 / median(_products(clock, seconds_max=_SECONDS_OF_ONE))


def measured(*, clock: Clock = busy_seconds) -> Figures:
    """Measure this host, whether it has been or not."""
    with undisturbed():
        products = _products(clock)
        return Figures(
            flops=2.0 * _WIDTH**3 / median(products),
            memory_rate=_memory_rate(clock),
            message_rate=_message_rate(clock),
            memory=_memory(),
            overhead=_overhead(clock),
            jitter=spread(products),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def spread(times: Sequence[float]) -> float:
    """Return the standard deviation of logarithms of times, outliers left out.

    It is that of a normal distribution with these quartiles: that somebody used the
    machine for one of the runs does not count.
    """
    low, _, high = quantiles([math.log(seconds) for seconds in times])
    return (high - low) / _QUARTILES


def _products(clock: Clock, *, seconds_max: float = _SECONDS_MAX) -> list[float]:
    one, other = _random(_WIDTH, _WIDTH), _random(_WIDTH, _WIDTH)
    result = torch.empty(_WIDTH, _WIDTH, dtype=torch.float32, device="cpu")
    return _times(lambda: torch.mm(one, other, out=result), clock, seconds_max=seconds_max)


def _memory_rate(clock: Clock) -> float:
    source = _random(_N_COPIED)
    target = torch.empty_like(source)
    times = _times(lambda: target.copy_(source), clock)
    return 2.0 * source.nbytes / median(times)


def _message_rate(clock: Clock) -> float:
    """Return bytes per second that one end handles if it does nothing else.

    One thread is both ends, so that nobody waits, and sends through TCP, as the
    transport does. A message is copied twice more: out of a result, and into an input.
    It keeps one processor; what all compute meanwhile takes longer by its share.
    """
    source = _random(_N_SENT)
    target, sent = torch.empty_like(source), bytearray(source.nbytes)
    received = bytearray(source.nbytes)
    one, other = _ends()

    def exchange() -> None:
        torch.frombuffer(sent, dtype=torch.float32).copy_(source)
        done = 0
        while done < len(sent):
            n_bytes = one.send(memoryview(sent)[done : done + _BLOCK_BYTES])
            end = done + n_bytes
            while done < end:
                done += other.recv_into(memoryview(received)[done:end])
        target.copy_(torch.frombuffer(received, dtype=torch.float32))

    with one, other:
        times = _times(exchange, clock)
    n_processors = min(torch.get_num_threads(), os.cpu_count() or 1)
    return n_processors * 2.0 * source.nbytes / median(times)


def _ends() -> tuple[socket.socket, socket.socket]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname(), _SECONDS_MAX)
            other, _ = server.accept()
    except OSError:  # who plans in a sandbox may have no network at all
        return socket.socketpair()
    return one, other


def _overhead(clock: Clock) -> float:
    """Return half the seconds of a layer's forward and backward pass."""
    value, weight = (_random(1, 2).requires_grad_() for _ in range(2))
    ones = torch.ones(1, 1, dtype=torch.float32, device="cpu")

    def pass_through() -> None:
        result = functional.linear(value, weight)
        torch.autograd.grad(result, (value, weight), ones)

    return median(_times(pass_through, clock)) / 2


def _memory() -> float:
    n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container; or "max", as it may use all
        n_bytes = min(n_bytes, int(_CONTAINER.read_text(encoding="ascii")))
    return float(n_bytes)


def _times(
    action: Callable[[], object], clock: Clock, *, seconds_max: float = _SECONDS_MAX
) -> list[float]:
    """Return the seconds of each run: of fewer if they take long."""
    action()
    action()
    times: list[float] = []
    while len(times) < _N_RUNS:
        if len(times) >= _N_RUNS_MIN and sum(times) > seconds_max:
            break
        began = clock()
        action()
        # A clock too coarse to see it is no reason for an infinite speed.
        times.append(max(clock() - began, 1e-9))
    return times


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


DIFFERENCE_MAX: Final = 0.25
"""By which share a probe may take longer than when a profile was measured, or then
than now."""

_N_PROBE_RUNS: Final = 60
_PROBE_WIDTH: Final = 512  # of the layer: a few milliseconds for 256 samples
_BATCH: Final = 256
_N_PROBE_COPIED: Final = 1 << 22  # numbers, 16 MiB, from one place to another


def recheck(tell: Callable[[str], None]) -> float:
    """Throw away what is kept of this host if it was measured when that was slower.

    Args:
        tell: Told if it was.

    Returns:
        How many times as long a probe takes now as it did then; 1 if that is nothing
        to speak of.
    """
    host = this_host()
    known = load(host)
    now = seconds()
    if known is None or known.probe is None:
        add(host, probe=now)
        return 1.0
    if known.probe > (1.0 + DIFFERENCE_MAX) * now:
        ratio = known.probe / now
        tell(f"measuring this machine anew: it was {ratio:.1f} times as slow before")
        anew = Profile(host=host, date=known.date, layers={}, probe=now, replaced=ratio)
        with suppress(StorageError):  # a home that is read-only keeps what it has
            anew.save()
    return now / known.probe if now > (1.0 + DIFFERENCE_MAX) * known.probe else 1.0


def seconds(*, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long the probe takes: the median of many runs."""
    generator = torch.Generator("cpu").manual_seed(0)
    value, weight, source = (
        torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((_BATCH, _PROBE_WIDTH), (_PROBE_WIDTH, _PROBE_WIDTH), (_N_PROBE_COPIED,))
    )
    target = torch.empty_like(source)
    times = []
    with torch.inference_mode():
        functional.linear(value, weight)
        for _ in range(_N_PROBE_RUNS):
            began = clock()
            functional.linear(value, weight)
            target.copy_(source)
            times.append(max(clock() - began, 1e-9))
    return median(times)
