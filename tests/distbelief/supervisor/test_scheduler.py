"""A supervisor whose roles may be elsewhere, and the hosts, in one thread."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import RemoteProtocolError
from distbelief.job.hosts.agent import HostAgent, HostAgentConfig
from distbelief.protocol import role as rl
from distbelief.protocol.hosts import JOB_SPEC, PROBE
from distbelief.supervisor.hosts import ClusterConfig, Host, HostTable
from distbelief.supervisor.membership import Kind, Presence, RoleRecord
from tests.distbelief.supervisor.hosts import Machine, Site, Town, config_of, offer_of


ALL_THREE = ["replica-0", "replica-1", "replica-2"]


def roster(n_replicas: int, n_machines: int = 1) -> list[tuple[str, Kind]]:
    replicas: list[tuple[str, Kind]] = []
    for r in range(n_replicas):
        if n_machines == 1:
            replicas.append((f"replica-{r}", "replica"))
            continue
        replicas.append((f"replica-{r}.0", "replica"))
        replicas += [(f"replica-{r}.{m}", "rank") for m in range(1, n_machines)]
    return [("shard-0", "shard"), *replicas, ("evaluator", "evaluator")]


def one_host(
    n_replicas: int,
    config: ClusterConfig | None = None,
    *,
    n_machines: int = 1,
    cores: int = 2,
    patience: float = 15.0,
) -> tuple[Town, Machine]:
    town = Town(roster(n_replicas, n_machines), config)
    return town, town.come("a", cores=cores, patience=patience)


def test_a_job_waits_for_its_hosts_and_uses_them() -> None:
    town = Town(roster(3), config_of(n_hosts=1))
    town.pass_time(30.0)
    assert town.runs() == {"here": []}
    town.come("a")
    assert town.runs() == {
        "here": ["evaluator", "replica-0", "shard-0"],
        "host-a": ["replica-1", "replica-2"],
    }
    assert town.places[rl.Address("replica-1")] == "host-a"
    assert town.places[rl.Address("shard-0")] == rl.SUPERVISOR
    assert "a (host-a) has joined: 2 cores, 1.1 GB" in town.said
    assert "replica 1, replica 2: on a (host-a)" in town.said


def test_a_host_tells_its_speed_and_its_link_is_tried() -> None:
    town = Town(roster(2))
    config = HostAgentConfig(offer=offer_of("a", cores=2, memory_bytes=1 << 34, flops=4.2e10))
    town.come("a", config=config)
    (view,) = town.supervisor.view(town.now).hosts
    assert (view.state, view.memory_bytes, view.flops) == ("ready", 1 << 34, 4.2e10)
    assert view.bandwidth is not None  # without end: no time passes on these links
    (told,) = [text for text in town.said if "is ready" in text]
    assert told.startswith("a (host-a) is ready: 42 GFLOP/s a core, ")
    assert told.endswith("/s from here")


def test_a_host_whose_link_loses_what_it_is_tried_with_joins_all_the_same() -> None:
    town = Town(roster(2))
    town.lossy = PROBE
    town.come("a")
    town.pass_time(4.0)
    assert town.runs()["host-a"] == ["replica-1"]
    assert "a (host-a) is ready: not measured" in town.said


def test_what_hosts_ask_for_is_not_copied_for_each() -> None:
    """Who has a key and many names, and reads nothing, fills no memory."""
    town = Town(roster(1))
    contents = []
    for name, document in (("a", JOB_SPEC), ("b", JOB_SPEC), ("a", PROBE), ("b", PROBE)):
        town.come(name)
        ask = wire.FileRequest(document=document, offset=0)
        event = rl.Received(sender=rl.Address(f"host-{name}"), incarnation=1, message=ask)
        (send,) = town.supervisor.handle(event, town.now)
        assert isinstance(send, rl.Send)
        assert isinstance(send.message, wire.FileChunk)
        assert send.lent
        contents.append(send.message.content.content.obj)
    assert contents[0] is contents[1]
    assert contents[2] is contents[3]


def test_a_host_that_has_second_thoughts_is_left_by_its_roles() -> None:
    """Its room stayed open: roles went there, and never began."""
    town, machine = one_host(2, config_of(n_hosts=1))
    assert town.runs()["host-a"] == ["replica-1"]
    refusal = wire.HostReport(incarnation=1, ready=True, leaving=False, refusal="no", ended=())
    event = rl.Received(sender=machine.name, incarnation=1, message=refusal)
    town._deliver(town.here, event)
    machine.is_cut = True
    town.pass_time(2.0)
    states = {r.name: r.state for r in town.supervisor.view(town.now).roles}
    assert states["replica-1"] == "waiting for a host"
    town.come("b")
    assert town.runs()["host-b"] == ["replica-1"]


def test_a_host_on_which_roles_die_at_once_gets_no_more() -> None:
    """It took one replica after the other, until none was left."""
    town = Town(roster(3), config_of(n_hosts=2))
    bad, good = town.come("bad", cores=8), town.come("good", cores=1)
    town.pass_time(2.0)
    for _ in range(60):
        for name in list(bad.processes):
            town.die(bad, name)
        town.pass_time(0.25)
    town.come("late", cores=2)
    town.pass_time(5.0)
    assert any("bad (host-bad) gets no more roles" in text for text in town.said)
    everywhere = [name for names in town.runs().values() for name in names]
    assert sorted(everywhere) == ["evaluator", *ALL_THREE, "shard-0"]
    assert "replica-0" not in [*good.processes, *bad.processes]
    (state,) = [h.state for h in town.supervisor.view(town.now).hosts if h.label == "bad"]
    assert state == "blocked"


def test_the_only_host_is_not_blocked_and_its_replicas_are_left_out() -> None:
    town, machine = one_host(3, config_of(n_hosts=1, slots_here=0), cores=3)
    for _ in range(40):
        for name in list(machine.processes):
            town.die(machine, name)
        town.pass_time(0.25)
    assert town.supervisor.status()[0] in {"stopping", "failed"}
    assert any("left out after 3 restarts" in text for text in town.said)


def test_a_host_that_restarts_with_every_message_fills_no_log() -> None:
    """2.7 MB of it in 40 s, by one who may join."""
    town = Town(roster(1))
    for incarnation in range(1, 1001):
        offer = offer_of("a", incarnation)
        event = rl.Received(sender=rl.Address("host-a"), incarnation=1, message=offer)
        town.supervisor.handle(event, town.now + 0.005 * incarnation)
    assert sum("has joined" in text for text in town.said) <= 6


def test_it_does_not_wait_for_ever() -> None:
    town = Town(roster(2), config_of(n_hosts=2, hosts_seconds_max=10.0, slots_here=2))
    town.pass_time(11.0)
    assert town.runs()["here"] == ["evaluator", "replica-0", "replica-1", "shard-0"]
    assert "0 of 2 hosts came within 10 s: beginning" in town.said


def test_replicas_without_a_core_wait_for_who_comes_late() -> None:
    town = Town(roster(4))
    town.pass_time(100.0)
    assert town.runs() == {"here": ["evaluator", "replica-0", "shard-0"]}
    assert "replica 3 waits for a host with free cores (distbelief join)" in town.said
    states = {r.name: r.state for r in town.supervisor.view(town.now).roles}
    assert states["replica-3"] == "waiting for a host"
    town.come("a")
    town.come("b")
    assert town.runs()["host-a"] == ["replica-1", "replica-2"]
    assert town.runs()["host-b"] == ["replica-3"]
    town.pass_time(30.0)
    assert not any("restart" in text for text in town.said)


def test_a_host_that_dies_takes_its_roles_along_for_a_while_only() -> None:
    town = Town(roster(4), config_of(slots_here=2, n_hosts=1))
    one = town.come("a")
    assert len(one.processes) == 2
    town.kill(one)
    town.pass_time(20.0)
    assert town.runs() == {"here": ["evaluator", "replica-0", "replica-2", "shard-0"]}
    assert any("a (host-a) is lost (silent for 8" in text for text in town.said)
    assert any("was lost with a: restarting it" in text for text in town.said)
    town.come("b")
    assert town.runs()["host-b"] == ["replica-1", "replica-3"]


def test_a_host_whose_processes_have_ended_is_given_up_at_once() -> None:
    town = Town(roster(4), config_of(slots_here=4, n_hosts=1))
    one = town.come("a")
    town.kill(one, has_power=True)
    town.pass_time(1.5)
    assert town.runs() == {
        "here": ["evaluator", "replica-0", "replica-1", "replica-2", "replica-3", "shard-0"]
    }
    assert "a (host-a) is lost (refused)" in str(town.said)


def test_a_host_that_is_heard_again_is_not_given_up() -> None:
    """The answer to a probe may be late, or about its process before."""
    town, machine = one_host(3, config_of(n_hosts=1))
    late = rl.PeerLost(peer=machine.name, incarnation=1, reason="refused")
    town._deliver(town.here, late)
    machine.is_cut = True
    town.pass_time(2.0)
    town._deliver(town.here, rl.PeerLost(peer=machine.name, incarnation=0, reason="refused"))
    machine.is_cut = False
    town.pass_time(2.0)
    assert not any("is lost" in text for text in town.said)


@pytest.mark.parametrize("seconds", [2.0, 12.0, 40.0])
def test_a_host_that_was_cut_off_is_used_again(seconds: float) -> None:
    """Short: nothing happens. Longer: it begins anew, on either side."""
    town, machine = one_host(3, config_of(n_hosts=1))
    town.pass_time(5.0)
    machine.is_cut = True
    town.pass_time(seconds)
    machine.is_cut = False
    town.pass_time(10.0)
    assert len(town.runs()["host-a"]) == 2
    everywhere = sorted(name for names in town.runs().values() for name in names)
    assert everywhere == ["evaluator", "replica-0", "replica-1", "replica-2", "shard-0"]
    assert any("is lost" in text for text in town.said) == (seconds > 8.0)


@pytest.mark.parametrize("seconds", [40.0, 80.0])
def test_a_supervisor_whose_own_link_is_cut_waits_for_its_hosts(seconds: float) -> None:
    """It gave all of them up at once, and with both copies of a shard acknowledged pushes."""
    both: list[tuple[str, Kind]] = [("shard-0", "shard"), ("shard-0b", "shard"), *roster(3)[1:]]
    town = Town(both, replace(config_of(n_hosts=2), placement="spread"))
    hosts = [town.come(name, patience=600.0) for name in "ab"]
    town.pass_time(5.0)
    before = town.runs()
    assert all({"shard-0", "shard-0b"} & {*machine.processes} for machine in hosts)
    for machine in hosts:
        machine.is_cut = True
    town.pass_time(seconds)
    for machine in hosts:
        machine.is_cut = False
    town.pass_time(5.0)
    assert "all 2 hosts are silent: waiting for them for 60 s at most" in town.said
    assert any("is lost" in text for text in town.said) == (seconds > 60.0)
    if seconds < 60.0:
        assert town.runs() == before
        town.kill(hosts[0])  # alone: its own fault
        town.pass_time(10.0)
        assert any("a (host-a) is lost (silent for 8" in text for text in town.said)


def test_a_role_that_dies_on_a_host_is_started_there_again() -> None:
    town, machine = one_host(2, config_of(n_hosts=1, slots_here=0))
    town.pass_time(5.0)
    town.die(machine, "replica-1")
    town.pass_time(2.0)
    assert machine.processes == {"replica-0": 1, "replica-1": 2}
    assert "replica 1 died on a: restarting it" in town.said


@pytest.mark.parametrize("slow_words", [False, True])
def test_a_host_that_leaves_is_left_in_good_order(*, slow_words: bool) -> None:
    """Its machine told of the end of its process before its own last words came.

    By these the replica had finished: it was started nowhere else, and nobody said so.
    """
    town, machine = one_host(2, config_of(n_hosts=1, slots_here=2))
    town.pass_time(5.0)
    assert machine.processes
    town.slow_words = slow_words
    town.leave(machine)
    town.pass_time(5.0)
    assert machine.halted
    assert machine.error is None
    assert town.runs()["here"] == ["evaluator", "replica-0", "replica-1", "shard-0"]
    assert any("has left with a: restarting it" in text for text in town.said)
    assert "a (host-a) has left" in town.said


def test_hosts_of_one_model_leave_at_once() -> None:
    town, machine = one_host(1, config_of(n_hosts=1, slots_here=0), n_machines=2)
    town.pass_time(5.0)
    assert sorted(machine.processes) == ["replica-0.0", "replica-0.1"]
    town.leave(machine)
    town.pass_time(3.0)
    assert machine.halted
    town.come("b")
    assert town.runs()["host-b"] == ["replica-0.0", "replica-0.1"]


class Elsewhere:
    """Places every role, shards and evaluator too, on the first host that takes roles."""

    def place(
        self, role: Sequence[RoleRecord], hosts: HostTable, *, begun: bool
    ) -> Sequence[Host] | None:
        del begun
        host = next((host for host in hosts.joined.values() if host.takes_roles), None)
        return None if host is None else [host] * len(role)


def test_another_policy_places_every_role() -> None:
    town = Town(roster(2, 2), config_of(), Elsewhere())
    town.pass_time(5.0)
    assert town.runs() == {"here": []}
    machine = town.come("a")
    everybody = [name for name, _ in roster(2, 2)]
    assert town.runs() == {"here": [], "host-a": sorted(everybody)}
    town.die(machine, "shard-0")
    town.pass_time(2.0)
    assert machine.processes[rl.Address("shard-0")] == 2
    town.come("b")
    town.kill(machine)
    town.pass_time(15.0)
    assert town.runs() == {"here": [], "host-b": sorted(everybody)}


def test_ranks_that_die_one_after_the_other_are_placed_together() -> None:
    town = Town(roster(2, 2), config_of(slots_here=2))
    town.come("b", cores=1)
    machine = town.come("a")
    town.come("c")
    assert town.runs()["host-a"] == ["replica-1.0", "replica-1.1"]
    for name in town.runs()["host-a"]:
        town.die(machine, name)
    town.supervisor.scheduler.hosts.joined[machine.name].is_blocked = True
    town.pass_time(2.0)
    assert town.runs()["host-c"] == ["replica-1.0", "replica-1.1"]


def test_one_model_over_two_hosts_loses_one_of_them() -> None:
    town = Town(roster(1, 2), config_of(n_hosts=2, slots_here=0))
    one, two = town.come("a", cores=1), town.come("b", cores=1)
    assert len(one.processes) == len(two.processes) == 1
    town.pass_time(5.0)
    town.kill(one)
    town.pass_time(15.0)
    assert sorted(two.processes) == ["replica-0.0", "replica-0.1"]


def test_a_host_that_cannot_serve_the_job_leaves_and_says_why() -> None:
    town = Town(roster(2))
    machine = town.come("a", wrong="no such module")
    assert machine.halted
    assert machine.error == "no such module"
    assert "a (host-a) cannot take part: no such module" in town.said
    assert town.runs() == {"here": ["evaluator", "replica-0", "shard-0"]}


def test_a_host_without_the_data_does_not_end_the_job() -> None:
    """One that joined after hours, without its data, ended it for all the others."""
    town, machine = one_host(3)
    assert town.runs()["host-a"] == ["replica-1", "replica-2"]
    for name in ("replica-1", "replica-2"):
        record = town.supervisor.members.get(rl.Address(name))
        assert record is not None
        record.counters = {}  # it has not trained
    town.fail("replica-1", "no such file: frames.npy")
    assert machine.halted
    # It was ready, and so it ended as if the job were over: with exit code 0.
    assert machine.error == "replica 1 there: no such file: frames.npy"
    text = "a (host-a) cannot take part: replica 1 there: no such file: frames.npy"
    assert any(text in said for said in town.said)
    assert town.runs() == {"here": ["evaluator", "replica-0", "shard-0"]}
    town.come("b", cores=2)
    assert town.runs()["host-b"] == ["replica-1", "replica-2"]
    assert town.supervisor.shutdown.error is None


def test_a_host_without_the_held_out_data_does_not_end_the_job() -> None:
    """Its replicas trained, so the job was at fault for what only the evaluator lacked."""
    town = Town(roster(3), replace(config_of(n_hosts=1, slots_here=1), placement="spread"))
    machine = town.come("a", cores=8)
    assert {"evaluator", "replica-1"} < set(machine.processes)
    evaluator = town.supervisor.members.evaluator
    assert evaluator is not None
    evaluator.counters = {}
    town.fail("evaluator", "no such file: test.npy")
    assert machine.error == "evaluator there: no such file: test.npy"
    assert town.supervisor.shutdown.error is None
    assert "evaluator" in town.runs()["here"]


def test_shards_on_hosts_that_join_take_no_slots() -> None:
    town = Town(roster(3), replace(config_of(n_hosts=1), placement="spread"))
    machine = town.come("a", cores=2)
    assert sorted(machine.processes) == ["replica-1", "replica-2", "shard-0"]
    assert town.places[rl.Address("shard-0")] == "host-a"
    at = {role.name: role.at for role in town.supervisor.view(town.now).roles}
    assert at["shard-0"] == "a"


def test_a_shard_that_dies_again_and_again_tries_another_host() -> None:
    town = Town(roster(2), replace(config_of(n_hosts=2), placement="spread"))
    one, other = town.come("a", cores=1), town.come("b", cores=1)
    if "shard-0" not in one.processes:
        one, other = other, one
    for n_deaths in range(2):
        town.die(one, "shard-0")
        town.pass_time(0.5)
        assert ("shard-0" in one.processes) == (n_deaths == 0)
    assert "shard-0" in other.processes or "shard-0" in town.here.processes


def test_the_name_of_a_second_copy_is_a_name_of_a_role() -> None:
    """Hosts refused it: nobody had put a backup on one."""
    town = Town([("shard-0", "shard"), ("shard-0b", "shard"), *roster(1)[1:]], None)
    town.come("a")
    machine = town.machines[rl.Address("host-a")]
    role = wire.RoleAssignment(name="shard-0b", incarnation=7)
    assigned = wire.Assignments(incarnation=1, run="r", assignments=(role,))
    event = rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=assigned)
    assert rl.Launch(name=rl.Address("shard-0b"), incarnation=7) in machine.role.handle(
        event, town.now
    )


def test_a_job_all_of_whose_hosts_are_rejected_ends_with_the_reason() -> None:
    """It stayed at "waiting for hosts 0 %" for as long as anybody looked."""
    config = replace(config_of(n_hosts=2), slots_here=0)
    town = Town(roster(2), config)
    for name in ("a", "b"):
        town.come(name, wrong="module nets has another source here")
    town.pass_time(50.0)
    assert town.supervisor.phase == "waiting for hosts"  # another may come
    town.pass_time(20.0)
    why = "every host that joined was rejected: module nets has another source here"
    assert town.supervisor.shutdown.error == why


def test_a_job_goes_on_with_a_host_that_is_not_rejected() -> None:
    town = Town(roster(2), replace(config_of(n_hosts=2), slots_here=0))
    town.come("a", wrong="no such module")
    town.pass_time(50.0)
    town.come("b")
    town.pass_time(100.0)
    assert town.supervisor.shutdown.error is None
    assert not town.supervisor.has_begun  # it waits for the second one
    here = Town(roster(2), config_of(n_hosts=1))
    here.come("a", wrong="no such module")
    here.pass_time(70.0)
    assert "replica-0" in here.here.processes  # this host does what it can


def test_a_host_that_stays_learns_why_it_is_rejected() -> None:
    """It "began anew", as after any job, and nobody looked for what was wrong there."""
    config = HostAgentConfig(offer=offer_of("b", cores=2), stays=True)
    host = HostAgent(config, storage=Site(patience=600.0))
    sent_away = wire.Release(incarnation=1, again=False, reason="no such file", refused=True)
    host.handle(rl.Started(incarnation=1), 0.0)
    said, *others = host.handle(
        rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=sent_away), 1.0
    )
    assert isinstance(said, rl.Report)
    assert said.text == "rejected: no such file; waiting for another job"
    assert said.level == "warning"
    assert not any(isinstance(action, rl.Exit) for action in others)


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        pytest.param("replica-0", {"replica-0": 0.0}, id="here"),
        pytest.param("replica-1", {"replica-1": 5.0}, id="after it has trained"),
        pytest.param("replica-1", {"replica-1": 0.0, "replica-2": 64.0}, id="another trains"),
    ],
)
def test_what_is_no_fault_of_its_host_is_the_job(name: str, samples: dict[str, float]) -> None:
    town, _ = one_host(3)
    for role, count in samples.items():
        record = town.supervisor.members.get(rl.Address(role))
        assert record is not None
        record.counters = {"samples": count}
    town.fail(name, "a gradient is NaN")
    assert "a gradient is NaN" in str(town.supervisor.shutdown.error)


def test_the_end_of_the_job_is_the_end_of_its_hosts() -> None:
    town, machine = one_host(3)
    stays = town.come("b", config=HostAgentConfig(offer=offer_of("b"), stays=True))
    stop = wire.Stop(reason="Ctrl+C")
    town.supervisor.handle(rl.Received(sender=rl.USER, incarnation=0, message=stop), town.now)
    town.pass_time(10.0)
    assert town.here.halted
    assert machine.halted
    assert machine.error is None
    assert not stays.halted
    assert not stays.processes


def test_a_host_without_a_job_goes_after_a_while() -> None:
    town = Town(roster(1))
    town.here.is_dead = True
    machine = town.come("a")
    town.pass_time(599.0)
    assert machine.halted
    assert machine.error == "no job has taken this host in 600 s"


LOST = rl.PeerLost(peer=rl.SUPERVISOR, incarnation=0, reason="nothing listens at x any more")


def begin_anew(town: Town, machine: Machine) -> None:
    """Tell a machine so, and end the job before its offer arrives."""
    again = wire.Release(incarnation=1, again=True, reason="it was silent for too long")
    machine.role.handle(rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=again), town.now)
    town.kill(town.here)


def tell_lost(town: Town, machine: Machine, *, seconds: float) -> list[rl.Action]:
    """Let time pass; the driver finds all the while that nothing listens."""
    for _ in range(round(seconds)):
        town.pass_time(1.0)
        actions = machine.role.handle(LOST, town.now)
        if actions:
            return list(actions)
    return []


def test_a_host_whose_link_is_cut_waits_for_its_job() -> None:
    town, machine = one_host(3)
    begin_anew(town, machine)
    town.pass_time(100.0)
    assert not machine.halted


def test_a_host_that_restarts_as_its_job_ends_ends_too() -> None:
    """It was told so in a life that was over, and waited 600 s for the next job."""
    town, machine = one_host(3)
    begin_anew(town, machine)
    assert not tell_lost(town, machine, seconds=59)
    report, *_, halt = tell_lost(town, machine, seconds=3)
    assert isinstance(report, rl.Report)
    assert report.text == f"{LOST.reason}: the job is over; this host does not know how it ended"
    assert halt == rl.Exit(error=None)


@pytest.mark.parametrize("patience", [15.0, 60.0])
def test_a_host_waits_for_a_silent_supervisor_as_long_as_the_job_says(patience: float) -> None:
    """After 15 s it ended all its roles: the supervisor had only stood still."""
    town, machine = one_host(3, patience=patience)
    assert len(machine.processes) == 2
    town.kill(town.here)
    town.pass_time(patience - 1.0)
    assert len(machine.processes) == 2
    town.pass_time(3.0)
    assert not machine.processes
    assert not machine.halted
    town.leave(machine)
    assert machine.halted


def test_a_supervisor_that_was_stopped_finds_its_hosts_at_work() -> None:
    town, machine = one_host(3, patience=600.0)
    town.pass_time(5.0)
    before = town.runs()
    town.pause(town.here, 25.0)
    town.pass_time(10.0)
    assert town.runs() == before
    assert set(machine.processes.values()) == {1}
    assert not any("lost" in text or "silent" in text for text in town.said)


def test_a_late_report_of_an_earlier_life_of_a_host_changes_nothing() -> None:
    town, machine = one_host(2, config_of(n_hosts=1))
    town.pass_time(2.0)
    report = wire.HostReport(incarnation=1, ready=True, leaving=False, refusal="no", ended=())
    for message in (offer_of("a", 2, cores=2), report):
        event = rl.Received(sender=machine.name, incarnation=1, message=message)
        town.supervisor.handle(event, town.now)
    (view,) = town.supervisor.view(town.now).hosts
    assert view.state == "preparing"


def test_time_in_which_a_host_stood_still_is_no_silence_of_its_supervisor() -> None:
    host = HostAgent(HostAgentConfig(offer=offer_of("b")), storage=Site(patience=15.0))
    host.handle(rl.Started(incarnation=1), 0.0)
    taken = wire.Assignments(incarnation=1, run="r", assignments=())
    host.handle(rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=taken), 1.0)
    host.handle(rl.TimerFired(name="host:beat"), 1.0)
    host.handle(rl.TimerFired(name="host:beat"), 60.0)  # it was due at 1.5
    assert host.status()[0] == "preparing"
    host.handle(rl.TimerFired(name="host:beat"), 60.5)
    for beat in range(40):
        host.handle(rl.TimerFired(name="host:beat"), 61.0 + beat / 2)
    assert host.status()[0] == "offering"


def test_another_supervisor_at_that_place_need_not_wait_for_that() -> None:
    town, machine = one_host(3, patience=600.0)
    town.kill(town.here)
    town.pass_time(20.0)
    town.begin_another(roster(1), config_of(run="another", slots_here=0))
    town.pass_time(5.0)
    assert machine.processes == {"replica-0": 1}


def test_what_runs_there_goes_on_and_the_host_ends_after_it() -> None:
    """Another supervisor may take over; a minute after the first was killed all roles were."""
    town = Town(roster(3))
    config = HostAgentConfig(offer=offer_of("a"), over_seconds=10.0)
    machine = town.come("a", config=config, patience=600.0)
    assert machine.processes
    town.kill(town.here)
    assert not tell_lost(town, machine, seconds=500)
    for name in list(machine.processes):  # they have waited long enough
        town.die(machine, name)
    assert tell_lost(town, machine, seconds=1)[-1] == rl.Exit(error=None)


def test_a_host_that_stays_or_was_never_taken_waits_where_nothing_listens() -> None:
    town = Town(roster(1))
    stays = town.come("b", config=HostAgentConfig(offer=offer_of("b"), stays=True))
    town.kill(town.here)
    early = town.come("a")
    for machine in (stays, early):
        assert not tell_lost(town, machine, seconds=120)
        assert not machine.halted


def test_chunks_that_come_twice_show_that_the_supervisor_is_there() -> None:
    """A machine at a slow link gave up its job while the brief was still coming in."""
    town = Town(roster(2))
    town.lossy = JOB_SPEC
    machine = town.come("a")
    town.kill(town.here)
    piece = wire.FileChunk(document=JOB_SPEC, offset=9, n_bytes=99, content=wire.Blob(b"x"))
    for _ in range(20):
        town.pass_time(1.0)
        again = rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=piece)
        machine.role.handle(again, town.now)
    state, _ = machine.role.status()
    assert state == "preparing"


def test_unexpected_messages_are_rejected() -> None:
    town = Town(roster(1))
    town.come("a")
    host = rl.Address("host-a")
    for message in (wire.HeartbeatAck(), wire.FileRequest(document="secret", offset=0)):
        with pytest.raises(RemoteProtocolError):
            town.supervisor.handle(
                rl.Received(sender=host, incarnation=1, message=message), town.now
            )
    report = wire.HostReport(incarnation=1, ready=True, leaving=False, refusal=None, ended=())
    stranger = rl.Received(sender=rl.Address("host-b"), incarnation=1, message=report)
    assert not town.supervisor.handle(stranger, town.now)


class Machines(RuleBasedStateMachine):
    """However machines come, die, are cut off and leave, roles run once, or wait."""

    def __init__(self) -> None:
        super().__init__()
        self.town = Town(roster(4))
        self.n = 0

    @rule(cores=st.integers(1, 3))
    def come(self, cores: int) -> None:
        if self.n < 4:
            self.n += 1
            self.town.come(f"{self.n}", cores=cores)

    @rule(k=st.integers(0, 3), what=st.sampled_from(["kill", "cut", "leave", "die"]))
    def meet_with(self, k: int, what: str) -> None:
        living = [
            machine
            for name, machine in self.town.machines.items()
            if name != "here" and not (machine.halted or machine.is_dead)
        ]
        if not living:
            return
        machine = living[k % len(living)]
        if what == "kill":
            self.town.kill(machine)
        elif what == "cut":
            machine.is_cut = not machine.is_cut
        elif what == "leave":
            self.town.leave(machine)
        elif machine.processes:
            self.town.die(machine, next(iter(machine.processes)))

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.town.pass_time(seconds)

    def lives(self) -> list[tuple[rl.Address, int]]:
        return [life for m in self.town.machines.values() for life in m.processes.items()]

    @invariant()
    def no_life_runs_twice(self) -> None:
        assert len(set(self.lives())) == len(self.lives())

    @override
    def teardown(self) -> None:
        for machine in self.town.machines.values():
            machine.is_cut = False
        self.town.pass_time(120.0)
        assert sorted(self.lives()) == sorted(
            (record.name, record.incarnation)
            for record in self.town.supervisor.members
            if record.is_alive and record.presence is not Presence.WAITING
        )


TestMachines = Machines.TestCase
TestMachines.settings = settings(max_examples=3, stateful_step_count=10)
