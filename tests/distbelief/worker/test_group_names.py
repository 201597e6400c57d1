"""Names of ranks, to and from group and rank."""

import pytest

from distbelief.worker.group import GroupRank, group_rank_of, member_names, rank_name


def test_a_name_gives_group_and_rank() -> None:
    assert rank_name(3, 0) == "replica-3.0"
    assert group_rank_of("replica-3.12") == GroupRank("replica-3", 12)
    assert GroupRank("replica-3", 12).replica == 3
    assert group_rank_of("evaluator") == GroupRank("evaluator", 0)
    assert group_rank_of("evaluator.2") == GroupRank("evaluator", 2)
    assert GroupRank("evaluator", 2).replica is None
    assert member_names("evaluator", 2) == ["evaluator", "evaluator.1"]


@pytest.mark.parametrize(
    "name", ["replica-3", "shard-0", "evaluator.0", "evaluator.01", "replica-x.1", ""]
)
def test_other_names_are_no_ranks(name: str) -> None:
    assert group_rank_of(name) is None
