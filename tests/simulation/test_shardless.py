"""A job without shards: replicas that only compute, and a group of two ranks."""

from collections.abc import Callable, Mapping, Sequence

from distbelief.core.memory import Memory
from distbelief.protocol import Finished, Progress, StartTraining, Stop
from distbelief.roles import role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault, Kill, Pause
from distbelief.simulation.machines import ClusterOptions
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.worker.member import JobMember, JobMemberConfig


REPLICAS: tuple[tuple[str, Kind], ...] = (("replica-0", "replica"), ("replica-1", "replica"))
GROUP: tuple[tuple[str, Kind], ...] = (("replica-0.0", "replica"), ("replica-0.1", "machine"))


class Pieces:
    """Computes some pieces of work of a second each, once it may begin, and has finished then.

    A rank that nobody asks to begin has finished when the job ends.
    """

    accepts = frozenset({StartTraining, Stop})

    def __init__(self, n: int) -> None:
        self.n_left = n
        self.begun = False
        self.peers: set[str] = set()
        self.stopped = False

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        match event:
            case rl.PeerJoined(peer=peer):
                self.peers.add(peer)
            case rl.Received(message=StartTraining()) if not self.begun:
                self.begun = True
                return [self._next()]
            case rl.Received(message=Stop()):
                self.stopped = True
                return [] if self.begun and self.n_left else self._end()
            case rl.Computed():
                self.n_left -= 1
                report = Progress(
                    step=5 - self.n_left,
                    samples=5 - self.n_left,
                    loss=1.0,
                    seconds_computing=0.0,
                    seconds_waiting=0.0,
                )
                said = rl.Send(receiver=rl.SUPERVISOR, message=report)
                ends = self.stopped or not self.n_left
                return [said, *(self._end() if ends else [self._next()])]
            case _:
                pass
        return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "computing" if self.begun else "waiting", {}

    def _next(self) -> rl.Action:
        return rl.Compute(name="piece", work=lambda: None, cost=rl.Cost(waiting=1.0))

    def _end(self) -> list[rl.Action]:
        return [rl.Send(receiver=rl.SUPERVISOR, message=Finished(counters={})), rl.Exit()]


def cluster(roster: tuple[tuple[str, Kind], ...], *faults: Fault) -> SimulatedCluster:
    def builder(name: str) -> Callable[[Memory], rl.Role]:
        return lambda _: JobMember(JobMemberConfig(name=name), build=lambda: Pieces(5))

    config = SupervisorConfig(roster=roster, stop=None)
    builders = {rl.Address(name): builder(name) for name, _ in roster}
    return SimulatedCluster(
        {rl.SUPERVISOR: lambda _: Supervisor(config)} | builders,
        seed=0,
        options=ClusterOptions(start=(rl.SUPERVISOR,), faults=faults),
    )


def supervisor(simulation: SimulatedCluster) -> Supervisor:
    role = simulation.role(rl.SUPERVISOR)
    assert isinstance(role, Supervisor)
    return role


def ended(simulation: SimulatedCluster) -> str | None:
    """Run a job to its end; return its error."""
    simulation.run_until(lambda: rl.SUPERVISOR in simulation.halted, within=120.0)
    simulation.run(until=simulation.now + 1.0)
    assert not simulation.alive
    return simulation.halted[rl.SUPERVISOR]


def test_a_job_ends_when_its_replicas_have_computed_all() -> None:
    simulation = cluster(REPLICAS)
    simulation.run(until=3.0)
    assert supervisor(simulation).phase == "training"
    assert ended(simulation) is None
    view = supervisor(simulation).view(simulation.now)
    assert (view.phase, view.stop_reason) == ("done", "every replica has taken all its steps")
    assert (view.samples, view.pushes_applied, view.pushes_lost) == (10, 0, 0)
    assert simulation.now < 15.0  # nobody waits for checkpoints


def test_one_that_dies_begins_anew() -> None:
    simulation = cluster(REPLICAS, Kill(at=4.0, role=rl.Address("replica-1")))
    assert ended(simulation) is None
    restarts = {r.name: r.restarts for r in supervisor(simulation).view(simulation.now).roles}
    assert restarts == {"replica-0": 0, "replica-1": 1}


def test_one_that_is_silent_is_killed_and_begins_anew() -> None:
    simulation = cluster(REPLICAS, Pause(at=4.0, role=rl.Address("replica-0"), seconds=30.0))
    assert ended(simulation) is None
    texts = [message.text for message in supervisor(simulation).view(simulation.now).messages]
    assert texts[0].startswith("replica 0 silent for 3.")
    assert texts[1].startswith("replica 0 silent for 10.")
    assert texts[1].endswith("restarting it")


def test_ranks_of_a_group_know_each_other_and_end_together() -> None:
    simulation = cluster(GROUP)
    simulation.run(until=3.0)
    member = simulation.role(rl.Address("replica-0.1"))
    assert isinstance(member, JobMember)
    assert isinstance(member.role, Pieces)
    assert member.role.peers == {"replica-0.0"}
    assert ended(simulation) is None  # the leader has finished, and the other rank is stopped


def test_ctrl_c_ends_it_within_two_seconds() -> None:
    simulation = cluster(REPLICAS)
    simulation.run(until=3.0)
    for _ in range(2):
        stop = rl.Received(sender=rl.USER, incarnation=0, message=Stop(reason="Ctrl+C"))
        simulation.post(rl.SUPERVISOR, stop)
    simulation.run(until=5.0)
    assert simulation.halted[rl.SUPERVISOR] == "interrupted"
