"""A job over several hosts: one trains, the others join it.

folder/0         job.toml, keys, runs of the first host, which has the supervisor and the shards
folder/1, 2 ...  keys and logs of the hosts that join
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

from distbelief.transport.keys import Allowed, KeyFiles
from experiments.benchmarks.network.hosts import Host


COMMAND: Final = str(Path(sys.executable).with_name("distbelief"))
KEYS: Final = ("--keys", "keys", "--cores", "1")


def lay_out(folder: Path, job: str, *, n_hosts: int) -> None:
    """Make the folder of each host, with keys that let all but the first join its job."""
    files = [KeyFiles(folder / f"{index}" / "keys") for index in range(n_hosts)]
    for keys in files:
        keys.directory.parent.mkdir()
        keys.make()
    (folder / "0" / "job.toml").write_text(job)
    server = Allowed(key=files[0].pair().public, roles=("server",), name="job")
    for index, other in enumerate(files[1:], start=1):
        key = other.pair().public
        files[0].allow(Allowed(key=key, roles=("host",), name=f"h{index}"))
        other.allow(server)


def begin(
    folder: Path,
    hosts: Sequence[Host],
    index: int,
    *options: str,
    imports: str,
    output: IO[str] | int = subprocess.PIPE,
) -> "subprocess.Popen[str]":
    """Start `distbelief train` at the first host, or `join` at another one, with one core.

    `lay_out` has made the folder. Hosts that join may import `imports` for the job.
    """
    at = f"tcp://{hosts[0].address}:7700"
    job = () if "--resume" in options else ("job.toml",)
    join = ("join", at, *KEYS, "--allow-import", imports)
    words = join if index else ("train", *job, "--listen", at, *KEYS)
    return subprocess.Popen(
        [*hosts[index].prefix, COMMAND, *words, *options],
        cwd=folder / f"{index}",
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(
    folder: Path, hosts: Sequence[Host], *options: str, imports: str, stack: ExitStack
) -> list["subprocess.Popen[str]"]:
    """Start a job with these options over all hosts; the stack kills it when it is closed."""
    processes = []
    for index in range(len(hosts)):
        words = () if index else ("--hosts", f"{len(hosts) - 1}", *options)
        process = begin(folder, hosts, index, *words, imports=imports)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        processes.append(process)
    return processes
