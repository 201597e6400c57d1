"""What came of running a plan for real: what agrees with one process, and how fast.

Both compute in float32. How far the one process itself is from float64 says how large
an error is rounding: a plan that is no more than `ROUNDING` times as far agrees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from rich.console import Console
from rich.table import Table

from distbelief.partition.reports.report import seconds


ROUNDING: Final = 3.0
SMALLEST: Final = 1e-6
"""An error, relative to the largest number, that is rounding in any case."""


@final
@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One quantity, of the plan and of one process.

    Attributes:
        name: "outputs", "loss", or a tensor, whose gradient it is.
        error: Largest distance from float64, relative to its largest number.
        rounding: The same of the one process.
    """

    name: str
    error: float
    rounding: float

    @property
    def agrees(self) -> bool:
        """Whether the plan computes the same."""
        return self.error <= max(ROUNDING * self.rounding, SMALLEST)


@final
@dataclass(frozen=True, kw_only=True)
class Link:
    """From one machine to another, in a step."""

    sender: int
    receiver: int
    predicted: int
    sent: int


@final
@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found.

    Attributes:
        n_machines: Of the plan.
        agreements: The worst last.
        links: All of them.
        predicted_seconds: Of a step; None if nobody said.
        measured_seconds: Of a step.
        alone_seconds: Of a step of one process.
        cluster: What the prediction is for.
        n_cores: Of this host.
    """

    n_machines: int
    agreements: Sequence[Agreement]
    links: Sequence[Link]
    predicted_seconds: float | None
    measured_seconds: float
    alone_seconds: float
    cluster: str
    n_cores: int

    @property
    def passed(self) -> bool:
        """Whether numbers and bytes are as they should be."""
        exact = all(link.predicted == link.sent for link in self.links)
        return exact and all(each.agrees for each in self.agreements)

    def plain(self) -> dict[str, object]:
        """Return all of it as JSON has it."""
        return {
            "passed": self.passed,
            "machines": self.n_machines,
            "cores": self.n_cores,
            "errors": {
                each.name: {"plan": each.error, "one_process": each.rounding}
                for each in self.agreements
            },
            "links": [
                {
                    "from": link.sender,
                    "to": link.receiver,
                    "predicted_bytes": link.predicted,
                    "sent_bytes": link.sent,
                }
                for link in self.links
            ],
            "predicted_seconds": self.predicted_seconds,
            "measured_seconds": self.measured_seconds,
            "one_process_seconds": self.alone_seconds,
            "cluster": self.cluster,
        }

    def show(self, console: Console) -> None:
        """Print a table, and what to think of it."""
        table = Table(title=f"the plan for {self.n_machines} machines, run here")
        table.add_column("what")
        for column in ("plan", "one process", ""):
            table.add_column(column, justify="right")
        for each in self.agreements:
            verdict = "agrees" if each.agrees else "[red]differs[/red]"
            table.add_row(each.name, f"{each.error:.1e}", f"{each.rounding:.1e}", verdict)
        console.print(table)
        links = Table()
        for column in ("link", "bytes a step, predicted", "sent"):
            links.add_column(column, justify="right")
        for link in self.links:
            links.add_row(
                f"{link.sender} -> {link.receiver}", f"{link.predicted:,}", f"{link.sent:,}"
            )
        if self.links:
            console.print(links)
        for line in self._remarks():
            console.print(f" {line}", style="dim", markup=False, soft_wrap=True)

    def _remarks(self) -> list[str]:
        measured = seconds(self.measured_seconds)
        alone = seconds(self.alone_seconds)
        speed_up = self.alone_seconds / self.measured_seconds
        lines = [
            "Errors are from float64, relative to the largest number.",
            f"A step took {measured}, and {alone} in one process: {speed_up:.2f}x.",
        ]
        if self.predicted_seconds is not None:
            said = seconds(self.predicted_seconds)
            ratio = self.measured_seconds / self.predicted_seconds
            lines.append(
                f"Predicted for cluster {self.cluster!r}: {said}; here it is "
                f"{ratio:.2f} times that."
            )
        if self.n_machines > self.n_cores:
            lines.append(
                f"{self.n_machines} machines share {self.n_cores} cores here: times "
                "are those of a crowd."
            )
        lines.append("All agrees." if self.passed else "The plan is NOT right here.")
        return lines
