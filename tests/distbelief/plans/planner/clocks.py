"""A clock for measurements that must not depend on the machine."""


class Clock:
    """Each call advances it by a millisecond, or by `tick`."""

    def __init__(self, *, tick: float = 1e-3) -> None:
        self.n_looks = 0
        self._tick = tick

    def __call__(self) -> float:
        self.n_looks += 1
        return self.n_looks * self._tick
