"""A simulated cluster: all roles in one process, in virtual time, from one seed.

    cluster = SimulatedCluster(builders, seed=7, options=ClusterOptions(introduce=True))
    cluster.run_until(lambda: cluster.role(REPLICA).status()[0] == "done", within=60)

There are no sleeps and no threads: an hour of an idle cluster takes milliseconds. The same
seed gives the same run, event by event (`cluster.trace.digest`). A failed assertion of a
role ends the run with `SimulationFailed`, which shows the seed. A test can play a role that
has no builder: it `post`s the role's messages, and reads messages to it in `sent_to`.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import assert_never

from distbelief.protocol.role import Address, Event, Received, Report, Role, Seconds
from distbelief.simulation.driver import Builder, Driver, Observer, SimulatedProcess
from distbelief.simulation.faults import (
    CutOff,
    Delay,
    DiskFull,
    Drop,
    Duplicate,
    Fault,
    Kill,
    NetworkFault,
    Outage,
    Pause,
    Slow,
    Supersede,
    TornSnapshot,
)
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.storage import HostMemory
from distbelief.simulation.trace import Traffic


N_EVENTS_MAX = 1_000_000  # of one `run`
N_EVENTS_AT_ONCE = 100_000  # at one time of the virtual clock
N_EVENTS_TOGETHER = 1000  # between two checks of the limits
# Threshold of the garbage collector. Events leave hardly any cycles, and with the default of
# 700 the collector takes a tenth of the time.
N_OBJECTS_TOGETHER = 50_000


class SimulatedCluster:
    """Roles, machines and links under a virtual clock."""

    def __init__(
        self,
        builders: Mapping[Address, Builder],  # called at every start of a role
        *,
        seed: int,  # of all random numbers except the roles' own
        options: ClusterOptions | None = None,
    ) -> None:
        options = ClusterOptions() if options is None else options
        driver = self._driver = Driver(builders, seed=seed, options=options)
        self.counts, self.trace = driver.counts, driver.trace
        self.disk = driver.disk  # the checkpoints of all roles
        # Roles that have ended by themselves, with their error or None.
        self.halted: Mapping[Address, str | None] = driver.halted
        # Network faults must act before the first message is sent; other faults need a
        # running process, so they come after the starts.
        of_network = [f for f in options.faults if isinstance(f, NetworkFault)]
        first = [partial(self._begin, fault) for fault in of_network if fault.at <= 0]
        names = builders if options.start is None else options.start
        first += [partial(self._driver.start, name) for name in names]
        self._driver.event_queue.before_all(first)
        self._n_first = len(first)
        for fault in options.faults:
            if fault.at > 0 or fault not in of_network:
                self.inject(fault)

    # --- time ---

    @property
    def now(self) -> Seconds:
        """Virtual seconds since the start."""
        return self._driver.event_queue.now

    def run(self, *, until: Seconds | None = None, max_events: int = N_EVENTS_MAX) -> None:
        """Run all events that are due by `until`; None means all events.

        SimulationFailed if a role or a check failed, or there are more than `max_events`.
        """
        end = math.inf if until is None else until
        self._run(lambda: False, end=end, max_events=max_events, every=N_EVENTS_TOGETHER)
        if until is not None and until > self.now:
            self._driver.event_queue.advance(until)

    def run_until(
        self,
        condition: Callable[[], bool],
        *,
        within: Seconds = 3600.0,
        max_events: int = N_EVENTS_MAX,
        every: int = 1,
    ) -> None:
        """Run until `condition` holds, as checked after every `every` events and ends of roles.

        SimulationFailed if it does not hold within `within` virtual seconds.
        """
        end = self.now + within
        if not self._run(condition, end=end, max_events=max_events, every=every):
            raise self._driver.failure(f"the condition of run_until does not hold by {end!r} s")

    def _run(
        self, condition: Callable[[], bool], *, end: Seconds, max_events: int, every: int
    ) -> bool:
        # Returns whether the condition holds; False if no event is due by `end`.
        event_queue, n_left = self._driver.event_queue, max_events
        with _seldom_collecting():
            self._start()
            while not condition():
                if (next_time := event_queue.next_time) > end or next_time == math.inf:
                    return False
                if not n_left:
                    raise self._driver.failure(f"the run has not ended after {max_events} events")
                n_left -= self._steps(min(n_left, every), until=end)
        return True

    def _start(self) -> None:
        # Processes that start at time 0 are started by the first call of `run`.
        while self._n_first:
            self._n_first -= 1
            self._steps(1, until=math.inf)

    def _steps(self, n_max: int, *, until: Seconds) -> int:
        event_queue = self._driver.event_queue
        try:
            n = event_queue.steps(n_max, until=until)
        except AssertionError as error:  # of a check, or of the simulation itself
            raise self._driver.failure(f"an invariant is broken: {error}") from error
        if event_queue.n_at_once > N_EVENTS_AT_ONCE:
            raise self._driver.failure(
                f"{N_EVENTS_AT_ONCE} events and no time has passed: roles answer each "
                "other without end"
            )
        return n

    # --- observation ---

    def role(self, name: Address) -> Role:
        """Return the role of the newest incarnation of `name`, which may have ended."""
        return self._process(name).role

    def incarnation(self, name: Address) -> int:
        return self._process(name).incarnation

    def is_alive(self, name: Address) -> bool:
        process = self._driver.newest.get(name)
        return process is not None and process.alive

    @property
    def alive(self) -> tuple[Address, ...]:
        """Roles whose newest incarnation runs."""
        return tuple(name for name, process in self._driver.newest.items() if process.alive)

    @property
    def reports(self) -> Sequence[tuple[Address, Report]]:
        """The newest reports of all roles."""
        return tuple(self._driver.reports)

    def sent_to(self, outsider: Address) -> Sequence[Received]:
        """Return the newest messages to a name without a builder."""
        return tuple(self._driver.outside.get(outsider, ()))

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._driver.traffic)

    def busy(self, name: Address) -> Seconds:
        """Return how long the compute executor of `name` has worked, in all incarnations."""
        return self._driver.busy.get(name, 0.0)

    @property
    def used(self) -> Mapping[tuple[str, str], Seconds]:
        """How long each shard, processor, card, link and switch worked, by kind and name."""
        return self._driver.used

    def memory(self, name: Address) -> HostMemory:
        return self._driver.memory_of(name)

    def observe(self, observer: Observer) -> None:
        """Call `observer` with every event and the actions performed; it may assert invariants."""
        self._driver.observers.append(observer)

    # --- intervention ---

    def post(self, name: Address, event: Event) -> None:
        """Deliver an event to `name` now, as if its driver had produced it."""
        self._driver.event_queue.at(self.now, self._process(name).deliver, event)

    def kill(self, name: Address) -> None:
        """Kill `name` between two events; its files stay."""
        process = self._process(name)
        process.tears, process.restart_after = False, None
        self._driver.end(process, "killed")

    def restart(self, name: Address) -> None:
        """Start a new incarnation of `name`; a running one is killed."""
        if name in self._driver.newest:
            self.kill(name)
        self._driver.start(name)

    def inject(self, fault: Fault) -> None:
        self._driver.event_queue.at(fault.at, self._begin, fault)

    def play(self, faults: Iterator[Fault]) -> None:
        """Inject faults, in order of time, each when the one before begins; there may be no end."""
        fault = next(faults, None)
        if fault is not None:
            self._driver.event_queue.at(fault.at, self._play, fault, faults)

    def _play(self, fault: Fault, faults: Iterator[Fault]) -> None:
        self._begin(fault)
        self.play(faults)

    def _process(self, name: Address) -> SimulatedProcess:
        try:
            return self._driver.newest[name]
        except KeyError:
            started = ", ".join(self._driver.newest) or "none"
            raise KeyError(f"{name!r} has not started; started roles: {started}") from None

    def _begin(self, fault: Fault) -> None:
        driver, event_queue = self._driver, self._driver.event_queue
        match fault:
            case Drop() | Duplicate() | Delay() | CutOff():
                driver.network.begin(fault)
            case Kill() | Pause() | Supersede():
                process = driver.newest.get(fault.role)
                if process is not None and process.alive:
                    self._begin_for(process, fault)
            case Outage():
                self._begin_outage(fault)
            case Slow():
                driver.slow.append(fault)
                event_queue.at(event_queue.now + fault.seconds, driver.slow.remove, fault)
            case DiskFull():
                driver.disk.fill()
                event_queue.at(event_queue.now + fault.seconds, driver.disk.clear)
            case TornSnapshot():
                driver.disk.tear_newest(fault.role)
            case _:
                assert_never(fault)

    def _begin_outage(self, fault: Outage) -> None:
        back_at = self.now + fault.seconds
        until = self._driver.away_until
        for name in fault.roles:
            until[name] = max(until.get(name, 0.0), back_at)
            process = self._driver.newest.get(name)
            if process is not None and process.alive:
                process.tears = False
                process.restart_after = fault.seconds if fault.restarts else None
                self._driver.end(process, f"its machine is away until {back_at!r}")

    def _begin_for(self, process: SimulatedProcess, fault: Kill | Pause | Supersede) -> None:
        match fault:
            case Kill():
                process.tears, process.restart_after = fault.tears, fault.restart_after
                process.last_actions = fault.after_actions
                if fault.after_actions is None:
                    self._driver.end(process, "killed")
                elif fault.restart_after is not None:
                    at = self.now + fault.restart_after
                    self._driver.event_queue.at(at, self._disarm, process)
            case Pause():
                self._driver.pause(process, fault.seconds)
            case Supersede():
                self._driver.start(process.name)
            case _:
                assert_never(fault)

    def _disarm(self, process: SimulatedProcess) -> None:
        process.last_actions = process.restart_after = None


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    before = gc.get_threshold()
    if 0 < before[0] < N_OBJECTS_TOGETHER:  # 0: the collector is turned off
        gc.set_threshold(N_OBJECTS_TOGETHER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
