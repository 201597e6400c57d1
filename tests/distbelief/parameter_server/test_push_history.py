"""A push that several shards have lost is one push."""

from hypothesis import given, strategies as st

from distbelief.parameter_server.client.buffers import Lost, lost_after, n_lost


def test_what_two_shards_lose_is_counted_once_where_it_is_the_same() -> None:
    first, second = (range(8, 11),), (range(10, 13), range(20, 21))
    assert n_lost([first, second]) == 6
    assert n_lost([first, first]) == 3
    assert n_lost([]) == n_lost([()]) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), max_size=12))
def test_it_is_what_a_list_of_pushes_would_tell(lives: list[tuple[int, float]]) -> None:
    values: list[int] = []
    lost: Lost = ()
    seen = 0
    for n_new, share in lives:
        values += range(seen + 1, seen + n_new + 1)
        seen += n_new
        values = values[: int(share * len(values))]  # it restarts from a snapshot
        lost = lost_after(lost, seen=seen, kept=len(values))
        gone = {number for part in lost for number in part}
        assert gone == set(range(1, seen + 1)) - set(values)
        assert n_lost([lost]) == len(gone)
