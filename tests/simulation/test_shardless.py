"""A job without shards: replicas that only compute, and a group of two ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.protocol import Finished, Progress, StartTraining, Stop, role as rl
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Kill, Pause
from distbelief.simulation.machines import ClusterOptions
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.worker.member import JobMember, JobMemberConfig
from tests.simulation.jobs import JobScene


REPLICAS: tuple[tuple[str, Kind], ...] = (("replica-0", "replica"), ("replica-1", "replica"))
GROUP: tuple[tuple[str, Kind], ...] = (("replica-0.0", "replica"), ("replica-0.1", "rank"))


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


@dataclass(kw_only=True, eq=False)
class Shardless(JobScene):
    roster: tuple[tuple[str, Kind], ...] = REPLICAS

    @override
    def roles(self) -> Mapping[rl.Address, Builder]:
        config = SupervisorConfig(roster=self.roster, stop=None)
        builders: dict[rl.Address, Builder] = {rl.SUPERVISOR: lambda _: Supervisor(config)}
        return builders | {rl.Address(name): partial(self._member, name) for name, _ in self.roster}

    def _member(self, name: str, _: Memory) -> JobMember:
        return JobMember(JobMemberConfig(name=name), build=lambda: Pieces(5))

    @override
    def options(self) -> ClusterOptions:
        return ClusterOptions(start=(rl.SUPERVISOR,))


def test_a_job_ends_when_its_replicas_have_computed_all() -> None:
    job = Shardless()
    job.cluster.run(until=3.0)
    assert job.phase == "training"
    assert job.run() is None
    view = job.view
    assert (view.phase, view.stop_reason) == ("done", "every replica has taken all its steps")
    assert (view.samples, view.pushes_applied, view.pushes_lost) == (10, 0, 0)
    assert job.now < 15.0  # nobody waits for checkpoints


def test_one_that_dies_begins_anew() -> None:
    job = Shardless(faults=[Kill(at=4.0, role=rl.Address("replica-1"))])
    assert job.run() is None
    restarts = {r.name: r.restarts for r in job.view.roles}
    assert restarts == {"replica-0": 0, "replica-1": 1}


def test_one_that_is_silent_is_killed_and_begins_anew() -> None:
    job = Shardless(faults=[Pause(at=4.0, role=rl.Address("replica-0"), seconds=30.0)])
    assert job.run() is None
    texts = job.messages
    assert texts[0].startswith("replica 0 silent for 3.")
    assert texts[1].startswith("replica 0 silent for 10.")
    assert texts[1].endswith("restarting it")


def test_ranks_of_a_group_know_each_other_and_end_together() -> None:
    job = Shardless(roster=GROUP)
    job.cluster.run(until=3.0)
    rank = job.member("replica-0.1").role
    assert isinstance(rank, Pieces)
    assert rank.peers == {"replica-0.0"}
    assert job.run() is None  # the leader has finished, and the other rank is stopped


def test_ctrl_c_ends_it_within_two_seconds() -> None:
    job = Shardless()
    job.cluster.run(until=3.0)
    for _ in range(2):
        job.interrupt()
    job.cluster.run(until=5.0)
    assert job.cluster.halted[rl.SUPERVISOR] == "interrupted"
