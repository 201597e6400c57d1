"""The page beside a run: a server in a process of its own, which ends with the run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from socket import socket
from typing import Final

from distbelief.dashboard.server import PageServer, Watch, serve
from distbelief.job.run.directory import RunDirectory


END_SECONDS: Final = 5.0  # for the last state, once the run has ended
LOOK_SECONDS: Final = 1.0


@contextmanager
def page_beside(run: Path, listening: socket) -> Iterator[None]:
    """Serve the page of a run at this socket for as long as the block lasts."""
    descriptor = listening.fileno()
    arguments = [str(run.absolute()), str(descriptor), str(os.getpid())]
    child = subprocess.Popen(  # noqa: S603 -- this Python, and names that no shell reads
        [sys.executable, "-m", "distbelief.dashboard.beside", *arguments],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl+C ends the run first
    )
    listening.close()
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _main(path: str, descriptor: str, parent: str) -> None:
    ends: SimpleQueue[object] = SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: ends.put("terminated"))
    # Its directory may still be empty.
    run = RunDirectory(Path(path), lock=None)
    server = PageServer(socket(fileno=int(descriptor)), Watch([run]))

    def end_with_parent() -> None:
        while os.getppid() == int(parent):
            time.sleep(LOOK_SECONDS)
        ends.put("the run's process has ended")

    threading.Thread(target=end_with_parent, daemon=True).start()
    serve(server, ends)


if __name__ == "__main__":
    _main(*sys.argv[1:])
