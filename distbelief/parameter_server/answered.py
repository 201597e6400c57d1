"""Which batch of commands a shard performed last, so that none is performed twice.

A batch carries the coordinator's epoch, and its number within that epoch: 1, 2, ... Its
answer may be lost, so it may come again; adding a vector twice would be wrong, so the
shard repeats the answer instead (Lee et al. 2015, RIFL). The record lies in the same
snapshot as the vectors that it is about. A coordinator sends one batch at a time, so
one answer is enough.

    epoch    number           what to do
    lower    any              refuse: another coordinator has taken over
    equal    last + 1         perform
    equal    last             repeat the answer
    equal    lower            nothing: a late copy of what was answered long ago
    equal    higher           refuse: this shard has lost batches; go back to a cut
    higher   1                perform: a new coordinator begins
    higher   above 1          refuse, as above
"""

from collections.abc import Mapping
from typing import Literal, final

from distbelief.commands import SCALARS_MAX, Scalars
from distbelief.errors import RemoteProtocolError, StorageError


Verdict = Literal["perform", "repeat", "late"]


@final
class Answered:
    """The last batch, and its answer.

    Attributes:
        epoch: Of its coordinator; 0: of none yet.
        number: In that epoch; 0: none yet.
        scalars: What it measured here.
    """

    def __init__(
        self, *, epoch: int = 0, number: int = 0, scalars: Scalars = ()
    ) -> None:
        self.epoch = epoch
        self.number = number
        self.scalars = scalars

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> "Answered":
        """Return what `facts` says.

        Raises:
            StorageError: it says nothing, or what cannot be.
        """
        try:
            epoch, number = int(facts["epoch"]), int(facts["number"])
            scalars = tuple(map(float.fromhex, facts["scalars"].split()))
        except (KeyError, ValueError, OverflowError) as error:
            raise StorageError(
                f"the last batch of commands cannot be read: {error!r}; delete the "
                "snapshot, and the one before is used"
            ) from None
        if epoch < 0 or number < 0 or len(scalars) > SCALARS_MAX:
            raise StorageError(
                f"the last batch of commands has epoch {epoch}, number {number} and "
                f"{len(scalars)} numbers; delete the snapshot, and the one before is "
                "used"
            )
        return cls(epoch=epoch, number=number, scalars=scalars)

    def facts(self) -> dict[str, str]:
        """Return all of it as text, to the bit."""
        return {
            "epoch": str(self.epoch),
            "number": str(self.number),
            "scalars": " ".join(map(float.hex, self.scalars)),
        }

    def ask(self, epoch: int, number: int) -> Verdict:
        """Return what to do with a batch that has come.

        Raises:
            RemoteProtocolError: its coordinator, or this shard, is behind.
        """
        if epoch < self.epoch:
            raise RemoteProtocolError(
                f"batch {number} is of coordinator epoch {epoch}; epoch {self.epoch} "
                "has taken over"
            )
        if number < 1:
            raise RemoteProtocolError(
                f"batch {number} of epoch {epoch}; the first one is 1"
            )
        last = self.number if epoch == self.epoch else 0
        if number > last + 1:
            raise RemoteProtocolError(
                f"batch {number} of epoch {epoch} came after batch {last}: those "
                "between are lost here; begin again from a cut that all shards share"
            )
        if number == last + 1:
            return "perform"
        return "repeat" if number == last else "late"

    def answer(self, epoch: int, number: int, scalars: Scalars) -> None:
        """Record what the batch measured; it has been performed."""
        self.epoch, self.number, self.scalars = epoch, number, scalars
