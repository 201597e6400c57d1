"""The parameters with which a replica computes: those of one evaluation.

    wanted --> fetched --> installed --> of the evaluation
      ^                        |
      +--- torn, or another ---+

They are fetched once for each evaluation, and used only if every shard says that they
are the version which the coordinator opened: so all portions of a batch are computed at
one point (DB-16).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, final

from distbelief.parameter_server.client.client import Installed, ParameterClient
from distbelief.roles import Action, Compute, Cost, Seconds, SetTimer
from sandblaster.replicas.portion_sums import PortionSums
from sandblaster.replicas.tries import Tries


INSTALL: Final = "replica:install"
RETRY: Final = "replica:retry"

TORN_RETRY_SECONDS: Final = 1e-3
"""After a fetch that met an update half done."""


@final
class Parameters:
    """What a replica has fetched, and of which evaluation.

    Args:
        client: Of all shards.
        sums: Whose model they are installed in.
        retry_seconds: After which it fetches again what is not the right version.
    """

    def __init__(
        self, client: ParameterClient, sums: PortionSums, *, retry_seconds: Seconds
    ) -> None:
        self._client = client
        self._sums = sums
        self._retry_seconds = retry_seconds
        self._due = False  # another evaluation has begun
        self._fetching = False
        self._installing = False
        self._waits = False  # before it fetches, or installs, again
        self._evaluation: tuple[int, int] | None = None  # of which they are

    def lacks(self, tries: Tries) -> bool:
        """Return whether these tries' evaluation has others."""
        return self._evaluation != tries.key

    def renew(self) -> None:
        """Another evaluation has begun."""
        self._due, self._waits = True, False

    def retry(self) -> None:
        """The pause before another go is over."""
        self._waits = False

    def fetch(self, tries: Tries, now: Seconds) -> Sequence[Action]:
        """Begin to fetch, once for an evaluation; again if that brought another one."""
        wanted = self._due or (self.lacks(tries) and not self._fetching)
        if not wanted or self._waits or self._installing:
            return []
        if all(one.is_computed for one in tries):
            return []
        self._due, self._fetching = False, True
        return self._client.begin_fetch(now)

    def install(self) -> Sequence[Action]:
        """Copy what was fetched into the model, if all of it is here."""
        if not self._fetching or self._due or self._waits:
            return []
        client = self._client
        if not client.ready or not client.fetch_complete:
            return []
        self._installing = True
        work = client.install(self._sums.values)
        return [
            Compute(
                name=INSTALL,
                work=partial(self._sums.install, work),
                cost=Cost(n_bytes=2.0 * self._sums.n_bytes),
                remaining=lambda: client.readable_share,
            )
        ]

    def installed(self, result: object, tries: Tries, now: Seconds) -> Sequence[Action]:
        """See what an install has brought."""
        assert isinstance(result, Installed), result
        self._installing = False
        actions = list(self._client.installed(result, now))
        wanted = tuple((one.incarnation, one.clock) for one in tries.versions)
        pause = TORN_RETRY_SECONDS
        if not result.torn:
            self._fetching = False
            if not self._due and self._client.versions == wanted:
                self._evaluation = tries.key
                return actions
            self._evaluation = None
            if not self._due:  # the coordinator will soon know of it
                pause = self._retry_seconds
        self._waits = True
        return [*actions, SetTimer(name=RETRY, at=now + pause)]
