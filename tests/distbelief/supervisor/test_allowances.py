"""How far each replica may train: the supervisor's side, message by message."""

from collections.abc import Sequence

import pytest

from distbelief.config.job import StopTable
from distbelief.core.spans import Epochs, Span, Spans
from distbelief.protocol import SamplesApplied, StartTraining, Stop
from distbelief.protocol.role import Action, TimerFired
from distbelief.supervisor.membership import FEW, Kind, Rate
from distbelief.supervisor.metrics import PreviousTotals
from tests.distbelief.supervisor.test_supervisor import Desk, a_job as desk_of, letters, sent


TOTAL, BATCH = 1000, 10
REPLICAS = ("replica-0", "replica-1")
ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("replica-0", "replica"),
    ("replica-1", "replica"),
)


def a_job(stop: StopTable | None = None, *, before: PreviousTotals | None = None) -> Desk:
    stop, before = stop or StopTable(samples=TOTAL), before or PreviousTotals()
    return desk_of(ROSTER, stop, batch_size=BATCH, before=before)


def bounds(actions: Sequence[Action]) -> dict[str, int | None]:
    """Return the newest bound of each replica that is told one."""
    return {who: begin.samples for who, begin in letters(actions, StartTraining)}


def report(desk: Desk, name: str, samples: int) -> list[Action]:
    return desk.progress(name, samples // BATCH)


def test_bounds_never_add_up_to_more_than_the_job() -> None:
    desk = a_job()
    told = bounds(desk.join())
    assert told == {"replica-0": 250, "replica-1": 250}  # the rest is in the pool
    for step in range(1, 40):
        desk.now += 0.1
        told |= bounds(report(desk, "replica-0", step * BATCH))
        assert sum(bound or 0 for bound in told.values()) <= TOTAL
    assert (told["replica-0"] or 0) >= 390  # raised before it got there


def test_a_fast_replica_of_a_short_job_leaves_the_others_their_share() -> None:
    """It got what it trains in two seconds, all of the job: the others were idle."""
    desk = a_job()
    told = bounds(desk.join())
    for step in range(1, 45):
        desk.now += 0.01  # 1,000 samples a second
        told |= bounds(report(desk, "replica-0", step * BATCH))
    share = (TOTAL - 440) / 2  # of what is left
    assert (told["replica-0"] or 0) <= 440 + share + BATCH


def test_a_replica_holds_no_more_than_it_soon_trains() -> None:
    """All stood still; one's speed was from before, and it got a third of the job: they waited."""
    desk = a_job(StopTable(samples=1_000_000))
    desk.join()
    for step in range(1, 25):
        desk.now += 10.0
        for name in REPLICAS:
            report(desk, name, 10_000 * step)
    desk.now += 30.0
    report(desk, "replica-1", 240_000 + BATCH)
    told = bounds(desk.beat("replica-0", samples=240_000))
    assert told["replica-0"] == 240_000 + 30 * 1000


def test_a_bound_that_is_not_heard_of_is_said_again() -> None:
    desk = a_job()
    bound = bounds(desk.join())["replica-0"]
    report(desk, "replica-0", BATCH)
    assert bounds(desk.beat("replica-0", samples=10)) == {"replica-0": bound}
    assert bounds(desk.beat("replica-0", samples=10, samples_allowed=bound or 0)) == {}


def test_what_a_dead_replica_held_others_get() -> None:
    desk = a_job()
    desk.join()
    desk.die("replica-1")
    desk.now += 1.0
    told = bounds(report(desk, "replica-0", 740))
    assert told["replica-0"] == 740 + 70  # a quarter of what is left
    assert bounds(desk.join("replica-1"))["replica-1"] == 70


def test_a_resumed_job_deals_out_what_is_left() -> None:
    desk = a_job(before=PreviousTotals(samples={"replica-0": 500, "replica-1": 480}))
    assert bounds(desk.join()) == {"replica-0": 510, "replica-1": 490}


def test_without_a_number_of_samples_there_are_no_bounds() -> None:
    desk = a_job(StopTable(seconds=100.0))
    assert bounds(desk.join()) == {"replica-0": None, "replica-1": None}
    assert bounds(report(desk, "replica-0", BATCH)) == {}
    assert bounds(desk.beat("replica-0", samples=10)) == {}


def test_a_lost_report_of_a_replica_that_waits_is_made_up_for() -> None:
    """It waits at its bound, and reports no more: the job never ended."""
    desk = a_job(StopTable(samples=20))
    assert bounds(desk.join()) == {"replica-0": 10, "replica-1": 10}
    report(desk, "replica-0", 10)
    desk.beat("replica-1", samples=10, samples_allowed=10)
    assert set(sent(desk.pass_time(0.5), Stop)) == set(REPLICAS)


def test_those_that_were_just_started_keep_their_share_of_a_short_job() -> None:
    """The first one that came was dealt half of the job, and then the rest: one trained alone."""
    epochs = Epochs(n_samples=400, batch_size=BATCH)
    desk = desk_of(ROSTER, StopTable(samples=400), batch_size=BATCH, dealt=epochs)
    desk.join("shard-0", "replica-0")  # replica-1 is on its way
    told = desk.hear("shard-0", SamplesApplied(spans=()))
    told += desk.beat("replica-0", ranges=0.0)
    dealt = Spans(span for _, begin in letters(told, StartTraining) for span in begin.ranges or ())
    assert dealt.n_positions == 100  # half of its share, as of all replicas


def test_a_replica_has_its_next_long_push_before_shards_have_the_last() -> None:
    """It held what it trains in 30 s, less than a push of 64 s: it waited for each round to end."""
    epochs = Epochs(n_samples=100 * BATCH * 64, batch_size=BATCH, n_push=64)
    stop = StopTable(samples=epochs.n_samples)
    desk = desk_of(ROSTER, stop, batch_size=BATCH, dealt=epochs)
    told = desk.join("shard-0", "replica-0")
    told += desk.hear("shard-0", SamplesApplied(spans=()))
    for step in range(64):  # one a second
        desk.now += 1.0
        told += desk.progress("replica-0", step + 1)
        told += desk.beat("replica-0", ranges=1.0, ranges_done=0.0)
    dealt = Spans(span for _, begin in letters(told, StartTraining) for span in begin.ranges or ())
    assert dealt.n_positions == 2 * 64 * BATCH


@pytest.mark.parametrize(
    ("n_pushes", "n_push", "each", "apart"),
    [(9, 64, 0.25, 8.0), (13.5, 64, 0.25, 8.0), (17.1, 64, 0.25, 8.0)]
    + [(n / 4, 4, 12.5, 14.0) for n in (*range(40, 48), *range(66, 78))],
)
def test_replicas_with_long_pushes_end_at_about_the_same_time(
    n_pushes: float,
    n_push: int,
    each: float,  # seconds of a batch
    apart: float,
) -> None:
    """Pushes were dealt whole: at the end, some had one of 16 s to train, and the others none.

    Shares were rounded up to batches: of few long ones, some had two, and the others none.
    While 17 to 19 were left, those trained and not applied were dealt as if they were left, too.
    """
    names = [f"replica-{n}" for n in range(4)]
    roster: list[tuple[str, Kind]] = [("shard-0", "shard"), *((n, "replica") for n in names)]
    total = round(n_pushes * n_push) * BATCH
    epochs = Epochs(n_samples=total, batch_size=BATCH, n_push=n_push)
    ends = StopTable(samples=total)
    desk = desk_of(roster, ends, batch_size=BATCH, dealt=epochs, cuts_pushes=True)
    ranges: dict[str, list[Span]] = {name: [] for name in names}
    samples, ended, done = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0), Spans()

    def hear(actions: Sequence[Action]) -> None:
        for who, begin in letters(actions, StartTraining):
            ranges[who] += (begin.ranges or ())[len(ranges[who]) - (begin.n_before or 0) :]

    hear(desk.join())
    hear(desk.hear("shard-0", SamplesApplied(spans=())))
    until = dict(zip(names, (0.25, 3.0, 7.0, 13.0), strict=True))  # when its next batch ends
    until = {name: late + each for name, late in until.items()}
    while done.n_positions < total and desk.now < 1000.0:
        desk.now += 0.25
        for name in names:
            held = sum(stop - start for start, stop in ranges[name])
            if samples[name] >= held:
                until[name] = max(until[name], desk.now + each)  # it waits
            elif until[name] <= desk.now:
                samples[name] += BATCH
                ended[name], until[name] = desk.now, until[name] + each
                hear(report(desk, name, samples[name]))
            n, left = 0, samples[name]
            for start, stop in ranges[name]:  # pushed when it is whole
                if left >= stop - start:
                    n, done = n + 1, done | Spans([(start, stop)])
                left -= stop - start
            n_ranges, ahead = len(ranges[name]), held - samples[name]
            hear(desk.beat(name, ranges=n_ranges, ranges_done=n, samples_ahead=ahead))
        hear(desk.hear("shard-0", SamplesApplied(spans=done.to_wire())))
    assert done == Spans([(0, total)])
    assert sum(samples.values()) == total
    assert max(ended.values()) - min(ended.values()) <= apart


def test_many_replicas_train_the_whole_job_and_no_more() -> None:
    """The first one got half of the job, the next half of the rest: the others had nothing to do.

    Of more than 256, rates are looked at now and then, and were not before the first look.
    """
    names, n_steps = [f"replica-{n}" for n in range(FEW + 4)], 20
    total = n_steps * BATCH * len(names)
    roster: list[tuple[str, Kind]] = [("shard-0", "shard"), *((n, "replica") for n in names)]
    desk = desk_of(roster, StopTable(samples=total), batch_size=BATCH)
    told, samples, lost = bounds(desk.join()), dict.fromkeys(names, 0), set(names[100:110])
    for step in range(6 * n_steps):
        desk.now += 0.25
        for index, name in enumerate(names):
            if name in lost and samples[name]:
                continue  # silent from then on
            if samples[name] < (told.get(name) or 0) and (step + index) % 3:
                samples[name] += BATCH
                told |= bounds(report(desk, name, samples[name]))
            else:
                told |= bounds(desk.beat(name, samples=samples[name]))
        told |= bounds(desk.handle(TimerFired(name="supervisor:tick")))
        # Once they count as silent, others get what they held.
        held = {name: samples[name] if name in lost and step > 12 else told[name] for name in told}
        assert sum(bound or 0 for bound in held.values()) <= total
    assert sum(samples.values()) == total


def test_the_rate_of_a_replica_that_reports_seldom_is_that_of_its_heartbeats() -> None:
    """Of 10,000 replicas each reports every 50 s: the first ones were dealt all of a short job."""
    desk = a_job()
    desk.join()
    report(desk, "replica-0", 20)
    record = desk.supervisor.members.of("replica")[0]
    for samples in (20, 40, 60, 60, 60):  # a long step changes nothing
        desk.now += 2.0
        desk.beat("replica-0", samples=samples)
    assert record.rate.per_second == 40 / 6.0


@pytest.mark.parametrize(("beat", "between"), [(3, 15), (6, 30), (10, 50)])
def test_the_rate_of_long_steps_is_that_of_several(beat: int, between: int) -> None:
    """Of 6,000 replicas 380 seemed 1.5 times as fast, were dealt more, and ended a minute late.

    They told of one step when it had ended, and of another at a heartbeat after it.
    """
    rate, samples, told = Rate(), 0, -between
    for half in range(1, 800):  # seconds
        now = half / 2
        if half % 25 == 0:
            samples += 8
            if now - told >= between:
                told = half // 2
                rate.add(now, samples)
        if half % (2 * beat) == 0 and rate.lacks(now, samples):
            rate.add(now, samples)
        if now > 100:
            assert rate.per_second == pytest.approx(8 / 12.5, rel=0.26)
