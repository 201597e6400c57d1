"""Transports of tests: each of one run, in a directory that only its user may enter."""

from collections.abc import Callable
from pathlib import Path

from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.zmq_transport import ZmqTransport


def link(
    name: str,
    directory: Path,
    *,
    run: str = "run",
    incarnation: int = 1,
    log: Callable[[str, str], None] = lambda _level, _text: None,
) -> ZmqTransport:
    """Return a transport that others in this directory can reach; it is not started."""
    reach = ListenConfig(directory=str(directory))
    return reach.transport(name=name, incarnation=incarnation, run=run, log=log)
