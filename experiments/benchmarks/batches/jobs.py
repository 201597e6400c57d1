"""Sandblaster jobs on real processes, and what they came to."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

from distbelief.config import toml
from distbelief.config.load import parse_job
from distbelief.run.metrics_file import Measurement, read_metrics
from distbelief.run.result import Run
from distbelief.trainer import Watch, train


PROBLEMS: Final = "experiments.benchmarks.batches.problems"
N_REPLICAS: Final = 2


@final
@dataclass(frozen=True, kw_only=True)
class Ours:
    """What a job came to.

    Attributes:
        run: It.
        lines: Its metrics: one of each iteration, as far as they are seen.
    """

    run: Run
    lines: list[Measurement]

    @property
    def figures(self) -> dict[str, float]:
        """The coordinator's."""
        return self.run.summary.figures

    @property
    def training_seconds(self) -> float:
        """Of all evaluations, by the pace of those after the first.

        Before that processes start, and build their data, each at its own pace.
        """
        return self.seconds_per_example() * self.run.summary.samples

    def seconds_per_example(self) -> float:
        """Return it, between the first and the last iteration that were seen.

        Lines from before the first tell of the start of the processes.
        """
        begun = [line for line in self.lines if line.samples]
        if not begun:
            raise RuntimeError("the job ended before anything of it was seen")
        seen = {line.samples: line.time for line in reversed(begun)}
        first, last = min(seen), max(seen)
        if first == last:
            return float("nan")  # too quick to be seen
        return (seen[last] - seen[first]) / (last - first)


def job(
    tables: dict[str, dict[str, object]],
    *,
    watch: Watch | None = None,
    snapshot_every: str = "30 s",
) -> Ours:
    """Run a job with these tables besides the usual."""
    with TemporaryDirectory() as folder:
        output = {
            "directory": f"{folder}/run",
            "report_every": "100 ms",
            "snapshot_every": snapshot_every,
        }
        text = toml.write({**tables, "output": output})
        run = train(parse_job(text, path="sandblaster.toml"), show=False, watch=watch)
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        if run.summary.error is not None:
            raise RuntimeError(run.summary.error)
        return Ours(run=run, lines=lines)
