"""What every test shares: reproducible examples, one torch thread."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings


# No deadlines: the first example of a law may pay for a lazy import of torch.
settings.register_profile(
    "ci", derandomize=True, max_examples=50, deadline=None, print_blob=True
)
settings.register_profile(
    "nightly", derandomize=False, max_examples=2000, deadline=None, print_blob=True
)
settings.load_profile("ci")  # `--hypothesis-profile=nightly` replaces it


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Sums have the same bits on every machine only if nobody splits them."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _untraced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run laws, and long jobs, without measuring coverage: it takes as long again.

    They try what the tests of each module alone, and shorter jobs, have covered.
    """
    if not request.node.get_closest_marker("untraced"):
        yield
        return
    tracer = sys.gettrace()
    sys.settrace(None)
    names = [name for name in os.environ if name.startswith("COVERAGE_PROCESS")]
    of_children = {name: os.environ.pop(name) for name in names}
    yield
    os.environ.update(of_children)
    sys.settrace(tracer)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that no core waits for it at the end."""
    items.sort(key=lambda item: "test_static" not in item.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
