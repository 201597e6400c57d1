"""What Strom 2015 and DL4J's gradient sharing say of steps of one size, and where this differs."""

import numpy as np
import pytest

from distbelief.parameter_server.codecs import History, Residual, Threshold
from distbelief.parameter_server.codecs.threshold import Adaptive
from tests.distbelief.parameter_server.codecs.residuals import assert_nothing_is_lost, push


HEADER = 4  # words


def some(n_elements: int, n_steps: int, size: float = 1.0) -> Residual:
    """Return numbers of which so many, with both signs, have this size."""
    numbers = np.zeros(n_elements, np.float32)
    places = np.linspace(0, n_elements - 1, n_steps).astype(int)
    numbers[places] = np.where(np.arange(n_steps) % 2, np.float32(-size), np.float32(size))
    return numbers


def test_sr_1_at_most_one_step_of_an_element_is_in_a_push_and_the_rest_is_delayed() -> None:
    codec, residual = Threshold(tau=1.0), np.array([5.0, -2.5, 0.75, 1.0], np.float32)
    total = np.zeros(4, np.float32)
    for n_pushes in range(1, 7):
        pushed = push(codec, residual)
        assert set(np.abs(pushed.sent)) <= {0.0, 1.0}
        residual, total = pushed.rest, total + pushed.sent
        assert np.array_equal(np.abs(total), np.minimum([5, 2, 0, 1], n_pushes))
    assert np.array_equal(residual, np.array([0.0, -0.5, 0.75, 0.0], np.float32))


def test_dj_1_messages_of_several_workers_are_added_up() -> None:
    """Each worker's step is what was decoded, summed; that its own waits is in its residual."""
    codec = Threshold(tau=1.0)
    pushes = [push(codec, some(64, n, size=1.5)) for n in (3, 5, 8)]
    moved = np.sum([one.sent for one in pushes], axis=0)
    held = np.sum([one.rest for one in pushes], axis=0)
    assert np.array_equal(moved + held, np.sum([one.before for one in pushes], axis=0))


@pytest.mark.parametrize("n_steps", [0, 1, 2, 100])
def test_dj_2_a_list_has_a_word_for_each_element_of_size_tau_or_more(n_steps: int) -> None:
    """A single one is sent, too, which DL4J leaves out."""
    numbers = some(4096, n_steps)
    numbers[numbers == 0] = np.nextafter(np.float32(1.0), np.float32(0.0))
    pushed = push(Threshold(tau=1.0), numbers)
    assert len(pushed.words) == HEADER + n_steps
    assert np.count_nonzero(pushed.sent) == n_steps
    assert set(np.abs(pushed.sent)) <= {0.0, 1.0}
    assert_nothing_is_lost(pushed)


def test_dj_3_a_bitmap_has_two_bits_an_element() -> None:
    """A sixteenth of the bytes; without half steps, so the rest is that of a list."""
    pushed = push(Threshold(tau=1.0), some(1_000_000, 500_000, size=1.75))
    assert 4 * len(pushed.words) == 4 * (1_000_000 // 16 + HEADER)
    assert 4_000_000 / (4 * len(pushed.words)) > 15.99
    assert set(np.abs(pushed.rest)) == {0.0, 0.75}
    assert_nothing_is_lost(pushed)


@pytest.mark.parametrize(("n_steps", "is_bitmap"), [(64, False), (65, True)])
def test_dj_4_the_shorter_of_both_is_sent_without_a_memory(
    n_steps: int, *, is_bitmap: bool
) -> None:
    """No message is thrown away at a switch, with what it has taken off the residual."""
    pushed = push(Threshold(tau=1.0), some(1024, n_steps))
    assert bool(pushed.words[0]) is is_bitmap
    assert len(pushed.words) == HEADER + 64
    assert_nothing_is_lost(pushed)


def test_dj_5_tau_follows_the_share_that_is_sent() -> None:
    codec = Threshold(adaptive=Adaptive())
    assert (codec.tau, Adaptive().least, Adaptive().most) == (1e-3, 1e-4, 1e-2)

    def after(n_pushes: int, share: float) -> float:
        history = History()
        for _ in range(n_pushes):
            cut = codec.choose([], history)
            n_sent = round(share * 1_000_000)
            history = codec.after(history, cut, n_sent=n_sent, n_elements=1_000_000)
        return history.tau or codec.tau

    assert after(20, 0.00005) == pytest.approx(1e-3 / 2)
    assert after(20, 0.02) == pytest.approx(2e-3)
    assert after(133, 0.02) == pytest.approx(0.1, rel=0.02)
    assert after(20, 0.001) == after(20, 1e-4) == after(20, 1e-2) == 1e-3
    with pytest.raises(ValueError, match="decay"):
        Adaptive(decay=0.49)


def test_dj_6_every_fifth_push_the_rest_is_clipped_to_five_steps_and_what_is_lost_counts() -> None:
    codec = Threshold(tau=1.0, clip=5.0)
    for n_pushes in range(11):
        pushed = push(codec, some(64, 8, size=9.0), History(n_pushes=n_pushes))
        is_clipped = n_pushes > 0 and n_pushes % 5 == 0
        assert np.abs(pushed.rest).max() == (5.0 if is_clipped else 8.0)
        assert pushed.encoded.clipped_size == (8 * 3.0 if is_clipped else 0.0)
        assert_nothing_is_lost(pushed)
    with pytest.raises(ValueError, match="clip"):
        Threshold(clip=0.5)


def test_x_5_a_push_of_strom_s_net_takes_a_fifth_of_a_megabyte() -> None:
    """14.6 million parameters, of which 0.36 % are sent."""
    n_elements = 14_600_000
    pushed = push(Threshold(tau=1.0), some(n_elements, round(0.0036 * n_elements)))
    assert 4 * len(pushed.words) / 1e6 == pytest.approx(0.21, abs=0.001)
