"""Result of a finished run: its directory, summary, and model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from safetensors.torch import load_file
from torch import nn

from distbelief.config.job import Job
from distbelief.errors import StorageError
from distbelief.run.summary import Summary
from distbelief.task.task import build_model


@final
@dataclass(frozen=True)
class Run:
    """A job that has ended."""

    directory: Path
    summary: Summary
    exit_code: int  # 0 done, 1 failed, 130 stopped by Ctrl+C, 143 by SIGTERM, 129 by SIGHUP
    job: Job  # as it ran

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in evaluation mode."""
        path = self.directory / "model.safetensors"
        if self.summary.model_error is not None:  # a file of an earlier session may exist
            raise StorageError(f"{self.directory}: {self.summary.model_error}")
        if not path.is_file():
            raise StorageError(
                f"{path} does not exist: the run ended before anything was trained "
                f"({self.summary.error or self.summary.stop_reason})"
            )
        module = build_model(self.job.model)
        module.load_state_dict(load_file(path))
        return module.eval()
