"""`distbelief join`: lets a job use this host until it is over or Ctrl+C.

This process is the role `host-...`, with a fork server whose children are the run's roles. It
computes nothing, and holds no values.
"""

import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, final

import torch

from distbelief.core import files
from distbelief.core.errors import JobError
from distbelief.core.signals import EXIT_CODES, REASONS, caught_signals
from distbelief.job.hosts.agent import AgentStorage, HostAgent, HostAgentConfig, JoinOptions
from distbelief.job.hosts.bootstrap import JobAddress
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.run_log import RunLog
from distbelief.plans.planner.profiling import this_host as profiling
from distbelief.protocol import Offer
from distbelief.protocol.codec import JOINING
from distbelief.protocol.role import HOST, SUPERVISOR, PeerLost
from distbelief.transport.address import Endpoint, number_of, own_address_towards
from distbelief.transport.keys import KeyFiles
from distbelief.transport.listen_config import KeyConfig, ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.transport.zmq_transport import ANOTHER, REFUSED, ZmqTransport


INCARNATION: Final = 1  # the name is new each time
PROBE_SECONDS: Final = 2.0  # between two probes
ANSWER_SECONDS: Final = 0.2  # for the answer to one: the role waits meanwhile
DIAL_SECONDS: Final = 3.0  # between two attempts after a rejection
ONCE_SECONDS: Final = 1.5  # at the start, in which exactly one probe runs

Tell = Callable[[str], None]


@final
class SupervisorMonitor:
    """Watches the connection to the supervisor.

        the supervisor rejects the key    the user sees how to allow it; it retries
        another key listens there         the user is warned
        nothing listens there             the run is over if this host was part of it,
                                          else the user is warned

    A link that is cut shows nothing, and may recover. ZeroMQ reconnects silently, so a TCP connect
    tells the two apart: a port where nothing listens refuses at once.
    """

    def __init__(self, transport: ZmqTransport, *, key: str, place: Endpoint, tell: Tell) -> None:
        self._transport = transport
        self._key = key
        self._place = place
        self._tell = tell
        self._shown: set[str] = set()
        self._begun_at = time.monotonic()
        self._dial_at: float | None = None
        self._probed_at = -PROBE_SECONDS

    def dial(self) -> None:
        """Connect to the supervisor, also again: ZeroMQ gives up when it is rejected."""
        self._transport.disconnect(SUPERVISOR)
        self._transport.connect(SUPERVISOR, 0, str(self._place), watched=True)

    def look(self, *, is_alone: bool, is_known: bool) -> str | None:
        """Show the user what is new; return why the run seems to be over, if it does.

        `is_alone`: this host was part of the run, and hears nothing now. `is_known`: the supervisor
        has sent it a message, so its key is the right one: it is busy or suspended.
        """
        now, where = time.monotonic(), self._place.endpoint
        if self._dial_at is not None and now >= self._dial_at:
            self._dial_at = None
            self.dial()
        if self._transport.has_failed(SUPERVISOR, REFUSED):
            self._dial_at = now + DIAL_SECONDS
            self._show(
                f"{where} rejects the key of this host; run there: "
                f"distbelief keys allow {self._key} NAME --role host"
            )
        elif self._transport.has_failed(SUPERVISOR, ANOTHER) and not is_known:
            self._show(
                f"the process at {where} has another key than this address, or none: "
                "use the address that `distbelief train --listen` prints there"
            )
        is_new = now - self._begun_at < ONCE_SECONDS
        if (is_alone or is_new) and self.nothing_listens(now):
            if is_alone:
                return f"nothing listens at {where} any more"
            self._show(f"nothing listens at {where} so far")
        return None

    def nothing_listens(self, now: float) -> bool:
        """Try a TCP connect, if it is time; return whether nothing listens there."""
        if now - self._probed_at < PROBE_SECONDS:
            return False
        self._probed_at = now
        try:
            socket.create_connection((self._place.host, self._place.port), ANSWER_SECONDS).close()
        except OSError as error:
            return error.errno == errno.ECONNREFUSED  # without a route nothing is known
        return False

    def _show(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            self._tell(text)


def join(options: JoinOptions, *, tell: Tell, forks: bool = False) -> int:
    """Offer this host to jobs; return an exit code. `forks`: as of a `LocalLauncher`."""
    address = JobAddress.parse(options.address)
    reach = _reach(address, options)
    keys = reach.keys
    place = address.place(address.key if keys is None else keys.server_key)
    name = HOST + secrets.token_hex(4)
    with files.explaining(options.directory, doing="make"):
        files.make_directory(options.directory)
    log = RunLog(options.directory / "host.log", name, tell=tell)
    last_error = ""

    def report(level: str, text: str) -> None:
        nonlocal last_error
        log.log(level, text)
        if level in {"info", "warning", "error"}:
            log.print(text)
        if level == "error":
            last_error = text

    with ExitStack() as stack:
        launcher = stack.enter_context(LocalLauncher(forks=forks))
        FileMemory.sweep()
        stack.enter_context(log.in_threads())
        transport = stack.enter_context(
            reach.transport(name=name, incarnation=INCARNATION, run=JOINING, log=report)
        )
        own_key = "" if keys is None else keys.public
        monitor = SupervisorMonitor(transport, key=own_key, place=place, tell=log.announce)
        monitor.dial()
        storage = AgentStorage(
            supervisor=str(place),
            reach=reach,
            allowed=options.allowed,
            places=options.places,
            code=options.code.absolute(),
            directory=options.directory.absolute(),
            launcher=launcher,
        )
        stack.callback(storage.clear)
        stack.callback(launcher.close)  # before that
        host = HostAgent(_config(options, transport.endpoint), storage=storage)
        log.announce(f"{name} waits for a job at {place.endpoint}")
        node = RoleRunner(host, transport=transport, log=report, launcher=launcher)

        held = options.is_held

        def look() -> None:
            nonlocal held
            if held and _input_has_ended():
                held = False
                node.stop("the connection that started this host has ended")
            is_alone = host.is_supervisor_silent(time.monotonic())
            lost = monitor.look(is_alone=is_alone, is_known=host.was_taken)
            if lost is not None:
                node.post(PeerLost(peer=SUPERVISOR, incarnation=0, reason=lost))

        with caught_signals() as caught:
            caught.tell = lambda number: node.stop(REASONS[number])
            error = node.run(look)
        if error is None:
            return EXIT_CODES.get(caught.number, 0) if caught.number else 0
        if not last_error.startswith(error):  # may be a shortened form of it
            log.print(error)
        return 1


def _input_has_ended() -> bool:
    return bool(select.select([0], [], [], 0.0)[0]) and not os.read(0, 4096)


def _config(options: JoinOptions, endpoint: str) -> HostAgentConfig:
    torch.set_num_threads(1)  # of this process, which computes nothing else
    cores = len(os.sched_getaffinity(0))
    offer = Offer(
        incarnation=0,
        label=socket.gethostname()[:100] or "nameless",
        endpoint=endpoint,
        cores=options.cores or cores,
        memory_bytes=options.memory_bytes or int(profiling.memory()),
        devices=options.devices,
        flops=profiling.flops(),
        domain=options.domain,
    )
    stays, wait = options.stays, options.wait_seconds
    return HostAgentConfig(offer=offer, stays=stays, wait_seconds_max=wait)


def _reach(address: JobAddress, options: JoinOptions) -> ListenConfig:
    host = own_address_towards(number_of(address.host))
    if options.keys is None:
        if not address.secret:
            raise JobError(
                "the address has no secret, so the job identifies hosts by keys: "
                "add --keys ~/.distbelief/keys (distbelief keys new makes them)"
            )
        return ListenConfig(host=host, secret=address.secret)
    directory = options.keys.expanduser().absolute()
    ring = KeyConfig(
        directory=str(directory),
        role="host",
        server_key=address.key or _server_key(KeyFiles(directory)),
        believes=True,
    )
    return ListenConfig(host=host, keys=ring).pinned()


def _server_key(keys: KeyFiles) -> str:
    servers = [entry.key for entry in keys.allowed() if "server" in entry.roles]
    if len(servers) == 1:
        return servers[0]
    raise JobError(
        f"{keys.directory} allows {len(servers)} keys as a server, and the job has one: use its "
        "address with ?key=..., or distbelief keys allow KEY NAME --role server"
    )
