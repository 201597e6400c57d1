"""Reach: from where the processes of one server, or a worker, can be reached, and how.

bind                    keys   --insecure   messages
127.0.0.1 (default)     no     -            in the clear, never beyond this machine
anything                yes    -            encrypted; who has an allowed key
anything else           no     no           refused
anything else           no     yes          in the clear, to whoever hears them
"""

import ipaddress
from collections.abc import Callable
from typing import Self

import msgspec

from distbelief.errors import JobError
from distbelief.transport.keyring import Keyring
from distbelief.transport.places import LOOPBACK
from distbelief.transport.zmq_transport import TransportOptions, ZmqTransport


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Of all processes that one user starts on one machine. Holds no secret.

    Attributes:
        host: Number of the interface that they listen at.
        port: Of the first of them; 0: the system chooses. The others' it does choose.
        insecure: Whether messages in the clear may leave this machine.
        keys: By which the processes speak, and whom they believe.
    """

    host: str = LOOPBACK
    port: int = 0
    insecure: bool = False
    keys: Keyring | None = None

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach them."""
        return ipaddress.IPv4Address(self.host).is_loopback

    def pinned(self) -> Self:
        """Return the same for processes that come later: they speak by the key of now.

        Raises:
            JobError: there is no key, or others could read it.
        """
        if self.keys is None:
            return self
        return msgspec.structs.replace(self, keys=self.keys.pinned())

    def check(self) -> None:
        """Refuse what would let in strangers, or let out what is not theirs.

        Raises:
            JobError: naming what there is to choose from.
        """
        if not (self.is_local or self.keys or self.insecure):
            raise JobError(
                f"{self.host} can be reached from other machines, and without keys "
                "whoever reads the network could read and change what is trained: "
                "make a key (distbelief keys new) and let the others in (distbelief "
                "keys allow KEY NAME; machines that join a job, with --role host); or "
                "stay at 127.0.0.1; or, on a network of friends, --insecure"
            )

    def transport(
        self,
        *,
        name: str,
        incarnation: int,
        token: str,
        log: Callable[[str, str], None],
        port: int = 0,
    ) -> ZmqTransport:
        """Return the transport of one role, for it to start.

        Raises:
            JobError: `check` is against it, or there is no key.
        """
        self.check()
        return ZmqTransport(
            name=name,
            incarnation=incarnation,
            token=token,
            bind=f"tcp://{self.host}:{port or '*'}",
            options=TransportOptions(allow_remote=self.insecure),
            guard=None if self.keys is None else self.keys.guard(log=log),
            log=log,
        )
