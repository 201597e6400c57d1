import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.reliable import AnswerTimer, Arrivals, Backoff, ReliableStream, Silence


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), window=st.integers(1, 8), loss=st.floats(0.0, 0.7))
def test_each_item_arrives_once_over_a_bad_link(seed: int, window: int, loss: float) -> None:
    rng = np.random.default_rng(seed)
    stream = ReliableStream[str, tuple[int, str]](
        lambda number, item: (number, item), backoff=Backoff(1.0, 4.0), window=window
    )
    arrivals = Arrivals(window=window)
    items = [f"item {i}" for i in range(20)]
    link: list[tuple[int, str]] = stream.put(items, 0.0)
    arrived: list[tuple[int, str]] = []
    now, n_acked = 0.0, 0
    while n_acked < len(items):
        now += 0.5
        assert now < 10_000
        link += stream.again(now)
        link = [link[i] for i in rng.permutation(len(link))]
        for number, item in link[:3]:
            if rng.random() < loss:
                continue
            if arrivals.add(number):
                arrived.append((number, item))
            if rng.random() >= loss:  # the acknowledgement may be lost too
                n_acked = arrivals.count
                link += stream.acked(n_acked, now)
        del link[:3]
    assert [item for _, item in sorted(arrived)] == items


def test_no_more_than_the_window_is_under_way() -> None:
    stream = ReliableStream[int, int](lambda n, _: n, backoff=Backoff(1.0, 4.0), window=3)
    assert stream.put(range(5), 0.0) == [0, 1, 2]
    assert stream.acked(2, 0.1) == [3, 4]
    assert stream.again(0.2) == []
    assert stream.again(1.2) == [2, 3, 4]
    assert stream.n_again == 3


def test_the_pause_doubles_until_the_peer_answers() -> None:
    stream = ReliableStream[int, int](lambda n, _: n, backoff=Backoff(1.0, 4.0))
    stream.put([7, 8], 0.0)
    for due in (1.0, 3.0, 7.0, 11.0):
        assert stream.again(due - 0.1) == []
        assert stream.again(due) == [0, 1]
    stream.acked(1, 12.0)
    assert stream.again(12.9) == []
    assert stream.again(13.0) == [1]


def test_numbers_that_were_never_sent_break_the_protocol() -> None:
    stream = ReliableStream[int, int](lambda n, _: n, backoff=Backoff(1.0, 4.0))
    stream.put([7], 0.0)
    with pytest.raises(RemoteProtocolError, match="before 2"):
        stream.acked(2, 0.0)
    arrivals = Arrivals(window=4)
    assert arrivals.add(3)
    with pytest.raises(RemoteProtocolError, match="item 4"):
        arrivals.add(4)


def test_our_own_delay_is_not_counted_as_silence() -> None:
    silence = Silence()
    silence.start(10.0)
    silence.expect(11.0)
    assert silence.woke(71.0) == 60.0
    assert silence.silent(71.0) == 1.0
    assert silence.stalled(71.0) == 1.0


def test_a_peer_that_answers_without_progress_is_stalled_and_not_silent() -> None:
    silence = Silence()
    silence.start(0.0)
    silence.heard(9.0, progress=False)
    assert silence.silent(10.0) == 1.0
    assert silence.stalled(10.0) == 10.0


FIRST, LONGEST, SILENCE, GAP = 0.5, 4.0, 60.0, 0.1


def exchanges(answers: Sequence[float]) -> list[tuple[int, float]]:
    """Return repetitions and seconds of questions whose two blocks take so long; infinity: lost.

    What was lost is answered soon after it was asked again.
    """
    timer = AnswerTimer(FIRST, LONGEST, silence_seconds_max=SILENCE, stall_seconds_max=600.0)
    now, found = 1.0, []
    for seconds in answers:
        timer.is_awaited = False
        at = timer.awaits(now) or timer.silence.timer_at
        timer.sent_at = timer.asked_at["fetch"] = now
        timer.is_moving = False
        ends, n_repeated = now + seconds, 0
        while at is not None and at < ends:
            timer.woke(at)
            again = timer.not_yet(at)
            if again is None:
                again, n_repeated = timer.repeated(at, under_way={"fetch": 2}), n_repeated + 1
                ends = at + GAP if ends == math.inf else ends
            at = again
        timer.blocks_came(ends, "fetch", 1, 2)
        timer.blocks_came(ends + GAP, "fetch", 1, 2)
        timer.progressed(ends + GAP)
        found.append((n_repeated, ends - now))
        now = ends + 2 * GAP
    return found


@pytest.mark.parametrize("seconds", [0.4, 0.8, 1.3, 3.0, 5.0])
def test_a_slow_answer_is_asked_for_once(seconds: float) -> None:
    """Four replicas kept a link of 51 Mbit/s busy, and repeated each question: 42 % of all bytes.

    After a repetition, the time between two blocks was taken for that of an answer, and an
    acknowledgement made the pause the first one again.
    """
    repeated = [n for n, _ in exchanges([seconds] * 30)]
    assert sum(repeated[:5]) <= 5
    assert sum(repeated[5:]) == 0


@given(st.lists(st.sampled_from([0.01, 0.01, 0.01, math.inf]), min_size=20, max_size=60))
def test_lost_answers_make_pauses_long_for_a_while_only(answers: list[float]) -> None:
    assert max(seconds for _, seconds in exchanges(answers)) <= SILENCE / 4 + GAP
    calm = [0.01] * 6
    (_, seconds) = exchanges([*answers, *calm, math.inf])[-1]
    assert seconds <= 2 * FIRST + GAP
