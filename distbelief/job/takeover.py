"""What is left of a run whose supervisor was killed: `--resume` takes it over while roles go on.

That it was killed shows a lock in the run directory, which ended with it (`run.directory`).
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, final

import msgspec

from distbelief.config.job import Job
from distbelief.core.errors import StorageError
from distbelief.job.hosts.join_server import JoinServer
from distbelief.job.launch.forkserver import END_SECONDS_MAX
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.launch.preflight import PreflightResult, read_result
from distbelief.job.launch.role_process import RoleSpec, read_spec
from distbelief.job.run.directory import RunDirectory
from distbelief.supervisor.handover import Handover
from distbelief.transport.address import Endpoint
from distbelief.transport.listen_config import ListenConfig


# In the memory of a run
ROLE_SPEC: Final = ".spec.json"
QUESTION: Final = ".question.json"
HANDOVER: Final = ".handover.json"

_LOOK_SECONDS: Final = 0.2  # between two looks at whether its processes have ended


@final
@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run whose supervisor was killed, and whose roles go on for `[cluster] patience`."""

    directory: Path  # of their memory
    spec: RoleSpec
    found: PreflightResult
    handover: Handover

    @classmethod
    def of(cls, run: RunDirectory) -> Self | None:
        """Return what the supervisor has left; None if no role of this run lives here."""
        directory = run.live_memory()
        if directory is None:
            return None
        try:
            spec = read_spec(str(directory / ROLE_SPEC))
            found = read_result(directory / QUESTION)
            handover = msgspec.json.decode((directory / HANDOVER).read_bytes(), type=Handover)
        except (OSError, msgspec.MsgspecError) as error:
            raise StorageError(
                f"{run.path}: its supervisor was killed, and its roles cannot be taken over "
                f"({error}): wait until they have saved and ended (see [cluster] patience)"
            ) from error
        assert found is not None
        return cls(directory=directory, spec=spec, found=found, handover=handover)

    def runs(self, job: Job) -> bool:
        return bytes(self.spec.job) == job.to_json()

    def listens_as(self, hosting: JoinServer | None) -> bool:
        was, now = self.spec.reach, ListenConfig() if hosting is None else hosting.reach
        return (was.host, bool(was.secret)) == (now.host, bool(now.secret))

    def hosting(self, hosting: JoinServer | None) -> JoinServer | None:
        """Return these settings for the place where its hosts look for it."""
        if hosting is None:
            return None
        port = Endpoint.parse(self.spec.supervisor).port
        reach = msgspec.structs.replace(hosting.reach, port=port, secret=self.spec.reach.secret)
        return replace(hosting, reach=reach)

    @classmethod
    def adopted(cls, run: RunDirectory, launcher: LocalLauncher) -> Self | None:
        """Take the processes of a run over, if any live; wait for those that are about to end."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while (live := cls.of(run)) is not None and time.monotonic() < deadline:
            alive = launcher.adopt(live.directory)
            if alive is not None:
                handover = msgspec.structs.replace(live.handover, alive=alive)
                return replace(live, handover=handover)
            time.sleep(_LOOK_SECONDS)
        return None
