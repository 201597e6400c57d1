"""Programs of rounds under faults: whatever breaks, the bits of one process.

`programs` says what a seed stands for. A seed that fails is played alone by
SIMULATION_SEEDS=FIRST:STOP.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from distbelief.parameter_server.command_log import CommandExecutor
from distbelief.parameter_server.rows import RoundRows
from distbelief.protocol import (
    AddRows,
    Assignment,
    CommitRound,
    Restore,
    RowsTaken,
    ShardCommand,
    Stop,
    TakeRows,
    WorkReport,
)
from distbelief.protocol.role import Address
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import DiskFull, Kill, Slow
from distbelief.simulation.trace import SimulationFailed
from sandblaster.chunks import COORDINATOR
from sandblaster.coordinator import round_queue
from sandblaster.coordinator.round_queue import RoundQueue
from sandblaster.coordinator.workers import WorkerState
from sandblaster.optimizers import base
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.topics import Topics
from tests.sandblaster.strads.mixing import Mixing
from tests.simulation import programs
from tests.simulation.programs import (
    FIRST_OF_ALL,
    FIRST_OF_FLIGHTS,
    FIRST_OF_RESUMED,
    FIRST_OF_TOPICS,
    Part,
    ResumedRounds,
    Rounds,
    Which,
    drawn,
    drawn_resumed,
)
from tests.simulation.scene import sends
from tests.simulation.test_seeds import chunks, name, play_seeds


FILE = "tests/simulation/test_programs.py"
SELDOM = (
    "backups",
    "blocks lost",
    "coordinators restarted",
    "replicas restarted",
    "series",
    "shards restarted",
)
IN_FLIGHT: tuple[Which, ...] = ("mixing", "topics in flight")
KINDS: tuple[Which, ...] = ("lasso", "planned lasso", "factors", "topics", *IN_FLIGHT)


def played(seed: int) -> Counter[str]:
    scene = drawn(seed)
    scene.play()
    cluster = scene.cluster
    return Counter(
        {
            "backups": int(scene.status(COORDINATOR)["backups"]),
            "blocks lost": sum("lost its block" in one.text for _, one in cluster.reports),
            "coordinators restarted": cluster.incarnation(COORDINATOR) - 1,
            "replicas restarted": sum(cluster.incarnation(r) - 1 for r in scene.replicas),
            "series": int(scene.status(COORDINATOR)["series"]) % 4096 - 1,
            "shards restarted": sum(cluster.incarnation(s) - 1 for s in scene.shards),
        }
    )


@pytest.mark.parametrize("seeds", chunks(range(10), 10), ids=name)
def test_whatever_breaks_the_bits_are_the_same(seeds: range) -> None:
    play_seeds(seeds, played, file=FILE, seldom=())


@pytest.mark.parametrize("seeds", chunks(range(FIRST_OF_TOPICS, FIRST_OF_TOPICS + 4), 4), ids=name)
def test_the_same_for_topics(seeds: range) -> None:
    play_seeds(seeds, played, file=FILE, seldom=())


@pytest.mark.parametrize(
    "seeds", chunks(range(FIRST_OF_FLIGHTS, FIRST_OF_FLIGHTS + 4), 4), ids=name
)
def test_st1_to_st5_the_same_with_rounds_in_flight(seeds: range) -> None:
    play_seeds(seeds, played, file=FILE, seldom=())


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds", chunks(range(FIRST_OF_FLIGHTS + 4, FIRST_OF_FLIGHTS + 2004), 500), ids=name
)
def test_the_same_for_two_thousand_seeds_with_rounds_in_flight(seeds: range) -> None:
    play_seeds(seeds, played, file=FILE, seldom=SELDOM)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds", chunks(range(FIRST_OF_TOPICS + 4, FIRST_OF_TOPICS + 2004), 500), ids=name
)
def test_the_same_for_two_thousand_seeds_of_topics(seeds: range) -> None:
    # Blocks keep topics from round to round, so tasks get second attempts in few rounds.
    seldom = [what for what in SELDOM if what != "backups"]
    play_seeds(seeds, played, file=FILE, seldom=seldom)


# Of 100 seeds as few as one has a backup task: too few to tell whether it is seldom.
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", chunks(range(10, 2010), 500), ids=name)
def test_the_same_for_two_thousand_seeds(seeds: range) -> None:
    play_seeds(seeds, played, file=FILE, seldom=SELDOM)


def test_a_coordinator_that_has_resumed_saves_its_journal_before_the_first_command() -> None:
    """Rounds that add nothing send none: a requested checkpoint waited for the journal for ever."""
    drawn(FIRST_OF_ALL + 58).play()


@pytest.mark.parametrize("seed", [558, 1433])
def test_a_repeated_save_is_not_of_a_savepoint_that_shards_have_not_heard_of(seed: int) -> None:
    """The disk was full, and had space again; shards were told to drop what they still needed."""
    drawn(FIRST_OF_ALL + seed).play()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", chunks(range(FIRST_OF_ALL, FIRST_OF_ALL + 2000), 1000), ids=name)
def test_all_programs_have_the_same_bits_for_two_thousand_seeds(seeds: range) -> None:
    play_seeds(seeds, played, file=FILE, seldom=SELDOM)


def resumed(seed: int) -> Counter[str]:
    scene = drawn_resumed(seed)
    scene.play()
    return Counter({"interrupted": scene.n_interrupted, "ended at a bound": scene.n_bounded})


@pytest.mark.parametrize(
    "seeds", chunks(range(FIRST_OF_RESUMED, FIRST_OF_RESUMED + 3), 3), ids=name
)
def test_the_same_if_jobs_are_interrupted_and_resumed(seeds: range) -> None:
    play_seeds(seeds, resumed, file=FILE, seldom=())


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seeds", chunks(range(FIRST_OF_RESUMED + 3, FIRST_OF_RESUMED + 1003), 500), ids=name
)
def test_the_same_for_a_thousand_jobs_that_are_resumed(seeds: range) -> None:
    play_seeds(seeds, resumed, file=FILE, seldom=("interrupted", "ended at a bound"))


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_a_job_ends_when_its_journal_is_on_disk(share: float) -> None:
    """A job was interrupted, or had ended, while the disk of its coordinator was full. The journal
    knew nothing of this end, but the shards saved it: what was saved before could not be resumed,
    and --resume was refused for ever."""
    end = end_of("lasso", 3)
    full = DiskFull(at=0.2 * end, seconds=(share - 0.3) * end)
    parts = [Part(seconds=share * end, faults=(full,)), Part(seconds=0.0)]
    scene = ResumedRounds(which="lasso", parts=parts)
    scene.play()
    assert scene.n_interrupted == (share < 1.0)


def test_a_job_whose_disk_is_full_for_long_at_its_end_can_be_resumed() -> None:
    """After 10 s the coordinator ended without its journal, as if all were well. Then there was
    space again, the shards saved this end, and --resume was refused for ever."""
    end = end_of("lasso", 3)
    full = DiskFull(at=0.2 * end, seconds=11.0)
    parts = [Part(seconds=12.0, faults=(full,)), Part(seconds=0.0)]
    scene = ResumedRounds(which="lasso", parts=parts)
    scene.play()
    assert scene.n_failed == 1


@pytest.mark.parametrize("kill_after", [0.0, 0.005])
def test_jobs_that_are_killed_before_they_save_resume_from_the_end_before(
    kill_after: float,
) -> None:
    """The journal dropped the savepoint with which the shards had ended, for newer ones that they
    had in memory only. Killed then, the job began anew, without a word, or was refused."""
    part = Part(seconds=0.4 * end_of("lasso", 3))
    killed = replace(part, kill_after=kill_after)
    scene = ResumedRounds(which="lasso", parts=[part, *[killed] * 5, Part(seconds=0.0)])
    begun: list[ShardCommand] = []

    def see(happening: HandledEvent) -> None:
        commands = [one for _, one in sends(happening, ShardCommand)]
        begun.extend(one for one in commands if isinstance(one.task, Restore))

    scene.cluster.observe(see)
    scene.play()
    of_series = {one.series: one.task for one in reversed(begun)}
    assert len(of_series) == 7
    assert len({*map(repr, [*of_series.values()][:-1])}) == 1


# --- each fault, in each application ---


@cache
def end_of(which: Which, n_replicas: int) -> float:
    return Rounds(which=which, n_replicas=n_replicas).moments(lambda _: True)[-1]


@pytest.mark.each_value
@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("role", ["shard-1", COORDINATOR])  # of replicas: `test_in_rounds`
def test_a_killed_role_changes_no_bit(which: Which, role: str) -> None:
    end = end_of(which, 3)
    kill = Kill(at=0.6 * end, role=Address(role), restart_after=0.01)
    scene = Rounds(which=which, faults=(kill,), saves=(0.3 * end,))
    scene.play()
    assert scene.cluster.incarnation(Address(role)) == 2


@pytest.mark.each_value
@pytest.mark.parametrize("n_replicas", [1, 2, 4])
@pytest.mark.parametrize("n_shards", [1, 3])
def test_the_same_bits_for_any_number_of_workers_and_shards(n_replicas: int, n_shards: int) -> None:
    Rounds(n_replicas=n_replicas, n_shards=n_shards, which="planned lasso").play()
    Rounds(n_replicas=n_replicas, n_shards=n_shards, which="factors").play()
    Rounds(n_replicas=n_replicas, n_shards=n_shards, which="topics").play()


def test_a_slow_worker_s_task_gets_a_second_attempt() -> None:
    slow = Slow(at=0.005, role=Address("replica-1"), factor=400.0, seconds=10.0)
    scene = Rounds(which="lasso", faults=(slow,))
    scene.play()
    assert scene.status(COORDINATOR)["backups"]


def test_a_slow_worker_s_task_stays_with_it_where_blocks_keep_something() -> None:
    slow = Slow(at=0.005, role=Address("replica-1"), factor=400.0, seconds=1.0)
    scene = Rounds(which="factors", faults=(slow,))
    scene.play()
    assert not scene.status(COORDINATOR)["backups"]
    assert scene.now > 0.5  # it was waited for


@pytest.mark.each_value
@pytest.mark.parametrize("which", [one for one in KINDS if one != "topics in flight"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_a_stopped_run_returns_to_a_mark_and_goes_on_from_there(which: Which, share: float) -> None:
    scene = Rounds(which=which, n_replicas=2)
    scene.cluster.run(until=share * end_of(which, 2))
    for replica in scene.replicas:  # they are stopped, too
        scene.cluster.kill(replica)
    scene.tell(COORDINATOR, Stop(reason="test"))
    scene.run_until(lambda: COORDINATOR in scene.cluster.halted, within=1.0)
    assert scene.coordinator.reason is Reason.STOPPED
    for one in (COORDINATOR, *scene.replicas):
        scene.cluster.restart(one)
    scene.run_until(lambda: scene.coordinator.reason is not None)
    scene.check_bits()


def test_messages_have_room_for_the_tasks_and_reports_of_many_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = 2000  # of which one task or report takes up to 1,502
    for module in (base, round_queue):
        monkeypatch.setattr(module, "N_BYTES_MAX", room)
    sizes: list[int] = []

    def see(happening: HandledEvent) -> None:
        for _, assignment in sends(happening, Assignment):
            sizes.append(sum(len(one.content) for one in assignment.tasks))
        for _, report in sends(happening, WorkReport):
            sizes.append(sum(len(one.content) for one in report.results))

    for which in KINDS:
        scene = Rounds(which=which, n_replicas=1)
        scene.cluster.observe(see)
        scene.play()
    assert room / 2 < max(sizes) <= room


@pytest.mark.parametrize("which", ["planned lasso", "topics"])
def test_the_worker_that_comes_first_does_not_keep_all_blocks(which: Which) -> None:
    """It had them for the whole round, and those that keep something for four passes."""
    first, second = Address("replica-0"), Address("replica-1")
    scene = Rounds(which=which, n_replicas=2, n_shards=1, latency_seconds=1e-3, late=(second,))
    given: list[Assignment] = []
    scene.cluster.observe(lambda one: given.extend(new for _, new in sends(one, Assignment)))
    scene.run_until(lambda: bool(given))
    n_blocks = scene.program.n_blocks
    assert len(given[0].tasks) == n_blocks  # there is nobody else
    # It reports before the first one has its rows, which take three messages.
    scene.cluster.restart(second)
    scene.play()
    blocks = [scene.status(one)["blocks"] for one in (first, second)]
    assert blocks == [n_blocks - n_blocks // 2, n_blocks // 2]


@pytest.mark.parametrize("which", ["factors", "topics"])
def test_a_worker_that_comes_after_a_round_gets_no_block_that_others_keep(which: Which) -> None:
    """It came while shards committed the first round, whose blocks may move. The coordinator dealt
    some of these to it, and so it computed the next round from blocks that it had just loaded: the
    job ended with other bits, and nobody noticed."""
    late = Address("replica-1")
    scene = Rounds(which=which, n_replicas=2, latency_seconds=1e-3, late=(late,))
    commits: list[ShardCommand] = []

    def see(happening: HandledEvent) -> None:
        commands = [one for _, one in sends(happening, ShardCommand)]
        commits.extend(one for one in commands if isinstance(one.task, CommitRound))

    scene.cluster.observe(see)
    scene.run_until(lambda: bool(commits))
    scene.cluster.restart(late)  # its report takes 1 ms, the answers of the shards 2 ms
    scene.play()


def test_predictions_are_sent_to_a_worker_once_after_each_change() -> None:
    """Each task took them, 140 numbers here: of a Lasso with many samples that was most bytes."""
    scene = Rounds(which="lasso", n_replicas=1, n_shards=1)
    n_sent, changed_by = 0, set[int]()

    def see(happening: HandledEvent) -> None:
        nonlocal n_sent
        n_sent += sum(one.values.size == 140 for _, one in sends(happening, RowsTaken))
        adds = [one for _, one in sends(happening, AddRows) if one.table == "predictor"]
        changed_by.update(one.number for one in adds)

    scene.cluster.observe(see)
    scene.play()
    assert len(changed_by) - 1 <= n_sent <= len(changed_by) + 1


def test_a_round_that_adds_nothing_needs_no_command() -> None:
    """Workers waited for the shards after each scoring, measuring and planning."""
    scene = Rounds(which="planned lasso")
    committed, added = set[int](), set[int]()

    def see(happening: HandledEvent) -> None:
        for _, command in sends(happening, ShardCommand):
            committed.update({command.number} if isinstance(command.task, CommitRound) else ())
        added.update(one.number + 1 for _, one in sends(happening, AddRows))

    scene.cluster.observe(see)
    scene.play()
    assert committed == added
    assert len(committed) + 10 < scene.status(COORDINATOR)["evaluations"]


def test_with_rounds_in_flight_workers_go_on_while_one_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is slow for a while, one after the other: of rounds in step all of that adds up."""
    slow = tuple(
        Slow(at=0.004 * k, role=Address(f"replica-{k % 4}"), factor=12.0, seconds=0.004)
        for k in range(1, 60)
    )
    seconds: list[float] = []
    for staleness in (0, 1, 4):
        program = Mixing(staleness=staleness, n_rounds=40, n_flights=1)
        monkeypatch.setattr(programs, "program_of", lambda *_, one=program: one)
        scene = Rounds(n_replicas=4, faults=slow, backups=False)
        scene.run_until(lambda one=scene: COORDINATOR in one.cluster.halted)  # type: ignore[misc]
        seconds.append(scene.now)
    assert seconds[1] < 0.75 * seconds[0]
    assert seconds[2] < 0.4 * seconds[0]


# --- a protocol without one of its rules ---


_take_report, _commit = RoundQueue.take_report, RoundRows.commit


def _stays(self: RoundQueue, worker: WorkerState, report: WorkReport, now: float) -> None:
    before = dict(self._counters.blocks)
    _take_report(self, worker, report, now)
    self._counters.blocks.update(before)


def _all_staged(
    self: RoundRows, vector: object, tokens: object, pulls: object, *, number: int
) -> None:
    tokens = sorted(self._staged)
    _commit(self, vector, tokens, pulls, number=number)  # type: ignore[arg-type] # as there


def _moves(self: RoundQueue, now: float) -> None:
    self._may_move = True
    _assign(self, now)


def _newest(self: CommandExecutor, message: TakeRows) -> RowsTaken:
    versions, self._vector_store.versions = self._vector_store.versions, {}
    try:
        return _rows(self, message)
    finally:
        self._vector_store.versions = versions


def _drop_all(self: RoundRows, *, before: int) -> None:
    del before
    _drop(self, before=1 << 60)


def _always(self: RoundRows, message: TakeRows) -> bool:
    del self
    return message.known > 0


def _nothing(*_: object, **_options: object) -> None:
    pass


_assign = RoundQueue.assign
_rows, _drop = CommandExecutor.rows, RoundRows.drop

VARIANTS: dict[str, tuple[type, str, Callable[..., object], tuple[int, ...]]] = {
    "a block stays with who lost the race": (RoundQueue, "take_report", _stays, (62, 126, 221)),
    "all that is staged counts": (RoundRows, "commit", _all_staged, (45, 66, 97)),
    "a lost block is loaded elsewhere": (RoundQueue, "assign", _moves, (15, 16, 17)),
    "rows are the newest ones": (CommandExecutor, "rows", _newest, (2_000_000, 2_000_001)),
    "a commit drops what later rounds add": (RoundRows, "drop", _drop_all, (2_000_000, 2_000_001)),
    "rows never change": (RoundRows, "is_known", _always, (2_000_000, 2_000_001)),
    "topics are never taken again": (Topics, "_begin_anew", _nothing, (1_000_006, 1_000_014)),
}
"""What is replaced, by what, and seeds that notice."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_protocol_without_one_of_its_rules_is_caught(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, method, broken, seeds = VARIANTS[variant]
    monkeypatch.setattr(kind, method, broken)
    for seed in seeds:
        try:
            drawn(seed).play()
        except (AssertionError, SimulationFailed):
            return
    pytest.fail("nothing notices")
