"""Runs the ranks of one plan as processes of this host, without parameter servers.

    folder/spec.json            the run's specification
    folder/.ROLE.1              socket of each rank
    folder/MACHINE.endpoint     its endpoint, once it listens
    folder/output.npy           outputs, each rank its own regions
    folder/gradient-K.npy       gradient of tensor K
    folder/MACHINE.json, .alive, .log    measurements, heartbeat, log

If a rank fails, or is silent for too long, all are ended.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief.errors import DistBeliefError, JobError
from distbelief.roles.role import Seconds
from distbelief.task.task import Sample, TaskSpec


# --- heartbeats ---

BEAT_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 3.0  # a rank is reported

DEAD_SECONDS: Final = 10.0  # all are ended

START_SECONDS_MAX: Final = 120.0  # until the first heartbeat: importing torch takes long

STILL_SECONDS: Final = 1.0  # a longer gap between two looks is our own delay


def beat(path: Path) -> None:
    """Touch this file twice a second, as long as the process lives."""

    def touch() -> None:
        while True:
            with suppress(OSError):  # the folder is gone at the end
                path.touch()
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=touch, daemon=True).start()


@final
class ProcessHeartbeat:
    """Checks the heartbeat files of some ranks."""

    def __init__(self, paths: Sequence[Path], *, pids: Sequence[int], now: Seconds) -> None:
        self._paths = paths
        self._pids = pids
        self._stamps = [0] * len(paths)  # of the newest touch, in ns; 0: none
        self._heard_at = [now] * len(paths)
        self._named: set[int] = set()
        self._looked_at = now

    def look(self, now: Seconds, *, left: Sequence[int]) -> list[str]:
        """Look at the files; return lines about ranks that are silent, or back.

        Raises:
            DistBeliefError: a rank has been silent for too long.
        """
        gap, self._looked_at = now - self._looked_at, now
        told = []
        for machine in left:
            if gap > STILL_SECONDS:  # our own delay, not theirs
                self._heard_at[machine] += gap
            text = self._look_at(machine, now)
            if text is not None:
                told.append(text)
        return told

    def _look_at(self, machine: int, now: Seconds) -> str | None:
        stamp = _stamp(self._paths[machine])
        silence = now - self._heard_at[machine]
        label = f"machine {machine} (process {self._pids[machine]})"
        if stamp != self._stamps[machine]:
            self._stamps[machine], self._heard_at[machine] = stamp, now
            if machine not in self._named:
                return None
            self._named.discard(machine)
            return f"{label} is back after {silence:.1f} s"
        bound = DEAD_SECONDS if stamp else START_SECONDS_MAX
        if silence > bound:
            raise DistBeliefError(
                f"{label} has been silent for {silence:.1f} s: it was stopped, or the host is "
                "overloaded. Try again"
            )
        if not stamp or silence <= SILENT_SECONDS or machine in self._named:
            return None
        self._named.add(machine)
        return f"{label} silent for {silence:.1f} s: giving up in {bound - silence:.0f} s"


def _stamp(path: Path) -> int:
    # 0 if the file is missing.
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


END_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.02
SECONDS_MAX: Final = 24 * 3600.0
SEED: Final = (0, 0)  # of all steps

_LOG_MAX: Final = 2000  # characters of it that are shown


@final
class VerificationRun(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a run, the same for all ranks."""

    folder: str  # for all files
    run: str  # in every message
    task: TaskSpec
    sample: Sample
    plan: str
    weights: str  # path of whole tensors by name (.safetensors)
    inputs: str  # path of (n_samples, *shape), .npy
    targets: str = ""  # path; "" to predict
    n_samples: int
    n_steps: int
    n_warm: int = 0  # steps at the start that do not count
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1  # of torch, per process
    import_paths: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        return bool(self.targets)

    def path(self, name: str) -> Path:
        return Path(self.folder) / name


@final
class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one rank."""

    seconds: tuple[float, ...] = ()  # of each step that counts
    n_bytes: dict[int, int] = {}  # sent in all steps, by receiver
    loss: float | None = None  # sum over the samples of a step, if known here


def run_verification(
    rehearsal: VerificationRun, *, n_machines: int, tell: Callable[[str], None] | None = None
) -> list[Seen]:
    """Run all ranks until they end; return the measurements of each.

    Args:
        rehearsal: The specification.
        n_machines: Number of ranks.
        tell: Called with a line about a rank that is silent, or back.

    Raises:
        JobError: a rank reports an error in the user's model or data.
        DistBeliefError: a rank failed for another reason, or was silent for too long.
    """
    spec = rehearsal.path("spec.json")
    spec.write_bytes(msgspec.json.encode(rehearsal))
    hands: list[subprocess.Popen[bytes]] = []
    try:
        for machine in range(n_machines):
            with rehearsal.path(f"{machine}.log").open("wb") as log:
                command = [sys.executable, "-m", "distbelief.partition.verify_rank"]
                hands.append(
                    subprocess.Popen(  # noqa: S603 -- our own program
                        [*command, str(spec), str(machine), str(n_machines)],
                        stdin=subprocess.PIPE,  # it ends when we do
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _await(hands, rehearsal, tell)
    finally:
        _end(hands)
    return [
        msgspec.json.decode(rehearsal.path(f"{m}.json").read_bytes(), type=Seen)
        for m in range(n_machines)
    ]


def _await(
    hands: Sequence[subprocess.Popen[bytes]],
    rehearsal: VerificationRun,
    tell: Callable[[str], None] | None,
) -> None:
    begun = time.monotonic()
    paths = [rehearsal.path(f"{machine}.alive") for machine in range(len(hands))]
    pulse = ProcessHeartbeat(paths, pids=[hand.pid for hand in hands], now=begun)
    while (now := time.monotonic()) < begun + SECONDS_MAX:
        codes = [hand.poll() for hand in hands]
        failed = [m for m, code in enumerate(codes) if code not in {None, 0}]
        if failed:
            raise _failure(failed[0], codes[failed[0]] or 0, rehearsal)
        if None not in codes:
            return
        left = [m for m, code in enumerate(codes) if code is None]
        for text in pulse.look(now, left=left):
            if tell is not None:
                tell(text)
        time.sleep(POLL_SECONDS)
    raise DistBeliefError(f"machines have not ended within {SECONDS_MAX:.0f} s: use fewer samples")


def _failure(machine: int, code: int, rehearsal: VerificationRun) -> DistBeliefError:
    error = rehearsal.path(f"{machine}.error")
    if error.is_file():
        return JobError(f"machine {machine}: {error.read_text()}")
    log = rehearsal.path(f"{machine}.log").read_text(errors="replace")[-_LOG_MAX:]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return DistBeliefError(f"machine {machine} {how}; its log:\n{log}")


def _end(hands: Sequence[subprocess.Popen[bytes]]) -> None:
    for hand in hands:
        hand.kill()
    for hand in hands:
        hand.wait(timeout=END_SECONDS)
        if hand.stdin is not None:
            hand.stdin.close()
