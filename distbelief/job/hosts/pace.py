"""How long a step takes on a machine, roughly: enough to choose where replicas go.

For each parameter of a dense net, a step takes 6 floating point operations a sample (2
forward, 4 backward; Dean et al. 2012 train such nets), and 4 bytes on the link for each
fetch and each push. So the number of parameters is of no matter: whether a slow link or
a slow processor is worse, depends on the batch. In layers that use a parameter more
than once (convolutions) the link counts for too much.
"""

import math
from dataclasses import dataclass
from typing import Final, final

from distbelief.job.configuration.sections import Job


_OPERATIONS: Final = 6.0  # of each parameter, a sample
_BYTES: Final = 4.0  # of each parameter, in a fetch or a push
_ALIKE: Final = math.log(1.25)  # machines that differ less are as fast as each other


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a replica's step takes, for each parameter.

    Attributes:
        operations: Floating point.
        n_bytes: On the link to the shards.
    """

    operations: float = 1.0
    n_bytes: float = 0.0

    @classmethod
    def of(cls, job: Job) -> "Step":
        """Return that of a job; of portions, each is reckoned with a fetch of its own.

        Args:
            job: By any algorithm.
        """
        table = job.algorithm
        n_fetch, n_push = (getattr(table, name, 1) for name in ("n_fetch", "n_push"))
        return cls(
            operations=_OPERATIONS * job.batch_size, n_bytes=_BYTES * (1.0 / n_fetch + 1.0 / n_push)
        )

    def grade(self, *, flops: float, bandwidth: float) -> int | None:
        """Return the grade of a machine, lower ones are faster; None: nobody knows.

        Args:
            flops: Of one process of a replica, operations a second.
            bandwidth: Bytes a second; 0.0: as if there were no end of it.
        """
        if not flops:
            return None
        # It is the machine's own word: less than one a second would be no number here.
        seconds = self.operations / max(flops, 1.0)
        seconds += self.n_bytes / max(bandwidth, 1.0) if bandwidth else 0.0
        return round(math.log(seconds) / _ALIKE)
