"""Two hosts in one: network namespaces with a link of a given speed between them.

    distbelief-PID-0                        distbelief-PID-1
    10.77.0.1  veth  <--- token bucket --->  veth  10.77.0.2

Each end sends through a token bucket (`tc tbf`), so the link carries that many bits
per second each way, as full-duplex Ethernet does. Only root may make them.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, final


INTERFACE: Final = "veth"
_BURST_BYTES: Final = 1 << 17  # more than the 64 KiB that the kernel sends in one piece
_QUEUE_BYTES: Final = 1 << 23
_LINKS: Final = itertools.count()  # of this process, each with names of its own


@final
class Host(NamedTuple):
    """One end of the link.

    Attributes:
        name: Of its network namespace; "": the one that this process lives in.
        address: Of its end of the link.
    """

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that shall run there."""
        return ["ip", "netns", "exec", self.name] if self.name else []

    @property
    def interface(self) -> str:
        """Its end of the link."""
        return INTERFACE if self.name else "lo"


HERE: Final = (Host("", "127.0.0.1"), Host("", "127.0.0.1"))


def obstacle() -> str | None:
    """Return why there can be no such hosts, if so."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed (package iproute2)"
    try:
        with linked(bits_per_second=1e9):
            return None
    except OSError as error:
        return str(error)


@contextmanager
def linked(*, bits_per_second: float) -> Iterator[tuple[Host, Host]]:
    """Make two hosts and the link between them; take them away afterwards.

    Raises:
        OSError: a command failed; its words.
    """
    link = next(_LINKS)
    names = [f"distbelief-{os.getpid()}-{2 * link + end}" for end in range(2)]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            _do(["ip", "netns", "add", name])
        _do(
            [
                *("ip", "link", "add", INTERFACE, "netns", names[0]),
                *("type", "veth", "peer", "name", INTERFACE, "netns", names[1]),
            ]
        )
        for name, address in zip(names, addresses, strict=True):
            inside = ["ip", "-n", name]
            _do([*inside, "addr", "add", f"{address}/24", "dev", INTERFACE])
            _do([*inside, "link", "set", "lo", "up"])
            _do([*inside, "link", "set", INTERFACE, "up"])
            bucket = ["rate", f"{bits_per_second:.0f}bit", "burst", f"{_BURST_BYTES}"]
            bucket += ["limit", f"{_QUEUE_BYTES}"]
            root = ["dev", INTERFACE, "root", "tbf"]
            _do(["tc", "-n", name, "qdisc", "add", *root, *bucket])
        one, other = map(Host, names, addresses)
        yield one, other
    finally:
        for name in names:  # the link goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
