"""How long loops wait for each other, and for whom."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

import distbelief
from distbelief.core.errors import JobError
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.simulation.network import Link
from tests.distbelief.serve.loops import Server


BOUNDED = ExchangePolicy(send="delta", staleness=3)


def counters_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    seconds: tuple[float, float],
    link: Link | None = None,
    policy: ExchangePolicy = BOUNDED,
) -> list[dict[str, float]]:
    """Return the counters of two loops after 8 steps of so many seconds each."""
    n = 1 << 18
    parameters = [nn.Parameter(torch.zeros(n)) for _ in range(2)]
    server = Server(
        parameters[:1],
        rule=distbelief.SGD(learning_rate=1.0),
        n_loops=2,
        policy=policy,
        host="" if link else "host-0",
        link=link,
    )
    found: list[dict[str, float]] = []

    def loop(me: int) -> Callable[[], None]:
        inner = torch.optim.SGD([parameters[me]], lr=1.0)
        exchange = server.exchange(monkeypatch, inner, every=1)

        def run() -> None:
            for _ in range(8):
                server.compute(seconds[me])
                parameters[me].grad = torch.ones(n)
                exchange.step()
            exchange.finish()
            found.append(exchange.counters())

        return run

    server.run_together(loop(0), loop(1))
    return found


def waits(counters: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in counters.items() if name.startswith("waits_")}


def test_a_worker_that_waits_for_its_own_push_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A push took a second, and the other worker, which was as fast, was blamed for it."""
    link = Link(bytes_per_second=1 << 20, jitter=0.0)
    for counters in counters_of(monkeypatch, seconds=(0.1, 0.1), link=link):
        assert sum(waits(counters).values()) < 0.2
        assert counters["clock_gap_max"] <= 3


def test_the_largest_gap_outlives_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = sorted(
        counters_of(monkeypatch, seconds=(0.1, 0.5)), key=lambda one: one["clock_gap_max"]
    )
    assert slow["clock_gap_max"] <= 1
    assert fast["clock_gap_max"] == 4  # staleness + 1: it has ended a tick, and waits (E3)
    assert "clock_gap" not in fast
    assert waits(fast).keys() == {"waits_worker-1"}
    assert waits(fast)["waits_worker-1"] > 0.5


def test_a_round_waits_for_the_worker_whose_push_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All had ended the same tick by then, so that the one with the least name was blamed."""
    policy = ExchangePolicy(send="delta", staleness=0, round=Round(), weight="mean")
    for seconds, slow in (((0.1, 0.5), 1), ((0.5, 0.1), 0)):
        found = counters_of(monkeypatch, seconds=seconds, policy=policy)
        blamed = sorted((waits(one) for one in found), key=lambda one: sum(one.values()))
        assert sum(blamed[0].values()) < 0.2  # the slow one waits for nobody
        assert blamed[1][f"waits_worker-{slow}"] == pytest.approx(8 * 0.4, rel=0.2)


@pytest.mark.parametrize("is_exchange", [True, False])
def test_loops_in_one_thread_that_would_wait_for_each_other_are_told_so(
    monkeypatch: pytest.MonkeyPatch, *, is_exchange: bool
) -> None:
    """Each round took its 10 s of grace, without a word."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    send: Literal["delta", "gradient"] = "delta" if is_exchange else "gradient"
    server = Server(
        parameters[:1],
        rule=distbelief.SGD(learning_rate=1.0),
        n_loops=2,
        policy=ExchangePolicy(send=send, staleness=0, round=Round(), weight="mean"),
    )

    def loop(parameter: nn.Parameter) -> distbelief.DownpourSGD | distbelief.Exchange:
        if not is_exchange:
            return server.optimizer(monkeypatch, [parameter])
        return server.exchange(monkeypatch, torch.optim.SGD([parameter], lr=1.0), every=1)

    first, second = map(loop, parameters)

    def step(parameter: nn.Parameter, of: distbelief.DownpourSGD | distbelief.Exchange) -> None:
        parameter.grad = torch.ones(4)
        of.step()

    def steps() -> None:
        for _ in range(2):
            step(parameters[0], first)
            step(parameters[1], second)

    with pytest.raises(JobError, match="which the same thread steps"):
        steps()
    second.finish()
    step(parameters[0], first)
    first.finish()
