"""Every message that crosses a process boundary.

One module for each pair of roles: `membership` (supervisor and roles), `push_fetch`
(client and shard), `replication` (the two copies of a shard), `batch` (coordinator, shards
and batch workers), `groups` (the ranks of one replica), `ring` (replicas that sum gradients),
`hosts` (supervisor and hosts).
Each message says "sender -> receiver: purpose". Headers are small and typed; arrays
travel beside them, raw (`codec`). Roles declare which messages they accept; the drivers
refuse all others (`role`: events in, actions out).

The envelope names the sender and its incarnation. A message that is meant for one
incarnation of its receiver carries the number of that incarnation, too.
"""

from typing import TYPE_CHECKING, Union

from distbelief.protocol.batch import *
from distbelief.protocol.fields import *
from distbelief.protocol.groups import *
from distbelief.protocol.hosts import *
from distbelief.protocol.membership import *
from distbelief.protocol.push_fetch import *
from distbelief.protocol.replication import *
from distbelief.protocol.ring import *


MESSAGES = tuple(AnyMessage.__subclasses__())
"""All message types; the set is closed: a subclass of another module is none of them."""

if TYPE_CHECKING:
    Message = AnyMessage
else:  # for decoders: msgspec needs the union itself
    Message = Union[MESSAGES]  # noqa: UP007 -- `|` takes no tuple
