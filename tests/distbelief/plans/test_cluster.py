"""Outage traces as text, and errors in them."""

import pytest

from distbelief.graph.graph import GraphError
from distbelief.plans.cluster import Lost, read_trace


TRACE = """seconds,machine,away
# in no order
20, 1, 5
10,0,300

end,3600
"""


def test_a_trace_is_read_in_order_of_time() -> None:
    trace = read_trace(TRACE, n_machines=2)
    assert trace.covers == 3600
    assert trace.outages == (
        Lost(at=10.0, machine=0, away=300.0),
        Lost(at=20.0, machine=1, away=5.0),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ends without the line 'end,SECONDS'"),
        ("10,0,5", "ends without the line 'end,SECONDS'"),
        ("10,0,5\nend,9", "an outage at 10.0 s, after its end"),
        ("10,0\nend,9", "line 1 of a trace is '10,0': write seconds,machine,away"),
        ("10,2,5\nend,99", "is '10,2,5': .* machine 0 to 1, and seconds"),
        ("10,-1,5\nend,99", "is '10,-1,5'"),
        ("-1,0,5\nend,99", "line 1 of a trace is '-1,0,5'"),
        ("1,0,soon\nend,99", "is '1,0,soon'"),
        ("1,0,5\nend", "ends without the line 'end,SECONDS'"),
        ("1,0,5\nend,inf", "ends without the line 'end,SECONDS'"),
    ],
)
def test_a_mistake_names_the_line_and_the_fix(text: str, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        read_trace(text, n_machines=2)


def test_a_trace_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.plans.cluster.N_OUTAGES_MAX", 2)
    with pytest.raises(GraphError, match="has 3 lines; use 2 at most"):
        read_trace("1,0,5\n2,0,5\nend,9", n_machines=1)
