"""What a run has given: the trained model, its figures, its curve."""

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast, final

import msgspec
from safetensors.torch import load_file
from torch import nn
from typing_extensions import override

from distbelief.config.algorithms import facts_of
from distbelief.config.job import Job
from distbelief.core import notebook
from distbelief.core.drawing import plot
from distbelief.core.errors import JobError, StorageError
from distbelief.core.frames import frame
from distbelief.job.run.metrics_file import read_metrics
from distbelief.job.run.summary import Summary, final_table
from distbelief.task.task import build_model


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True, repr=False)
class Run:
    """A job that has ended.

    Attributes:
        directory: The run directory, with all files of the run.
        summary: Final figures, as in summary.json: samples, loss, metric, stop_reason and more.
        exit_code: 0 done, 1 failed, 130 stopped by Ctrl+C, 143 by SIGTERM, 129 by SIGHUP.
        job: The job as it ran.
        model: The trained module, in evaluation mode.
        metrics: Its curve: the rows of metrics.jsonl, oldest first. Each has `time` (seconds of the
            job), `step`, `samples`, `loss` (mean since the row before), held-out `held_out_loss`,
            `metric` and `metrics`, `samples_per_second`, staleness in pushes, bytes, and `figures`
            of the algorithm, such as `gradient_norm`; what was not measured yet is None.
    """

    directory: Path
    summary: Summary
    exit_code: int
    job: Job
    module: nn.Module | None = None  # one like the model, if the job cannot make it

    @override
    def __repr__(self) -> str:
        found = self.summary
        held_out = {found.metric_name: found.metric, **found.others}
        figures = {f"held-out {name.lstrip(':')}": n for name, n in held_out.items()}
        figures = {"loss": found.loss, **figures}
        shown = "".join(f", {name} {n:.4g}" for name, n in figures.items() if n is not None)
        ended = found.error or found.stop_reason
        return f"<Run {self.directory}: {found.samples:,} samples{shown}; {ended}>"

    def _repr_html_(self) -> str:
        curve = notebook.picture(self.directory / "curve.png")
        return notebook.html(lambda console: console.print(final_table(self.summary))) + curve

    @property
    def metrics(self) -> list[dict[str, object]]:
        rows = read_metrics(self.directory / "metrics.jsonl")
        return [cast("dict[str, object]", msgspec.to_builtins(row)) for row in rows]

    def to_pandas(self) -> object:
        """Return `metrics` as a pandas.DataFrame; JobError without pandas."""
        return frame(self.metrics)

    def plot(self) -> "Figure":
        """Return a matplotlib figure of training and held-out loss over the seconds of the job."""
        rows = read_metrics(self.directory / "metrics.jsonl")
        curves = {
            "training": [(row.time, row.loss) for row in rows],
            "held out": [(row.time, row.held_out_loss) for row in rows],
        }
        return plot(curves, x="seconds", y="loss", title=self.job.name)

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in evaluation mode; StorageError if none was written."""
        path = self.directory / "model.safetensors"
        if self.summary.model_error is not None:  # a file of an earlier session may exist
            raise StorageError(f"{self.directory}: {self.summary.model_error}")
        if not path.is_file():
            raise StorageError(
                f"{path} does not exist: the run ended before anything was trained "
                f"({self.summary.error or self.summary.stop_reason})"
            )
        return self._loaded(path)

    @cached_property
    def best_model(self) -> nn.Module:
        """The model of the best evaluation, in evaluation mode.

        StorageError if none was kept: [output] keep = "best" keeps it.
        """
        if self.job.output.keep != "best":
            raise StorageError(
                f'{self.directory}: no best model was kept: add keep = "best" to [output]'
            )
        if self.summary.kept is None:
            why = self.summary.unwritten or "no evaluation gave a number"
            raise StorageError(f"{self.directory}: no best model was kept: {why}")
        return self._loaded(self.directory / "best.safetensors")

    @cached_property
    def ema_model(self) -> nn.Module:
        """The model with the running averages of its parameters, in evaluation mode.

        Buffers are those of `model`. StorageError if none was kept: `ema` of the rule keeps it.
        """
        path = self.directory / "ema.safetensors"
        rule = facts_of(self.job).rule
        if rule is None or rule.ema is None:
            raise StorageError(f"{self.directory}: no average was kept: give the rule ema = 0.999")
        if self.summary.model_error is not None or not path.is_file():
            why = self.summary.model_error or "the run ended before anything was trained"
            raise StorageError(f"{self.directory}: no average was kept: {why}")
        return self._loaded(path)

    def _loaded(self, path: Path) -> nn.Module:
        module = build_model(self.job.model) if self.module is None else deepcopy(self.module)
        module.load_state_dict(load_file(path))
        return module.eval()

    def unless_failed(self, user: str) -> Self:
        """Return this; JobError if the job failed."""
        if self.summary.error is not None:
            raise JobError(f"{user}: {self.summary.error}; its files are in {self.directory}")
        return self
