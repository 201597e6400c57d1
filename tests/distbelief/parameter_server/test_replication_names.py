"""The names of a shard's copies."""

import pytest

from distbelief.parameter_server.replication import all_copy_names, copy_names, other_copy, shard_of
from distbelief.roles.role import Address


def test_one_copy_has_the_name_of_its_shard() -> None:
    assert copy_names(12, 1) == ("shard-12",)
    assert all_copy_names(2, 1) == (("shard-0", "shard-1"), ())


def test_two_copies_know_each_other_and_their_shard() -> None:
    first, second = copy_names(3, 2)
    assert (first, second) == ("shard-3", "shard-3b")
    assert (other_copy(first), other_copy(second)) == (second, first)
    assert shard_of(first) == shard_of(second) == first
    assert all_copy_names(2, 2) == (("shard-0", "shard-1"), ("shard-0b", "shard-1b"))


def test_the_names_of_other_roles_are_left_alone() -> None:
    assert shard_of("replica-b") == Address("replica-b")


@pytest.mark.parametrize("n", [0, 3])
def test_other_numbers_of_copies_cannot_be_had(n: int) -> None:
    with pytest.raises(ValueError, match=f"n_copies is {n}; use 1 to 2"):
        copy_names(0, n)
