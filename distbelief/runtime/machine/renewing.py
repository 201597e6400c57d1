"""The parameters that a machine keeps, fetched anew: for a step, or ahead of it.

A fetch that met an update half done is tried again after a moment, and one that brought
another version than the duty wants after a longer one. What was fetched for a life that
is over is not used: it may be older than what this machine has pushed.
"""

from collections.abc import Sequence
from typing import Final, final

from distbelief.parameter_server.client.client import Installed, ParameterClient
from distbelief.roles import Action, Compute, Computed, Cost, Seconds, SetTimer
from distbelief.runtime.machine.duty import Duty


INSTALL: Final = "machine:install"
RETRY: Final = "machine:retry"

TORN_RETRY_SECONDS: Final = 1e-3
OTHER_RETRY_SECONDS: Final = 0.05


@final
class Renewing:
    """Fetches and installs, step by step.

    Args:
        client: Of the shards that hold what this machine keeps.
        duty: Whose tensors they are, and who says when.

    Attributes:
        waits: A fetch is to be tried again soon.
    """

    def __init__(self, client: ParameterClient, duty: Duty) -> None:
        self.waits = False
        self._client = client
        self._duty = duty
        self._life = 0
        self._fetching = False  # begun, and not yet installed
        self._installing = (0, 0)  # for which life and step
        self._installed_for = -1  # which step of this life

    def begin(self, life: int) -> None:
        """Begin a life."""
        self._life = life
        self._installed_for = -1
        self._fetching = False

    def fetch(self, step: int, now: Seconds, *, ahead: bool) -> list[Action]:
        """Begin the fetch of a step, unless it is under way or must wait (DB-10)."""
        if self._fetching or not self.lacks(step):
            return []
        if not self._duty.may_fetch(ahead=ahead):
            return []
        self._fetching = True
        return self._client.begin_fetch(now)

    def lacks(self, step: int) -> bool:
        """Return whether this step still has to be fetched for."""
        return self._installed_for != step and self._duty.fetches_at(step)

    def install(self, step: int) -> list[Compute]:
        """Install what was fetched, if it is there."""
        if not (self._fetching and self._client.fetch_complete):
            return []
        values = self._duty.values
        self._installing = (self._life, step)
        work = Compute(
            name=INSTALL,
            work=self._duty.installing(self._client.install(values)),
            cost=Cost(n_bytes=2.0 * sum(value.nbytes for value in values)),
            remaining=lambda: self._client.readable_share,
        )
        return [work]

    def installed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Note what an install did."""
        result = event.result
        assert isinstance(result, Installed), result
        actions = self._client.installed(result, now)
        life, step = self._installing
        if life != self._life:
            return actions
        if result.torn:
            self.waits = True
            return [*actions, SetTimer(name=RETRY, at=now + TORN_RETRY_SECONDS)]
        self._fetching = False
        if not self._duty.fetched(event.seconds):
            self.waits = True
            return [*actions, SetTimer(name=RETRY, at=now + OTHER_RETRY_SECONDS)]
        self._installed_for = step
        return actions
