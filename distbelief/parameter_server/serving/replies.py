"""What a shard says to its clients; every reply carries the shard's incarnation."""

from typing import final

from distbelief.messages import (
    Acknowledge,
    Leading,
    Message,
    ParameterBlock,
    PushCredit,
    Refused,
    Welcome,
)
from distbelief.parameter_server.serving.leases import Lease
from distbelief.parameter_server.state.slots import Client
from distbelief.roles import Address, Send
from distbelief.vectors import Vector


@final
class Replies:
    """Replies of one life of a shard.

    Attributes:
        incarnation: That life; 0 before it has begun.
    """

    def __init__(self, *, index: int) -> None:
        self._index = index
        self.incarnation = 0

    def welcome(self, client: Client, *, clock: int) -> Send:
        """Answer `Hello`; also a sign of life for one whose fetch waits."""
        return _to(
            client.name,
            Welcome(
                shard_incarnation=self.incarnation,
                clock=clock,
                samples=client.samples,
                watermark=client.told,
                applied=client.applied - client.n_held,
                parameters_region=client.parameters_region,
                slots_region=client.region,
            ),
        )

    def leading(self, receiver: Address) -> Send:
        """Tell a client of the shard's other copy that this one serves it now."""
        return _to(receiver, Leading(shard_incarnation=self.incarnation))

    def refuse(self, receiver: Address, reason: str, *, for_good: bool = False) -> Send:
        """Say why not; unless `for_good`, the client says Hello and tries again."""
        text = f"shard {self._index}, incarnation {self.incarnation}: {reason}"
        return _to(receiver, Refused(reason=text, for_good=for_good))

    def acknowledge(self, client: Client, *, clock: int) -> Send:
        """Every push of this client is settled, save those that are held."""
        return _to(
            client.name,
            Acknowledge(
                sequence=client.told,
                shard_incarnation=self.incarnation,
                clock=clock,
                staleness=client.told_staleness,
            ),
        )

    def push_credit(self, client: Client, *, sequence: int, received: int) -> Send:
        """That many blocks of this push are here."""
        return _to(
            client.name,
            PushCredit(sequence=sequence, shard_incarnation=self.incarnation, received=received),
        )

    def block(self, reader: Address, lease: Lease, index: int, values: Vector) -> Send:
        """One block of the leased version, lent to the driver as well (`leases`)."""
        message = ParameterBlock(
            request=lease.request,
            shard_incarnation=self.incarnation,
            block_index=index,
            clock=lease.copy.clock,
            values=values,
        )
        return Send(receiver=reader, message=message, lent=True)


def _to(receiver: Address, message: Message) -> Send:
    return Send(receiver=receiver, message=message)
