"""Waker: ends the wait of a poll."""

import select

from distbelief.transport.node import Waker


def is_awake(waker: Waker) -> bool:
    return bool(select.select([waker], [], [], 0.0)[0])


def test_it_stays_awake_until_it_is_cleared_however_often_it_was_woken() -> None:
    waker = Waker()
    waker.start()
    assert not is_awake(waker)
    for _ in range(3):
        waker.wake()
    assert is_awake(waker)
    waker.clear()
    assert not is_awake(waker)
    waker.clear()
    waker.close()


def test_it_may_be_woken_too_early_too_late_and_too_often() -> None:
    waker = Waker()
    waker.wake()
    waker.start()
    assert not is_awake(waker)
    for _ in range(10_000):  # more than the sockets hold
        waker.wake()
    assert is_awake(waker)
    waker.close()
    waker.wake()
    waker.close()
