"""Every exception this package raises on purpose.

* DistBeliefError
  x JobError               -- what the user gave cannot be run: file, model, data, loss
    + JobFileError         -- the job file itself: a key, a value, a unit
    + GraphError           -- the model, a plan or a cluster (in `graph.layer`)
  x ProtocolError
    + LocalProtocolError   -- our code sent or did something illegal
    + RemoteProtocolError  -- a peer did
  x PeerLostError          -- a peer has been silent beyond its bound
  x MemoryGoneError        -- a shared buffer is not, or no longer, there
  x StorageError           -- a disk or memory file cannot be read, written or trusted
  x TransportError         -- a socket cannot be had

A message names the culprit, shows the value that triggered it, and says what to do.
"""


class DistBeliefError(Exception):
    """Base class of every error raised on purpose."""


class JobError(DistBeliefError):
    """What the user gave cannot be run."""


class JobFileError(JobError):
    """The job file has an unknown key, an ill-typed value or an unknown unit."""


class ProtocolError(DistBeliefError):
    """A message is illegal in the present state."""


class LocalProtocolError(ProtocolError):
    """Our own code broke the protocol: a bug in this package."""


class RemoteProtocolError(ProtocolError):
    """A peer sent a message that is illegal in the receiver's current state."""


class PeerLostError(DistBeliefError):
    """A peer has been silent longer than the bound on its silence."""


class MemoryGoneError(DistBeliefError):
    """A shared buffer does not exist, or its owner has released it."""


class StorageError(DistBeliefError):
    """A file cannot be read, written or trusted."""


class TransportError(DistBeliefError):
    """A socket cannot be opened, bound or connected."""
