"""What a machine that joins offers, and its patience."""

from dataclasses import dataclass

from distbelief.messages import Offer
from distbelief.roles import Seconds


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """Of one host.

    Attributes:
        label: What people call it.
        endpoint: Where the driver can be reached ("" in a simulation).
        cores: For the run's roles.
        memory_bytes: Likewise.
        devices: Likewise: "cuda" for each.
        flops: Operations a second of one core, as measured; 0.0: they are not.
        stays: Whether it waits for another job when one is over.
        returns: Whether a job took this machine before, at another address.
        beat_seconds: Between two words to the supervisor.
        silence_seconds_max: Without a word of the supervisor, after which it offers
            itself anew; a run whose patience is greater goes on meanwhile.
        wait_seconds_max: For a job to take it.
        leave_seconds_max: For what runs here to be moved, when the user asks to leave.
        over_seconds: Without a word, after which a job whose port is shut is over: a
            supervisor that died may be started again until then.
    """

    label: str
    endpoint: str = ""
    cores: int
    memory_bytes: int
    devices: tuple[str, ...] = ()
    flops: float = 0.0
    stays: bool = False
    returns: bool = False
    beat_seconds: Seconds = 0.5
    silence_seconds_max: Seconds = 15.0
    wait_seconds_max: Seconds = 600.0
    leave_seconds_max: Seconds = 30.0
    over_seconds: Seconds = 60.0

    def offer(self, life: int) -> Offer:
        """Return what the supervisor is told.

        Args:
            life: Of the host.
        """
        return Offer(
            life=life,
            label=self.label[:128],
            endpoint=self.endpoint,
            cores=self.cores,
            memory_bytes=self.memory_bytes,
            devices=self.devices,
            flops=self.flops,
        )
