"""Simulations run untraced: measuring coverage would make them 2.5 times as long."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    """Let the tests of each module alone say what is covered; here laws are tried."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)
