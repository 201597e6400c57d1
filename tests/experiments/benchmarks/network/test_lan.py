"""A job over hosts: its bytes, counted from when all were ready, and the busiest card."""

import pytest

from distbelief.protocol.role import Address
from distbelief.supervisor.view import JobView, Message
from experiments.benchmarks.lan import Reading, bytes_of_busiest, reading_before, ready_after


def view_of(*messages: tuple[float, str]) -> JobView:
    told = tuple(
        Message(number=number, seconds=seconds, text=text)
        for number, (seconds, text) in enumerate(messages)
    )
    return JobView(seconds=30.0, messages=told)


def test_bytes_count_from_when_the_last_host_was_ready() -> None:
    """The status told of it a second later, when a small job had sent most: less than it sent."""
    view = view_of(
        (4.0, "host h1 is ready: 1 core"), (5.0, "host h2 is ready: 1 core"), (9.0, "a point")
    )
    readings = [Reading(at, [(n, n)]) for at, n in [(4.5, 1), (4.9, 2), (5.2, 900)]]
    assert reading_before(readings, ready_after(view)).counts == [(2, 2)]
    assert reading_before(readings[2:], ready_after(view)).counts == [(900, 900)]


def test_a_job_without_ready_hosts_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no host was ready"):
        ready_after(view_of((1.0, "a host has joined")))


def test_the_busiest_card_carries_what_leaves_its_host() -> None:
    replicas = {Address(f"replica-{k}"): k + 1 for k in range(4)}
    assert bytes_of_busiest(replicas, [80], n_replicas=4) == 320  # the shard is on the first host
    two = {**replicas, Address("shard-1"): 1}  # three pushes, and a fetch of the other shard
    assert bytes_of_busiest(two, [40, 40], n_replicas=4) == 160
    four = {**two, Address("shard-2"): 2, Address("shard-3"): 3}
    assert bytes_of_busiest(four, [20] * 4, n_replicas=4) == 3 * 20 + 3 * 20
