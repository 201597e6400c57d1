"""Without any one rule of the protocol, some scenario breaks an invariant.

    SIMULATION_VARIANTS=1 .venv/bin/python -m pytest -n 0 -k broken_rule -rA FILE

searches the first such seed of every variant and prints the table.
"""

import pytest

from tests.simulation.scenarios import play
from tests.simulation.variants import VARIANTS, assert_noticed


@pytest.mark.slow
@pytest.mark.timeout(300)  # a changed scenario makes the test search for a new seed
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert_noticed(name, VARIANTS, play)
