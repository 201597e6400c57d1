"""What `minimize` returns of a run that has ended, and where it leaves the model."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.job.run.result import Run
from distbelief.job.run.summary import Summary
from sandblaster.api import result_of
from sandblaster.optimizers.termination import Reason


HERE = "tests.sandblaster.test_result"
JOB = f"""
[model]
factory = "{HERE}:net"
[data.train]
factory = "{HERE}:net"
[algorithm]
name = "sandblaster"
loss = "mse"
"""
NO_MODEL = "no model was written: No space left on device"


def net() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def ended(directory: Path, *, exit_code: int = 0, **figures: object) -> Run:
    """Return a run that has ended so; all else is null or None."""
    known = {
        "name": "minimize",
        "directory": str(directory),
        "algorithm": "sandblaster",
        "stop_reason": Reason.CONVERGED_GRADIENT.sentence,
        "loss": 0.5,
        "figures": {"iteration": 3.0, "evaluations": 4.0, "gradient_norm": 1e-6},
        **figures,
    }
    fields = msgspec.structs.fields(Summary)
    blank = {field.name: None for field in fields if field.required}
    summary = Summary(**{**blank, "seconds": 1.0, **known})  # type: ignore[arg-type] # figures
    job = parse_job(JOB, path="job.toml")
    return Run(directory=directory, summary=summary, exit_code=exit_code, job=job)


def begun() -> nn.Module:
    """Return a model of the user's, where its search begins."""
    model = net()
    nn.init.constant_(model.weight, 7.0)  # type: ignore[arg-type] # its one parameter
    return model


def test_the_model_that_was_given_holds_the_point_found(tmp_path: Path) -> None:
    save_file({"weight": torch.tensor([[1.0, 2.0]])}, tmp_path / "model.safetensors")
    model = begun()
    result = result_of(ended(tmp_path), module=model)
    assert result.success
    assert result.model is model
    assert result.x.tolist() == [1.0, 2.0]
    assert result_of(ended(tmp_path), module=None).x.tolist() == [1.0, 2.0]


def test_a_run_without_a_point_leaves_the_model_where_it_was(tmp_path: Path) -> None:
    """It was given the values that its factory draws: a worse point than its own."""
    early = ended(tmp_path, exit_code=130, model_error="no model was written", figures={})
    result = result_of(early, module=begun())
    assert result.x.tolist() == [7.0, 7.0]
    assert (result.success, result.reason) == (False, Reason.STOPPED)
    assert result_of(early, module=None).x.shape == (2,)  # as the factory makes it


@pytest.mark.parametrize(("exit_code", "error"), [(1, NO_MODEL), (130, None)])
def test_a_point_that_no_disk_has_taken_is_no_success(
    tmp_path: Path, exit_code: int, error: str | None
) -> None:
    """With a full disk it had converged, at values that were never a starting point."""
    run = ended(tmp_path, exit_code=exit_code, error=error, model_error=NO_MODEL)
    model = begun()
    with pytest.raises(JobError, match="could not be saved: no model was written: No"):
        result_of(run, module=model)
    assert torch.equal(model.get_parameter("weight"), torch.full((1, 2), 7.0))
