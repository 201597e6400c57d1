"""Processor time of a supervisor per message, by the number of its replicas.

    python experiments/benchmarks/many_members.py [--small]

One supervisor with one shard and 10 to 4,000 replicas; nothing travels. Not in `make bench`: it is
for those who change the supervisor. A row for each part:
microseconds for

    heartbeat   the supervisor: a Heartbeat with the counters of a replica
    progress    its Progress, of a job that ends after some samples
    dealt       a Heartbeat that says that half of what was dealt is done: the dealer deals more
    loss        the end of a process, its start anew, its Join and first Heartbeat
    placement   the end of a role on a host, its start there anew, its Join and first Heartbeat
    waiting     a Heartbeat while a tenth of the replicas wait for hosts
    tick        what is looked at four times a second, for each member
    status      the view of the job, written and read as status.json, for each member

    growth_*    the time with the most over that with the fewest
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Final, final

import msgspec

from distbelief import protocol as wire
from distbelief.config.job import StopTable
from distbelief.core.spans import Epochs
from distbelief.job.run.directory import Status, status_in
from distbelief.protocol import role as rl
from distbelief.protocol.role import Address
from distbelief.supervisor.handover import LOST
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor import TICK_SECONDS, Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from experiments.benchmarks.measuring import measurement


SHARD: Final = Address("shard-0")
SLOTS: Final = 16  # of a host
N_SAMPLES: Final = 1 << 20
COUNTERS: Final = {f"counter_{n}": 1.0 for n in range(20)}


@final
class Job:
    """A supervisor that handles the messages of its roles; what that takes is `spent`, seconds."""

    def __init__(self, n: int, *, is_dealt: bool = False, n_waiting: int | None = None) -> None:
        self.names = [Address(f"replica-{k}") for k in range(n)]
        config = SupervisorConfig(
            roster=((SHARD, "shard"), *((name, "replica") for name in self.names)),
            stop=StopRules(StopTable(epochs=1e6), n_train=N_SAMPLES),
            batch_size=8,
            dealt=Epochs(n_samples=N_SAMPLES, batch_size=8) if is_dealt else None,
            stable_seconds=0.0,  # no role is left out, and no host blocked
        )
        on_hosts = n_waiting is not None
        cluster = ClusterConfig(slots_here=0, hosts_seconds_max=0.0) if on_hosts else None
        self._supervisor = Supervisor(config, cluster)
        self._incarnations = dict.fromkeys([SHARD, *self.names], 1)
        self._read = dict.fromkeys(self.names, 0)
        self._step = 0
        self._now = 0.0
        self._at: dict[str, Address] = {}  # hosts of roles
        self.spent = 0.0
        self._handle(rl.Started(incarnation=1))
        if n_waiting is not None:
            for k in range((n - n_waiting + SLOTS - 1) // SLOTS):
                self._come(Address(f"host-{k}"), cores=min(SLOTS, n - n_waiting - k * SLOTS))
        self.tick()
        self.hear(SHARD, wire.Join(endpoint="here", host="h", pid=1))
        if is_dealt:
            self.hear(SHARD, wire.SamplesApplied(spans=()))
        self.here = [name for name in self.names if n_waiting is None or name in self._at]
        for name in self.here:
            self._join(name)
        for name in self.here:
            self.progress(name)

    def _handle(self, event: rl.Event) -> Sequence[rl.Action]:
        began = time.thread_time()
        actions = self._supervisor.handle(event, self._now)
        self.spent += time.thread_time() - began
        for action in actions:
            match action:
                case rl.Launch():
                    self._incarnations[action.name] = action.incarnation
                case rl.Send(message=wire.Assignments(assignments=assigned)):
                    for one in assigned:
                        self._at[one.name] = action.receiver
                        self._incarnations[Address(one.name)] = one.incarnation
                case _:
                    pass
        return actions

    def hear(self, name: Address, message: wire.Message) -> None:
        incarnation = self._incarnations.get(name, 1)
        self._handle(rl.Received(sender=name, incarnation=incarnation, message=message))

    def _come(self, host: Address, *, cores: int) -> None:
        offer = wire.Offer(
            incarnation=1, label=host, endpoint="", cores=cores, memory_bytes=1, devices=()
        )
        self.hear(host, offer)
        self.hear(host, _report())

    def _join(self, name: Address) -> None:
        self.hear(name, wire.Join(endpoint="there", host="h", pid=1))
        self.heartbeat(name)

    # --- what is measured

    def heartbeat(self, name: Address) -> None:
        counters = COUNTERS | {"ranges": self._read[name], "ranges_done": self._read[name]}
        self.hear(name, wire.Heartbeat(state="computing", counters=counters))

    def dealt(self, name: Address) -> None:
        self._read[name] += 1
        self.heartbeat(name)

    def progress(self, name: Address) -> None:
        self._step += 1
        self.hear(
            name,
            wire.Progress(
                step=self._step,
                samples=8 * self._step,
                loss=1.0,
                seconds_computing=0.0,
                seconds_waiting=0.0,
            ),
        )

    def loss(self, name: Address) -> None:
        incarnation = self._incarnations[name]
        self._handle(rl.PeerLost(peer=name, incarnation=incarnation, reason="killed"))
        self._handle(rl.TimerFired(name=f"{LOST}{name}"))
        assert self._incarnations[name] > incarnation, name
        self._now += 1e-3
        self._join(name)

    def placement(self, name: Address) -> None:
        ended = wire.RoleEnded(name=name, incarnation=self._incarnations[name], reason="killed")
        self.hear(self._at[name], _report(ended))
        self._handle(rl.TimerFired(name=f"{LOST}{name}"))
        assert self._incarnations[name] > ended.incarnation, name
        self._now += 1e-3
        self._join(name)

    def tick(self, _: Address = SHARD) -> None:
        self._now += TICK_SECONDS
        self._handle(rl.TimerFired(name="supervisor:tick"))

    def status(self, _: Address) -> None:
        began = time.thread_time()
        view = self._supervisor.view(self._now)
        status = Status(name="job", pid=1, written=0.0, view=view, ended=False, error=None)
        status_in(msgspec.json.encode(status), Path("status.json"))
        self.spent += time.thread_time() - began


def _report(*ended: wire.RoleEnded) -> wire.HostReport:
    return wire.HostReport(
        incarnation=1, ready=True, leaving=False, refusal=None, ended=ended, bandwidth=1e9
    )


# A row: its job, what is done, and whether that looks at all members.
Row = tuple[Callable[[int], Job], Callable[[Job, Address], None], bool]
ROWS: Final[dict[str, Row]] = {
    "heartbeat": (Job, Job.heartbeat, False),
    "progress": (Job, Job.progress, False),
    "dealt": (lambda n: Job(n, is_dealt=True), Job.dealt, False),
    "loss": (Job, Job.loss, False),
    "placement": (lambda n: Job(n, n_waiting=0), Job.placement, False),
    "waiting": (lambda n: Job(n, n_waiting=n // 10), Job.heartbeat, False),
    "tick": (Job, Job.tick, True),
    "status": (Job, Job.status, True),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    options = measurement.options_of(parser, arguments, small={})
    numbers = (10, 20) if options.small else (10, 100, 1000, 4000)
    n_each = 20 if options.small else 500
    rows: dict[str, dict[str, str]] = {}
    figures: dict[str, float] = {}
    for name, (built, act, is_of_all) in ROWS.items():
        jobs = {n: built(n) for n in numbers}
        times: dict[int, list[float]] = {n: [] for n in numbers}
        with _settled():
            for n in measurement.turns(numbers, n_rounds=3):
                job, n_times = jobs[n], max(n_each // n, 2) if is_of_all else n_each
                job.spent = 0.0
                for member in islice(cycle(job.here), n_times):
                    act(job, member)
                times[n].append(job.spent / (n_times * (n if is_of_all else 1)))
        found = {n: median(each) for n, each in times.items()}
        rows[name] = {f"{n:,}": f"{1e6 * t:.1f}" for n, t in found.items()}
        figures[f"growth_{name}"] = found[numbers[-1]] / found[numbers[0]]
        figures[f"micro_{name}"] = 1e6 * found[numbers[-1]]
    measurement.show("processor microseconds of a supervisor, by the number of its replicas", rows)
    measurement.conclude("many_members", figures)


@contextmanager
def _settled() -> Iterator[None]:
    """Meanwhile no garbage is collected: that takes longer the more members there are."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


if __name__ == "__main__":
    main()
