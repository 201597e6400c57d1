"""Names of machines, there and back."""

import pytest

from distbelief.worker.group import Place, evaluator_name, machine_name, member_names, place_of


def test_a_name_says_which_machine() -> None:
    assert machine_name(3, 0) == "replica-3.0"
    assert place_of("replica-3.12") == Place("replica-3", 12)
    assert Place("replica-3", 12).replica == 3
    assert evaluator_name(0) == "evaluator"
    assert place_of("evaluator") == Place("evaluator", 0)
    assert place_of("evaluator.2") == Place("evaluator", 2)
    assert Place("evaluator", 2).replica is None
    assert member_names("evaluator", 2) == ["evaluator", "evaluator.1"]


@pytest.mark.parametrize(
    "name", ["replica-3", "shard-0", "evaluator.0", "evaluator.01", "replica-x.1", ""]
)
def test_other_names_are_no_machines(name: str) -> None:
    assert place_of(name) is None
