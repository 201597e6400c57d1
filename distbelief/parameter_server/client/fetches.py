"""A client's fetches from all its shards: what is installed, and what was torn.

begin ... complete   install ~~> installed     (torn: again)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.client.fetching import ShardReader
from distbelief.parameter_server.client.link import Link
from distbelief.parameter_server.client.staging import Installed, installing
from distbelief.roles import Action, Seconds


@final
class ClientFetches:
    """One client's fetches.

    Args:
        links: Its shards, by index, in that order.

    Attributes:
        n_torn: Reads that were torn, each of one shard.
    """

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = links
        self._installing: dict[int, ShardReader] | None = None
        self.n_torn = 0

    @property
    def under_way(self) -> bool:
        """Does work touch the memory of shards?"""
        return self._installing is not None

    @property
    def clocks(self) -> tuple[int, ...]:
        """Per shard, the clock of the values installed last."""
        return tuple(link.fetching.clock for link in self._links.values())

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Per shard, its life and the clock of the values installed last."""
        return tuple(link.fetching.version for link in self._links.values())

    @property
    def complete(self) -> bool:
        """Can the fetch be installed? From shared memory it can be tried at once."""
        return all(link.fetching.complete for link in self._links.values())

    def begin(self, now: Seconds) -> list[Action]:
        """Fetch anew from every shard; see `ParameterClient.begin_fetch`."""
        if self._installing is not None:
            raise LocalProtocolError("begin_fetch while an install is under way")
        actions: list[Action] = []
        for link in self._links.values():
            actions += [*link.begin_fetch(now), *link.wait(now)]
        return actions

    def install(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Installed]:
        """Return the work that installs; see `ParameterClient.install`."""
        if self._installing is not None:
            raise LocalProtocolError("install while an install is under way")
        fetches = {index: link.fetching for index, link in self._links.items()}
        readers = {
            index: fetching.reader()
            for index, fetching in fetches.items()
            if fetching.wanted and fetching.complete
        }
        missing = [index for index, one in fetches.items() if not one.complete]
        self._installing = readers
        known = {
            index: -1 if fetching.wanted else fetching.clock for index, fetching in fetches.items()
        }
        return installing(readers, tensors, missing=missing, known=known)

    @property
    def readable_share(self) -> float:
        """Part of the shards from which the install under way can copy now."""
        readers = self._installing or {}
        n_readable = sum(reader.readable for reader in readers.values())
        return n_readable / max(len(self._links), 1)

    def installed(self, outcome: Installed, now: Seconds) -> list[Action]:
        """Note what an install did; see `ParameterClient.installed`."""
        if self._installing is None:
            raise LocalProtocolError("installed without an install")
        readers, self._installing = self._installing, None
        clocks = dict(zip(self._links, outcome.clocks, strict=True))
        actions: list[Action] = []
        for index, reader in readers.items():
            link = self._links[index]
            if index in outcome.torn:
                self.n_torn += 1
                actions += [*link.torn(now), *link.wait(now)]
            else:
                link.fetching.installed(clocks[index], reader)
        return actions
