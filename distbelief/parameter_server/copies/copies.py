"""The names of a shard's copies: "shard-0" alone, or with it "shard-0b"."""

from typing import Final

from distbelief.roles import Address


COPIES_MAX: Final = 2

_SUFFIX: Final = "b"  # of the other copy


def copy_names(shard_index: int, n_copies: int) -> tuple[Address, ...]:
    """Return the names of the copies of a shard.

    Raises:
        ValueError: so many copies cannot be had.
    """
    if not 1 <= n_copies <= COPIES_MAX:
        raise ValueError(f"n_copies is {n_copies}; use 1 to {COPIES_MAX}")
    name = f"shard-{shard_index}"
    return (Address(name), Address(f"{name}{_SUFFIX}"))[:n_copies]


def shard_of(copy: str) -> Address:
    """Return the shard that this is a copy of: its first copy has its name.

    Under that name the snapshots of both lie. Other roles' names are left alone.
    """
    if copy.startswith("shard-"):
        return Address(copy.removesuffix(_SUFFIX))
    return Address(copy)


def other_copy(copy: str) -> Address:
    """Return the name of the other one of two copies."""
    shard = shard_of(copy)
    return Address(f"{shard}{_SUFFIX}") if copy == shard else shard


def copies_of_all(n_shards: int, n_copies: int) -> tuple[tuple[Address, ...], tuple[Address, ...]]:
    """Return the first copies of all shards, and the second ones, if there are any."""
    names = [copy_names(index, n_copies) for index in range(n_shards)]
    return tuple(name[0] for name in names), tuple(name for copies in names for name in copies[1:])
