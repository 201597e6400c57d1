"""Where a host keeps what it is told of a run, and starts the processes of its roles.

DIRECTORY/RUN/logs/ROLE.log       what each role reported here
DIRECTORY/RUN/snapshots/          of shards that ran here
(shared memory)/.spec.json        what the processes of roles read
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief import files
from distbelief.errors import JobError
from distbelief.job.hosts.brief import moved_here, patience_of, read_brief
from distbelief.job.hosts.workload import PREPARE
from distbelief.job.processes.launcher import Launcher
from distbelief.job.processes.preparing import VERDICT_BYTES_MAX, verdict_file
from distbelief.roles import Address, Event, Seconds
from distbelief.transport.reach import Reach
from distbelief.transport.shared_memory import FileMemory


N_SIBLINGS_MAX: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class SiteConfig:
    """What a host knows of itself.

    Attributes:
        supervisor: Where that is, with its key.
        reach: From where roles here can be reached.
        allowed: Modules whose functions a job may name.
        code: Directory where their modules, and the job's files, are looked for.
        directory: For logs and snapshots.
    """

    supervisor: str
    reach: Reach
    allowed: tuple[str, ...]
    code: Path
    directory: Path


@final
class HostSite:
    """Of one process that has joined; a run at a time."""

    def __init__(self, config: SiteConfig, *, launcher: Launcher) -> None:
        self._config = config
        self._launcher = launcher
        self._memory: FileMemory | None = None
        self._spec = Path()

    def furnish(self, brief: bytes) -> Seconds:
        """Check a run's brief, and write down what the processes of roles will read.

        Returns:
            How long roles of that run wait for a supervisor that is silent.

        Raises:
            DistBeliefError: this machine can be of no use to that run.
        """
        self.clear()
        told = read_brief(brief)
        patience = patience_of(told.spec.job)
        directory = _made(self._config.directory)
        memory = self._memory = FileMemory.make()
        plan = None
        if told.plan is not None:
            plan = memory.directory / ".plan.json"
            files.write(plan, told.plan.encode())
        spec = msgspec.structs.replace(
            told.spec,
            job=moved_here(told.spec.job, self._config.code),
            supervisor=self._config.supervisor,
            memory=str(memory.directory) if told.shares else "",
            snapshots=str(directory / "snapshots"),
            initial_file=None,
            plan=None if plan is None else str(plan),
            reach=self._config.reach,
            allowed=self._config.allowed,
        )
        self._spec = memory.directory / ".spec.json"
        # In a directory that only its user may enter: a secret may be in it.
        self._spec.write_bytes(msgspec.json.encode(spec))
        logs = directory / "logs"
        self._launcher.serve(
            spec=self._spec, log_of=lambda name: logs / f"{name}.log", has_machines=plan is not None
        )
        return patience

    def verdict(self) -> str | None:
        """Return what `PREPARE` has found wrong; None if nothing is."""
        try:
            with verdict_file(self._spec).open("rb") as file:
                text = file.read(VERDICT_BYTES_MAX).decode(errors="replace")
        except FileNotFoundError:
            return f"trying out the job failed here: see {self._config.directory}"
        except OSError as error:
            raise files.explained(error, self._spec, doing="read") from error
        return text or None

    def clear(self) -> None:
        """Give up the memory of the run before."""
        if self._memory is not None:
            self._memory.remove_all()
            self._memory = None


@final
class HostLauncher:
    """Starts roles, and what tries the run out, as a host wants it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def launch(self, name: Address, incarnation: int) -> None:
        """Start the process of this name."""
        if name == PREPARE:
            self._launcher.prepare(name, incarnation)
        else:
            self._launcher.launch(name, incarnation)

    def terminate(self, name: Address) -> None:
        """End it by force; nothing happens if it is gone already."""
        self._launcher.terminate(name)

    def fileno(self) -> int:
        """Return a descriptor that is readable while `events` has something."""
        return self._launcher.fileno()

    def events(self) -> Sequence[Event]:
        """Return what happened since the last call."""
        return self._launcher.events()


def _made(directory: Path) -> Path:
    """Return the next numbered directory that was not there yet, with one for logs."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(1, N_SIBLINGS_MAX):
            candidate = directory / str(number)
            with suppress(FileExistsError):  # perhaps made just now, by another join
                candidate.mkdir()
                (candidate / "logs").mkdir()
                return candidate
    except OSError as error:
        raise files.explained(error, directory, doing="make a directory in") from error
    raise JobError(f"{directory} has {N_SIBLINGS_MAX} runs: remove some")
