"""Exceptions of the package.

DistBeliefError
    JobError                  what the user gave cannot be run: file, model, data, loss
        JobFileError          the job file: a key, a value, a unit
        SettingError          a setting of an update rule or a policy; msgspec names its table
        GraphError            the model, a plan or a cluster (in `graph.graph`)
    ProtocolError             a message that is not legal in the current state ...
        LocalProtocolError    ... sent by our own code: a bug in this package
        RemoteProtocolError   ... sent by a peer
            FalseClaimError   ... that no peer sends by mistake: its key is rejected for a while
    StorageError              a file: missing, damaged, full disk ...
        RestoreError          ... or a saved state that no restart can restore
    PeerLostError, MemoryGoneError, TransportError

A message says what is wrong, shows the value, and says how to fix it.
"""


class RaisedBy(str):
    """A note on an error (`BaseException.add_note`): which of the user's functions raised it."""

    __slots__ = ()


def raised_by(error: BaseException) -> str:
    """Return which of the user's functions raised this; "" if that is not noted."""
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if isinstance(note, RaisedBy)), "")


class DistBeliefError(Exception):
    """Base class of every error raised on purpose."""


class JobError(DistBeliefError):
    """The job, model, data or command of the user cannot be run."""


class JobFileError(JobError):
    """The job file has an unknown key, a value of the wrong type or an unknown unit."""


class SettingError(JobError, ValueError):
    """A setting has a value that it cannot have.

    It is a ValueError as well, so that msgspec, where it decodes a table, tells which.
    """


class ProtocolError(DistBeliefError):
    """A message is illegal in the current state."""


class LocalProtocolError(ProtocolError):
    """Our own code broke the protocol: a bug in this package."""


class RemoteProtocolError(ProtocolError):
    """A peer sent a message that is illegal in the receiver's current state."""


class FalseClaimError(RemoteProtocolError):
    """A peer claims what cannot be, or speaks as another kind of role."""


class PeerLostError(DistBeliefError):
    """A peer has been silent for longer than its timeout."""


class MemoryGoneError(DistBeliefError):
    """A shared buffer does not exist, or its owner has released it."""


class StorageError(DistBeliefError):
    """A file on disk or in memory cannot be read or written, or is damaged."""


class RestoreError(StorageError):
    """A saved state is of another shard, model, rule or version; trying again does not help."""


class TransportError(DistBeliefError):
    """A socket cannot be opened, bound or connected."""
