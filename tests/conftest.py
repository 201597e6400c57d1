"""What every test shares: reproducible examples, one torch thread."""

import gc
import os
import signal
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.tracing import (
    is_untraced,
    measure_imports,
    measure_test,
    measured_fixture,
    unseen_children,
)


# No deadlines: the first example of a law may pay for a lazy import of torch.
settings.register_profile("ci", derandomize=True, max_examples=30, deadline=None, print_blob=True)
settings.register_profile(
    "nightly", derandomize=False, max_examples=2000, deadline=None, print_blob=True
)
settings.load_profile("ci")  # `--hypothesis-profile=nightly` replaces it

measure_imports()

# A shell script that runs the suite in the background has it, and so all that it starts, ignore
# Ctrl+C. Tests that press it then waited for ever for the end of what they had started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Everything is imported once and stays: the collector need not look at it so often, and not at
# all while tests are collected.
gc.set_threshold(10_000, 20, 20)
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Sums have the same bits on every machine only if nobody splits them."""
    import torch  # noqa: PLC0415 -- the process that deals tests out does without

    torch.set_num_threads(int(os.environ.get("TORCH_THREADS", "1")))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs that the test's own process trains draw no curve, which takes as long as they do."""
    monkeypatch.setattr("distbelief.job.trainer.draw_curve", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def _untraced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run long jobs, processes included, without measuring their coverage.

    They try what the tests of each module alone, and shorter jobs, have covered.
    """
    of_children = unseen_children() if is_untraced(request.node) else {}
    yield
    os.environ.update(of_children)


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that no core waits for it at the end."""
    leave_combinations(items)
    items.sort(key=duration)
    for item in items:
        if "tests/experiments/" in item.nodeid:  # their modules are not measured
            item.add_marker(pytest.mark.untraced)


def leave_combinations(items: list[pytest.Item]) -> None:
    """Of a test marked `each_value`, leave to the soak what has no value of its own.

    Each value of each parameter stays in at least one case; values that stay change together.
    """
    cases_of: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {"each_value", "soak"}
        if isinstance(item, pytest.Function) and marks == {"each_value"}:
            cases_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in cases_of.values():
        # As if drawn by lot: else values of two parameters would be equal wherever they can be.
        cases.sort(key=lambda case: zlib.crc32(case.nodeid.encode()))
        values = {case: {*enumerate(case.callspec._idlist)} for case in cases}
        lacking = set().union(*values.values())
        while lacking:
            best = max(cases, key=lambda case: len(values[case] & lacking))
            lacking -= values[best]
            cases.remove(best)
        for case in cases:
            case.add_marker(pytest.mark.soak)


def duration(item: pytest.Item) -> int:
    """Return 0 for the longest: the type checker's; then what is said to be slow."""
    if "test_static" in item.nodeid:
        return 0
    return 1 if item.get_closest_marker("slow") else 2


def pytest_collection_finish(session: pytest.Session) -> None:
    """Measure tests, now that every conftest has marked what is not to be measured."""
    gc.collect()
    gc.freeze()
    gc.enable()
    for item in session.items:
        if isinstance(item, pytest.Function) and not is_untraced(item):
            measure_test(item)


def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    if fixturedef.func.__module__.startswith("tests.") and not is_untraced(request.node):
        vars(fixturedef)["func"] = measured_fixture(fixturedef.func)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
