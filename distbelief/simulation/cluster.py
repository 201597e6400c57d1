"""A whole cluster in one process, in virtual time, from one seed.

    cluster = SimulatedCluster(builders, seed=7, options=ClusterOptions(introduce=True))
    cluster.run_until(lambda: cluster.role(REPLICA).status()[0] == "done", within=60)

Nothing sleeps and no thread is started: an hour of a quiet cluster takes milliseconds.
The same seed gives the same run, event by event (`cluster.trace.digest`). A role that
breaks an assertion ends the run with `SimulationFailed`, which names the seed.

A test plays whoever has no builder: it `post`s that one's messages as events, and finds
what was sent to it in `sent_to`.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import assert_never

from distbelief.roles.role import Address, Event, Received, Report, Role, Seconds
from distbelief.simulation.driver import Driver
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
from distbelief.simulation.machines import ClusterOptions, blocks_of
from distbelief.simulation.processes import SimulatedProcess
from distbelief.simulation.storage import Disk, HostMemory
from distbelief.simulation.trace import Trace, Traffic
from distbelief.simulation.world import Builder, Counts, Observer, RandomStreams, World


N_EVENTS_MAX = 1_000_000  # of one `run`
N_EVENTS_AT_ONCE = 100_000  # without any time passing
N_EVENTS_TOGETHER = 1000  # until it is looked at how things stand
N_OBJECTS_TOGETHER = 50_000
"""Made until the collector looks for cycles among them: events leave hardly any, and at
700, as is usual, looking takes a tenth of the time."""


class SimulatedCluster:
    """Roles, machines and links under a virtual clock.

    Args:
        builders: How to build each role, given its memory; called at every start.
        seed: Of all randomness that is not the roles' own.
        options: Machines, links, faults.
    """

    def __init__(
        self,
        builders: Mapping[Address, Builder],
        *,
        seed: int,
        options: ClusterOptions | None = None,
    ) -> None:
        options = ClusterOptions() if options is None else options
        self._world = World.of(builders, seed=seed, options=options)
        self._driver = Driver(self._world)
        self._lives = self._driver.lives
        # Faults of the network act before the first message is sent; the others come
        # after there is someone to hit.
        of_network = [f for f in options.faults if isinstance(f, NetworkFault)]
        first = [partial(self._begin, fault) for fault in of_network if fault.at <= 0]
        names = builders if options.start is None else options.start
        first += [partial(self._lives.start, name) for name in names]
        self._world.agenda.before_all(first)
        self._n_first = len(first)
        for fault in options.faults:
            if fault.at > 0 or fault not in of_network:
                self.inject(fault)

    # ---------------------------------------------------------------------- time

    @property
    def now(self) -> Seconds:
        """Virtual seconds since the beginning."""
        return self._world.agenda.now

    def run(self, *, until: Seconds | None = None, max_events: int = N_EVENTS_MAX) -> None:
        """Let everything happen that is due by `until` (or at all, if it is None).

        Raises:
            SimulationFailed: a role or checker failed, or `max_events` did not suffice.
        """
        with blocks_of(self._world.options.block_bytes), _seldom_collecting():
            agenda = self._world.agenda
            self._start()
            end = math.inf if until is None else until
            n_left = max_events
            while agenda.next_time <= end and agenda.next_time < math.inf:
                if not n_left:
                    raise self._world.failure(f"it is not over after {max_events} events")
                n_left -= self._steps(min(n_left, N_EVENTS_TOGETHER), until=end)
            if until is not None and until > agenda.now:
                agenda.advance(until)

    def run_until(
        self,
        condition: Callable[[], bool],
        *,
        within: Seconds = 3600.0,
        max_events: int = N_EVENTS_MAX,
        every: int = 1,
    ) -> None:
        """Let things happen until `condition` holds; it is asked `every` few events.

        Raises:
            SimulationFailed: it does not hold after `within` seconds, nor ever.
        """
        with blocks_of(self._world.options.block_bytes), _seldom_collecting():
            agenda = self._world.agenda
            self._start()
            end = agenda.now + within
            n_left = max_events
            while not condition():
                if (next_time := agenda.next_time) > end or next_time == math.inf:
                    raise self._world.failure(
                        f"what was waited for has not come about by {end!r} s"
                    )
                if not n_left:
                    raise self._world.failure(f"nor has it after {max_events} events")
                n_left -= self._steps(min(n_left, every), until=end)

    def _start(self) -> None:
        """Begin the lives that begin at time 0, if that has not been done."""
        while self._n_first:
            self._n_first -= 1
            self._steps(1, until=math.inf)

    def _steps(self, n_max: int, *, until: Seconds) -> int:
        agenda = self._world.agenda
        try:
            n = agenda.steps(n_max, until=until)
        except AssertionError as error:  # of a checker, or of our own
            raise self._world.failure(f"an invariant is broken: {error}") from error
        if agenda.n_at_once > N_EVENTS_AT_ONCE:
            raise self._world.failure(
                f"{N_EVENTS_AT_ONCE} events and no time has passed: roles answer each "
                "other without end"
            )
        return n

    # --------------------------------------------------------------- observation

    def role(self, name: Address) -> Role:
        """Return the role of the newest life of `name`, which may be over."""
        return self._life(name).role

    def incarnation(self, name: Address) -> int:
        """Return the incarnation of the newest life of `name`."""
        return self._life(name).incarnation

    def is_alive(self, name: Address) -> bool:
        """Whether the newest life of `name` is not over."""
        life = self._lives.newest.get(name)
        return life is not None and life.alive

    @property
    def alive(self) -> tuple[Address, ...]:
        """Roles whose newest life is not over."""
        return tuple(name for name, life in self._lives.newest.items() if life.alive)

    @property
    def halted(self) -> Mapping[Address, str | None]:
        """Roles that have ended by themselves, and why if not as planned."""
        return {name: life.error for name, life in self._lives.newest.items() if life.halted}

    @property
    def reports(self) -> Sequence[tuple[Address, Report]]:
        """The newest log lines of all roles."""
        return tuple(self._world.reports)

    def sent_to(self, outsider: Address) -> Sequence[Received]:
        """Return the newest messages to a name that has no builder."""
        return tuple(self._world.outside.get(outsider, ()))

    @property
    def counts(self) -> Counts:
        """How many messages were delivered, lost, refused."""
        return self._world.counts

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes sent so far, who to whom."""
        return Traffic(self._world.tallies)

    def busy(self, name: Address) -> Seconds:
        """Return for how long the compute lane of `name` has worked, in all lives."""
        return self._world.busy.get(name, 0.0)

    @property
    def trace(self) -> Trace:
        """Every event so far, as a digest."""
        return self._world.trace

    @property
    def disk(self) -> Disk:
        """Everybody's snapshots."""
        return self._world.disk

    @property
    def streams(self) -> RandomStreams:
        """The random streams; `user` is the test's own."""
        return self._world.streams

    def memory(self, name: Address) -> HostMemory:
        """Return the memory of the host on which `name` runs."""
        return self._lives.host_of(name)

    def watch(self, check: Callable[[], None]) -> None:
        """Call `check` after every event; what it asserts must always hold."""
        self._world.checks.append(check)

    def observe(self, observer: Observer) -> None:
        """Call `observer` with every event and what was done in reply.

        An event changes the life that handles it and no other: whoever looks at that
        one alone sees as much as who looks at all, at a fraction of the cost.
        """
        self._world.observers.append(observer)

    # -------------------------------------------------------------- interference

    def post(self, name: Address, event: Event) -> None:
        """Let something happen to `name` now, as if its driver had seen it."""
        deliver = partial(self._driver.deliver, self._life(name), event)
        self._world.agenda.at(self.now, deliver)

    def kill(self, name: Address, *, tears: bool = False) -> None:
        """End `name` by force, between two events; its files stay."""
        life = self._life(name)
        life.tears, life.restart_after = tears, None
        self._lives.end(life, "killed")

    def restart(self, name: Address) -> None:
        """Begin a new life of `name`, killing the present one if it has one."""
        if name in self._lives.newest:
            self.kill(name)
        self._lives.start(name)

    def inject(self, fault: Fault) -> None:
        """Let `fault` happen at its time."""
        self._world.agenda.at(fault.at, partial(self._begin, fault))

    def _life(self, name: Address) -> SimulatedProcess:
        try:
            return self._lives.newest[name]
        except KeyError:
            begun = ", ".join(self._lives.newest) or "nobody"
            raise KeyError(f"{name!r} has not begun; {begun} has") from None

    def _begin(self, fault: Fault) -> None:
        agenda, world = self._world.agenda, self._world
        match fault:
            case Drop() | Duplicate() | Delay() | CutOff():
                self._driver.network.begin(fault)
            case Kill() | Pause() | Supersede():
                life = self._lives.newest.get(fault.role)
                if life is not None and life.alive:
                    self._begin_for(life, fault)
            case Outage():
                self._begin_outage(fault)
            case Slow():
                world.slow.append(fault)
                agenda.at(agenda.now + fault.seconds, partial(world.slow.remove, fault))
            case DiskFull():
                world.disk.fill()
                agenda.at(agenda.now + fault.seconds, world.disk.clear)
            case TornSnapshot():
                world.disk.tear_newest(fault.role)
            case _:
                assert_never(fault)

    def _begin_outage(self, fault: Outage) -> None:
        back_at = self.now + fault.seconds
        for name in fault.roles:
            until = self._world.away_until
            until[name] = max(until.get(name, 0.0), back_at)
            life = self._lives.newest.get(name)
            if life is not None and life.alive:
                life.tears = False
                life.restart_after = fault.seconds if fault.restarts else None
                self._lives.end(life, f"its machine is away until {back_at!r}")

    def _begin_for(self, life: SimulatedProcess, fault: Kill | Pause | Supersede) -> None:
        match fault:
            case Kill():
                self._begin_kill(life, fault)
            case Pause():
                self._lives.pause(life, fault.seconds)
            case Supersede():
                self._lives.start(life.name)
            case _:
                assert_never(fault)

    def _begin_kill(self, life: SimulatedProcess, fault: Kill) -> None:
        life.tears, life.restart_after = fault.tears, fault.restart_after
        if fault.after_actions is None:
            self._lives.end(life, "killed")
            return
        life.last_actions = fault.after_actions
        if fault.restart_after is not None:
            disarm = partial(self._disarm, life)
            self._world.agenda.at(self.now + fault.restart_after, disarm)

    def _disarm(self, life: SimulatedProcess) -> None:
        life.last_actions = life.restart_after = None


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Let the collector of this process look at new objects less often."""
    before = gc.get_threshold()
    if 0 < before[0] < N_OBJECTS_TOGETHER:  # 0: somebody has turned it off
        gc.set_threshold(N_OBJECTS_TOGETHER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
