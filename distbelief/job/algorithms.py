"""Algorithms are found by name among the entry points of installed packages."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec

from distbelief.errors import JobFileError
from distbelief.job import tables


if TYPE_CHECKING:  # these import torch
    from distbelief.roles import Role
    from distbelief.runtime.task import BuildContext, RosterEntry


GROUP: Final = "distbelief.algorithms"
"""Entry-point group: each names an object as `Algorithm` describes it."""


class Algorithm(Protocol):
    """What an entry point of the group `GROUP` names."""

    @property
    def name(self) -> str:
        """As in the job file."""
        ...

    @property
    def config(self) -> type[msgspec.Struct]:
        """Struct of the [algorithm] table less its `name`; has `loss`, `batch_size`."""
        ...

    @property
    def fields(self) -> Sequence[str]:
        """Figures it reports besides samples, loss and metric."""
        ...

    def roster(
        self,
        config: object,
        *,
        n_replicas: int,
        n_shards: int,
        shard_copies: int = 1,
        evaluates: bool = True,
    ) -> "list[RosterEntry]":
        """Return the roles of a job."""
        ...

    def build(self, name: str, *, config: object, context: "BuildContext") -> "Role":
        """Return the role of this name."""
        ...


def find(name: object) -> EntryPoint:
    """Return the entry point of this name; nothing is imported yet.

    Raises:
        JobFileError: there is none; it lists those installed.
    """
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if isinstance(name, str) and name in installed:
        return installed[name]
    known = ", ".join(sorted(installed)) or "none; is the package itself installed?"
    near = tables.nearest(str(name), installed) if installed else ""
    mend = near if near.startswith("Did") else ""
    raise JobFileError(
        f"is not installed. {mend} Installed: {known}".replace("  ", " ")
    )


def load(point: EntryPoint) -> Algorithm:
    """Return the algorithm itself, which may import torch.

    Raises:
        JobFileError: it cannot be imported.
    """
    try:
        return cast("Algorithm", point.load())
    except (ImportError, AttributeError) as error:
        raise JobFileError(
            f"{point.value}, installed as algorithm {point.name!r}, cannot be "
            f"imported: {error}"
        ) from error
