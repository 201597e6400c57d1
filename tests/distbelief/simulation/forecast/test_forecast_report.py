"""The timeline of a run."""

from distbelief.protocol.role import Address, Executor
from distbelief.simulation.forecast.forecast_report import chrome_trace
from distbelief.simulation.forecast.run import Span, Timeline


R, S = Address("r"), Address("s")


def test_pieces_of_one_executor_never_overlap() -> None:
    """Each ended, it said, when its role handled that: a copy of 1 s, of which the
    role heard 2 s late, lay upon the step that had begun when the copy was done.

    time     0    1    2    3    4        as they were
    lane     copy step----------          copy from 0 to 1, step from 1 to 4
    told               copy     step      copy at 3, step at 4
    """
    copy = Span(role=R, executor=Executor.COMPUTE, name="copy", ends=3.0, seconds=1.0)
    read = Span(role=R, executor=Executor.DATA, name="read", ends=3.5, seconds=2.0)
    step = Span(role=R, executor=Executor.COMPUTE, name="step", ends=4.0, seconds=3.0)
    other = Span(role=S, executor=Executor.COMPUTE, name="apply", ends=4.0, seconds=4.0)
    trace = chrome_trace(Timeline(spans=[copy, read, step, other]))
    found = {event["name"]: (event["ts"], event["dur"]) for event in trace if event["ph"] == "X"}
    assert found == {
        "copy": (0.0, 1e6),
        "read": (1.5e6, 2e6),
        "step": (1e6, 3e6),
        "apply": (0.0, 4e6),
    }
