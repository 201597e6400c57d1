"""How far a group of machines has come."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a group has done in all lives of its leader.

    Attributes:
        steps: Taken by all.
        position: In the data.
        loss: Sum over `samples`.
        samples: Those whose loss is finite.
        no_loss: Those whose loss is not.
    """

    steps: int = 0
    position: int = 0
    loss: float = 0.0
    samples: int = 0
    no_loss: int = 0
