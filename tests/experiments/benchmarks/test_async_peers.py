from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.benchmarks import async_peers
from experiments.benchmarks.async_peers import EntrantFailedError, Entry
from experiments.benchmarks.peers.course import Course, load, run_together


TINY = [
    *("--rounds", "1", "--samples", "1280", "--held-out", "128", "--hidden", "16"),
    *("--learning-rate", "0.1", "--record-every", "2"),
]


def course(folder: Path, *, n_workers: int = 2, n_gradients: int = 8) -> Course:
    tiny = Course(
        data_folder=str(folder / "data"),
        run_folder=str(folder / "run"),
        sizes=(12, 8, 5),
        n_train=256,
        n_held_out=64,
        n_workers=n_workers,
        n_gradients=n_gradients,
        batch_size=16,
        learning_rate=0.1,
        record_every=1,
    )
    tiny.generate()
    return tiny


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_run_has_a_loss_for_every_record_and_uses_the_budget(tmp_path: Path) -> None:
    alone = replace(course(tmp_path, n_workers=1), pause_seconds=1e-3)
    run = async_peers.hold(async_peers.SINGLE, alone, target=0.0, seconds_max=50)
    assert run.shares == (8,)
    assert len(run.losses) == len(run.at) == 9  # before the first, after each
    assert run.losses[0] == pytest.approx(alone.held_out_loss(alone.net()))
    assert run.losses[-1] < run.losses[0]
    assert run.seconds is None


@pytest.mark.processes
@pytest.mark.slow
def test_an_entrant_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    entry = Entry(name="nobody", module="nobody")
    with pytest.raises(EntrantFailedError, match=r"status 1: .*peers.nobody"):
        async_peers.hold(entry, course(tmp_path), target=0.0, seconds_max=50)


def test_a_peer_that_is_not_installed_has_no_version_and_an_unknown_one_is_refused() -> None:
    entry = Entry(name="nobody", module="nobody", distribution="not-a-distribution")
    assert entry.version() is None
    assert replace(entry, python="/no/such/python").version() is None
    with pytest.raises(SystemExit, match="no peer is called 'hivemind'"):
        async_peers.main([*TINY, "--peer-python", "hivemind=/usr/bin/python3"])


def test_the_target_is_crossed_between_two_records() -> None:
    at, losses = [0.0, 1.0, 2.0], [2.0, 1.5, 0.5]
    assert async_peers.crossing(at, losses, target=1.0) == pytest.approx(1.5)
    assert async_peers.crossing(at, losses, target=3.0) == 0.0
    assert async_peers.crossing(at, losses, target=0.4) is None


def test_a_course_is_read_as_it_was_written_and_generated_twice_alike(tmp_path: Path) -> None:
    first = course(tmp_path / "a")
    assert Course.read(first.write()) == first
    second = course(tmp_path / "b")
    for values, again in zip(first.data(), second.data(), strict=True):
        assert torch.equal(values, again)
    net, flat = first.net(), torch.arange(float(first.n_parameters))
    load(net, flat)  # in the order of the net
    assert torch.equal(torch.nn.utils.parameters_to_vector(net.parameters()), flat)


@pytest.mark.processes
@pytest.mark.slow
def test_when_one_process_fails_all_are_ended() -> None:
    with pytest.raises(ChildProcessError, match="process 0 ended with status 3"):
        run_together(exit, [(3,)])
