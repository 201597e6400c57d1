"""Without any one rule of the protocol, some scenario breaks an invariant.

    SIMULATION_VARIANTS=1 .venv/bin/python -m pytest -n 0 -k broken_rule -rA FILE

searches the first such seed of every variant and prints the table.
"""

import pytest

from tests.simulation.scenarios import play
from tests.simulation.variants import VARIANTS, assert_noticed


CAUGHT_BY = {
    "no watermark": 0,
    "acknowledged before it is applied": 0,
    "client incarnations are ignored": 1,
    "push buffer is reused too early": 0,
    "blocks are taken in any order": 43,
    "applied before all blocks are here": 17,
    "late open session lowers the watermark": 1,
    "late session opened is accepted": 75,
    "open session does not wait for the push being applied": 11,
    "version is unpinned too early": 23,
    "values are even while they are written": 0,
    "torn read is accepted": 0,
    "blocks of a former fetch are taken": 47,
    "watermarks are forgotten in the snapshot": 102,
    "snapshot is taken while a push is applied": 0,
    "acknowledged before the backup has it": 9,
    "primary drops its backup without permission": 15,
    "demoted primary is acknowledged": 17,
    "receiver incarnation is ignored": 307,
    "former primaries are accepted": 52,
    "state block of another clock is accepted": 187,
    "pushes are taken in any order": 5,
    "in sync is reported too early": 27,
    "backup takes over before it is in sync": 27,
    "backup does not know the clients": 1,
}
"""A seed known to catch each variant; the test tries it first to save time."""


@pytest.mark.slow
@pytest.mark.timeout(300)  # a changed scenario makes the test search for a new seed
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert_noticed(name, VARIANTS[name], play, CAUGHT_BY)
