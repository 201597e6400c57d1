"""Cuts: for how many shards and replicas the snapshots of a run are, of which data.

    snapshots/cut.json, snapshots/shard-K/              as the run began
    snapshots/cut-00012/cut.json, .../shard-K/          since it went on with others

Rules:

* The newest cut is in use; its number is that of its first snapshots.
* A cut is whole or not there: it is written under a name that nobody reads, read back,
  then renamed. Whatever ends it half-way leaves the run as it was.
* The cuts before it stay as they are.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief import files
from distbelief.errors import StorageError
from distbelief.job.configuration.jobfile import load_job
from distbelief.job.configuration.sections import Processes
from distbelief.job.directory.run_directory import RunDirectory
from distbelief.job.directory.summary import DataFacts, read_summary
from distbelief.program.plan import Plan
from distbelief.runtime.machine.machine_names import machine_name


_FILE: Final = "cut.json"
_DIRECTORY: Final = re.compile(r"cut-(\d{1,18})")
_SNAPSHOT: Final = re.compile(r"/shard-(\d{1,18})/[^/]+\.safetensors$")


@final
class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Content of cut.json: what the snapshots beside it mean.

    Attributes:
        n_shards: Which together hold the model.
        n_replicas: Among which the data were divided.
        n_machines: Of each replica, by whose plan they are split; None if they are not.
        plan: Mark of who computes what in a replica that is split (`mark_of`).
        train: The training data, as far as anybody looked at them.
    """

    n_shards: Processes
    n_replicas: Processes
    n_machines: Processes | None = None
    plan: str | None = None
    train: DataFacts | None = None

    def is_cut_like(self, other: "Cut") -> bool:
        """Return whether each client of one finds in the other what it needs.

        A machine that holds other tensors than before does not, though its name is the
        same: shards count for each client how far it has come.
        """
        has_other_plan = None not in {self.plan, other.plan} and self.plan != other.plan
        return self.numbers == other.numbers and not has_other_plan

    @property
    def numbers(self) -> tuple[int, int, int | None]:
        """Of shards, of replicas, and of the machines of each."""
        return self.n_shards, self.n_replicas, self.n_machines

    @property
    def replicas(self) -> list[str]:
        """The names of the roles that lead a replica, or are one."""
        if self.n_machines is None:
            return [f"replica-{r}" for r in range(self.n_replicas)]
        return [machine_name(r, 0) for r in range(self.n_replicas)]

    def clients(self, places: Mapping[str, int]) -> dict[str, int]:
        """Return the place of each client, given that of each of `replicas`."""
        if self.n_machines is None:
            return dict(places)
        return {
            machine_name(r, machine): places[name]
            for r, name in enumerate(self.replicas)
            for machine in range(self.n_machines)
        }


def mark_of(plan: Plan) -> str:
    """Return the same for all plans by which machines hold the same."""
    placed = [[name, plan.placements[name]] for name in sorted(plan.placements)]
    return hashlib.blake2b(msgspec.json.encode(placed), digest_size=8).hexdigest()


def newest_cut(run: RunDirectory) -> tuple[Path, Cut | None]:
    """Return the cut in use: its directory, and what it is; None of a new run.

    Raises:
        JobFileError: the run's job file, of which an old run's cut is known, is wrong.
        StorageError: the file that tells of it is damaged, or cannot be true; or all
            that was saved is gone.
    """
    made = max(_directories(run.snapshots), default=None)
    directory = run.snapshots if made is None else made[1]
    file = directory / _FILE
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        if run.job_file.is_file() and not any(directory.glob("*/*.safetensors")):
            raise StorageError(
                f"{directory} holds nothing of this run, which has begun: put it back, "
                "or begin anew with --from-scratch (from_scratch=True)"
            ) from None
        return directory, _cut_of_job(run)
    except OSError as error:
        raise files.explained(error, file, doing="read") from error
    cut = cut_in(content, file, run)
    beyond = _shards_beyond(directory, cut.n_shards)
    if beyond:
        names = ", ".join(beyond)
        raise _distrusted(
            file, run, f"n_shards is {cut.n_shards}, but there are snapshots of {names}"
        )
    return directory, cut


def cut_in(content: bytes, file: Path, run: RunDirectory) -> Cut:
    """Return the cut that stands in cut.json.

    Args:
        content: Of the file.
        file: For messages.
        run: Likewise.

    Raises:
        StorageError: it is damaged.
    """
    try:
        return msgspec.json.decode(content, type=Cut)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _distrusted(file, run, str(error)) from None


def write_cut(directory: Path, cut: Cut) -> None:
    """Say what the snapshots in this directory are.

    Raises:
        StorageError: it cannot be written.
    """
    files.write(directory / _FILE, msgspec.json.encode(cut))


@contextmanager
def making_cut(run: RunDirectory, number: int, cut: Cut) -> Iterator[tuple[Path, Path]]:
    """Make a new cut in a `with` block; it is in use once the block has ended well.

    Args:
        run: Whose it is.
        number: Above that of every cut and every snapshot before.
        cut: What it is.

    Yields:
        Where the block is to write its snapshots, and where they will be found.

    Raises:
        StorageError: it cannot be written; then the one before stays in use.
    """
    final_place = _directory(run.snapshots, number)
    place = final_place.with_suffix(files.TEMPORARY)
    try:
        for left in run.snapshots.glob(f"cut-*{files.TEMPORARY}"):
            shutil.rmtree(left)
        place.mkdir(parents=True)
        yield place, final_place
        write_cut(place, cut)  # this forces the directory to the disk, too
        place.rename(final_place)
        files.force(run.snapshots)
    except OSError as error:
        raise files.explained(error, place, doing="write") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _distrusted(file: Path, run: RunDirectory, why: str) -> StorageError:
    return StorageError(
        f"{file} is damaged ({why}): without it nobody knows what the snapshots beside "
        f"it are of. If [cluster] in {run.job_file} has the numbers of shards and "
        f"replicas that the run had last, remove {file.name}, and those count"
    )


def _shards_beyond(directory: Path, n_shards: int) -> list[str]:
    """Return the shards with snapshots here that a cut of so many does not have."""
    found = {int(m[1]) for p in directory.glob("*/*") if (m := _SNAPSHOT.search(str(p)))}
    return [f"shard-{k}" for k in sorted(found) if k >= n_shards]


def _directory(snapshots: Path, number: int) -> Path:
    return snapshots / f"cut-{number:05d}"


def _directories(snapshots: Path) -> Iterator[tuple[int, Path]]:
    if not snapshots.is_dir():
        return
    for path in snapshots.iterdir():
        found = _DIRECTORY.fullmatch(path.name)
        if found is not None and path.is_dir():
            yield int(found[1]), path


def _cut_of_job(run: RunDirectory) -> Cut | None:
    """Return the cut of a run that was made when nobody wrote it down."""
    if not run.job_file.is_file():
        return None
    cluster = load_job(run.job_file).cluster
    train = None
    try:
        summary = read_summary(run)
    except StorageError:
        summary = None  # it is only a second source
    if summary is not None:
        train = summary.train
    return Cut(n_shards=cluster.shards, n_replicas=cluster.replicas, train=train)
