from distbelief.parameter_server.session_state import Staleness


def test_no_push_has_no_staleness() -> None:
    assert set(Staleness().counters().values()) == {0.0}


def test_mean_and_maximum_are_of_all_pushes_and_p95_of_the_recent() -> None:
    staleness = Staleness()
    staleness.add(5000)
    for value in range(1, 101):
        staleness.add(value)
    counters = staleness.counters()
    assert counters["staleness_mean"] == (5000 + 5050) / 101
    assert counters["staleness_max"] == 5000
    assert counters["staleness_p95"] == 96  # of 5000 and 1 to 100
    for _ in range(1024):
        staleness.add(3)
    assert staleness.counters()["staleness_p95"] == 3
    assert staleness.counters()["staleness_max"] == 5000
