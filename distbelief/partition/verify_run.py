"""The machines of one plan as processes of this host, without parameter servers.

    folder/spec.json            what they are told
    folder/.ROLE.1              the socket where each can be reached
    folder/MACHINE.endpoint     that it can be
    folder/output.npy           what they compute, each its own regions
    folder/gradient-K.npy       of tensor K, likewise
    folder/MACHINE.json         what each has measured
    folder/MACHINE.alive        that each lives (`pulse`)
    folder/MACHINE.log          what each has to say

For `distbelief predict`, and for `distbelief partition --verify`. They are the machines
of a job (`runtime.machine`), talk over ZeroMQ as those do, and differ in what they
compute for (`hand`). Values come from a file of whole tensors, of which each reads its
regions. If one of them ends too early, or is silent for too long, all are ended.
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


# Signs of life of the machines of a rehearsal: a file of each, touched twice a second.
#
# A machine whose file is not touched any more is named, and after longer silence taken
# for dead, as in a job; the thread that touches it needs nothing of what is computed.

BEAT_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 3.0
"""After which a machine is named."""

DEAD_SECONDS: Final = 10.0
"""After which all are ended."""

START_SECONDS_MAX: Final = 120.0
"""Until the first sign of life: it imports torch before."""

STILL_SECONDS: Final = 1.0
"""Between two looks, after which whoever looks stood still itself."""


def beat(path: Path) -> None:
    """Touch this file from now on, as long as the process lives."""

    def touch() -> None:
        while True:
            with suppress(OSError):  # the folder is gone at the end
                path.touch()
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=touch, daemon=True).start()


@final
class ProcessHeartbeat:
    """What is known of the signs of life of some machines.

    Args:
        paths: The file of each.
        pids: The process of each.
        now: They were started.
    """

    def __init__(self, paths: Sequence[Path], *, pids: Sequence[int], now: Seconds) -> None:
        self._paths = paths
        self._pids = pids
        self._stamps = [0] * len(paths)  # of the newest touch, in ns; 0: none
        self._heard_at = [now] * len(paths)
        self._named: set[int] = set()
        self._looked_at = now

    def look(self, now: Seconds, *, left: Sequence[int]) -> list[str]:
        """Look at the files; return what is to be told of who is silent, or back.

        Args:
            now: The time.
            left: Machines that have not ended.

        Raises:
            DistBeliefError: one has been silent for too long; it is named.
        """
        gap, self._looked_at = now - self._looked_at, now
        told = []
        for machine in left:
            if gap > STILL_SECONDS:  # nobody else is to blame
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
                f"{label} has been silent for {silence:.1f} s, and all are ended with "
                "it: it was stopped, or its host is overloaded. Try again"
            )
        if not stamp or silence <= SILENT_SECONDS or machine in self._named:
            return None
        self._named.add(machine)
        return f"{label} silent for {silence:.1f} s: in {bound - silence:.0f} s giving up"


def _stamp(path: Path) -> int:
    """Return when this file was touched; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


END_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.02
SECONDS_MAX: Final = 24 * 3600.0
SEED: Final = (0, 0)
"""Of the randomness of all steps."""

_LOG_MAX: Final = 2000  # characters of it that are shown


@final
class VerificationRun(msgspec.Struct, frozen=True, kw_only=True):
    """What all machines are told.

    Attributes:
        folder: Where files lie.
        run: Name of this rehearsal, which is in every message.
        task: Model and loss.
        sample: What the data are like.
        plan: Path of the plan.
        weights: Path of whole tensors by name (.safetensors).
        inputs: Path of all inputs: (n_samples, *shape), .npy.
        targets: Of their targets; "" to predict.
        n_samples: How many there are.
        n_steps: Steps to take. To predict: as many as it takes to have seen all.
        n_warm: Steps at the beginning that do not count.
        dtype: "float32" or "float64".
        device: What machines compute on.
        threads: Of torch, in each process.
        import_paths: Directories where import paths are looked up first.
    """

    folder: str
    run: str
    task: TaskSpec
    sample: Sample
    plan: str
    weights: str
    inputs: str
    targets: str = ""
    n_samples: int
    n_steps: int
    n_warm: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    import_paths: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted."""
        return bool(self.targets)

    def path(self, name: str) -> Path:
        """Return where one of its files lies."""
        return Path(self.folder) / name


@final
class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine has measured.

    Attributes:
        seconds: Of each step that counts, from the end of the one before to its own.
        n_bytes: Sent in all steps, by receiver.
        loss: Sum over the samples of a step, if this machine knows it.
    """

    seconds: tuple[float, ...] = ()
    n_bytes: dict[int, int] = {}
    loss: float | None = None


def run_verification(
    rehearsal: VerificationRun, *, n_machines: int, tell: Callable[[str], None] | None = None
) -> list[Seen]:
    """Run all machines until they end; return what each has measured.

    Args:
        rehearsal: What they are told.
        n_machines: How many they are.
        tell: Told of a machine that is silent, and when it is back.

    Raises:
        JobError: a machine says that the user's model or data are at fault.
        DistBeliefError: a machine failed for another reason, was ended, or has been
            silent for too long.
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
            # Who fails first is seldom who is at fault: the others miss it.
            raise _failure(failed[0], codes[failed[0]] or 0, rehearsal)
        if None not in codes:
            return
        left = [m for m, code in enumerate(codes) if code is None]
        for text in pulse.look(now, left=left):
            if tell is not None:
                tell(text)
        time.sleep(POLL_SECONDS)
    raise DistBeliefError(f"machines have not ended within {SECONDS_MAX:.0f} s")


def _failure(machine: int, code: int, rehearsal: VerificationRun) -> DistBeliefError:
    error = rehearsal.path(f"{machine}.error")
    if error.is_file():
        return JobError(f"machine {machine}: {error.read_text()}")
    log = rehearsal.path(f"{machine}.log").read_text(errors="replace")[-_LOG_MAX:]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return DistBeliefError(f"machine {machine} {how}; it said:\n{log}")


def _end(hands: Sequence[subprocess.Popen[bytes]]) -> None:
    for hand in hands:
        hand.kill()
    for hand in hands:
        hand.wait(timeout=END_SECONDS)
        if hand.stdin is not None:
            hand.stdin.close()
