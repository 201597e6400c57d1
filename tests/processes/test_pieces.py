"""Data in pieces, in real processes: each row counts once, on whose host it lies."""

import signal
from functools import partial
from pathlib import Path

import pytest

from distbelief.transport.keys import KeyFiles
from tests.processes.commands import poll, sets, train
from tests.processes.test_dealt import COUNTS, JOB, counts, has_passed
from tests.processes.test_join import Land, allow


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(240),
]

ROWS = {"large": 700, "none": 0, "small": 70, "other": 230}  # one of ten others, and an empty one

PIECES = f'''
import os
from pathlib import Path

ROWS = {ROWS}
FOLDER = Path(__file__).parent / "pieces"


class Pieces:
    """Each piece on this host is a file."""

    def pieces(self):
        return ROWS

    def here(self):
        return os.listdir(FOLDER)

    def read(self, piece, rows):
        assert piece in self.here(), piece
        start = sum(n for name, n in ROWS.items() if name < piece)
        return torch.tensor([start + row for row in rows]), torch.ones(len(rows))


class Fetched(Pieces):
    def fetch(self, piece):
        (FOLDER / piece).touch()


class Others(Pieces):
    def pieces(self):
        return ROWS | {{"other": 230 + ("elsewhere" in os.listdir(FOLDER))}}

    def here(self):
        return [*{{*os.listdir(FOLDER)}} & {{*ROWS}}]
'''


def write(folder: Path, *here: str, factory: str = "Pieces") -> None:
    (folder / "pieces").mkdir(parents=True)
    for name in here:
        (folder / "pieces" / name).touch()
    (folder / "tiny.py").write_text(f"import torch\nfrom torch import nn\n{COUNTS}{PIECES}")
    job = JOB.replace('"tiny:Numbered"\narguments = { n = 1000 }', f'"tiny:{factory}"')
    assert factory in job
    (folder / "tiny.toml").write_text(job)


def land_of(tmp_path: Path, *, factory: str = "Pieces", replicas: str) -> Land:
    land = Land(tmp_path / "here", tmp_path / "there")
    write(land.here, "large", "small", factory=factory)
    write(land.there, "other", "none", "small", factory=factory)
    for folder in (land.here, land.there):
        KeyFiles(folder / "keys").make()
        job = folder / "tiny.toml"
        job.write_text(job.read_text().replace("replicas = 3", f"replicas = {replicas}"))
    allow(land.here, land.there, "host")
    allow(land.there, land.here, "server")
    return land


LISTEN = "--listen", "tcp://127.0.0.1:0", "--keys", "keys", "--cores", "1"


def test_rows_of_a_host_wait_for_it(tmp_path: Path) -> None:
    """The host with a piece leaves as it was asked to, comes again, is killed, and comes again."""
    land = land_of(tmp_path, replicas="{ min = 1, max = 2 }")
    with train(land.here, *LISTEN) as command:
        poll(lambda: "no host that takes part has piece 'other'" in command.told())
        for how in (signal.SIGTERM, signal.SIGKILL):
            before = command.samples()
            with land.joined(command) as machine:
                poll(partial(has_passed, command, before + 300))
                machine.process.send_signal(how)
                machine.wait()
        with land.joined(command):
            command.ends(seconds=120.0)
    assert (counts(command) == 4.0).all(), (counts(command) - 4.0).unique(return_counts=True)
    assert command.summary()["samples"] == 4000


def test_another_host_with_other_pieces_is_refused(tmp_path: Path) -> None:
    land = land_of(tmp_path, factory="Others", replicas="{ min = 1, max = 2 }")
    (land.there / "pieces" / "elsewhere").touch()
    said = "[data.train] has piece 'other': 231 rows here, 230 rows where the job began"
    with train(land.here, *LISTEN) as command, land.joined(command):
        poll(lambda: said in command.told())
        command.interrupt()


@pytest.mark.soak
def test_each_row_counts_once_although_all_is_killed(tmp_path: Path) -> None:
    """Readers, too; then SIGTERM, and the run resumes inside an epoch each time."""
    write(tmp_path, "large", factory="Fetched")
    with train(tmp_path, *sets("data.train.num_workers=2")) as command:
        poll(lambda: command.samples() > 500)
        command.kill("replica-1")
        poll(lambda: command.samples() > 1200)
        command.signal(signal.SIGKILL)
        for role in ("shard-0", "shard-1"):
            command.kill(role)
        command.wait()
    again = ("--resume", "runs/tiny")
    with train(tmp_path, *sets("cluster.replicas=2"), job=again) as command:
        poll(lambda: command.samples() > 2600)
        command.signal(signal.SIGTERM)
        command.wait()
    with train(tmp_path, job=again) as command:
        command.ends()
    assert (counts(command) == 4.0).all(), (counts(command) - 4.0).unique(return_counts=True)
