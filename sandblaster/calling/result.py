"""scipy's OptimizeResult of a run."""

from pathlib import Path
from typing import final

import numpy as np
from scipy.optimize import OptimizeResult
from torch import nn
from torch.nn.utils import parameters_to_vector

from distbelief.errors import JobError, StorageError
from distbelief.job.directory.run import Run
from distbelief.job.display.view import SupervisorView
from distbelief.runtime.task.task import build_model
from sandblaster.reasons import Reason


@final
class MinimizeResult(OptimizeResult):  # type: ignore[explicit-any] # its stub is so
    """What `minimize` returns: scipy's OptimizeResult, with these figures.

    Attributes:
        x: (n,) the parameters, in the order of `model.parameters()`.
        success: Whether it converged.
        status: Number of the reason, in `sandblaster.Reason`.
        message: Why it ended, for people.
        fun: The loss, penalties included.
        jac_norm: Largest element of its gradient, by size.
        nit: Points accepted.
        nfev: Evaluations begun; each is of loss and gradient.
        njev: The same.
        reason: Why it ended.
        n_wasted: Examples computed in vain.
        seconds: How long the job ran.
        model: With these parameters.
        directory: The run directory.
    """


INTERRUPTED = frozenset({130, 143})
"""Exit codes of runs that a signal has ended."""


def interim_result(view: SupervisorView) -> MinimizeResult:
    """Return what is known of a run that goes on: no x."""
    figures = view.figures
    return _result(
        fun=view.loss,
        jac_norm=figures.get("gradient_norm"),
        nit=int(figures.get("iteration", 0)),
        nfev=int(figures.get("evaluations", 0)),
        seconds=view.seconds,
    )


def result_of(run: Run, *, module: nn.Module | None) -> MinimizeResult:
    """Return the result of a run that has ended; put it into `module` if there is one.

    A run that ends before it has a point of its own leaves that where it began.

    Raises:
        JobError: the run has failed, or the point that it found could not be saved.
    """
    summary = run.summary
    reason = _reason(run)
    if summary.error is not None and reason is Reason.STOPPED:
        raise JobError(f"minimize: {summary.error}")
    figures = summary.figures
    trained = _trained(run)
    if trained is None:
        unsaved = summary.error == summary.model_error or figures.get("iteration", 0)
        if summary.model_error is not None and unsaved:
            raise JobError(f"minimize: the point found is lost: {summary.model_error}")
        trained = build_model(run.job.model).eval() if module is None else module
    elif module is not None:
        module.load_state_dict(trained.state_dict())
        trained = module
    x = parameters_to_vector(trained.parameters()).detach().cpu().numpy().copy()
    n_evaluations = int(figures.get("evaluations", 0))
    message = reason.sentence
    if reason is Reason.STOPPED and summary.stop_reason:
        message = summary.stop_reason
    return _result(
        x=x,
        success=reason.converged,
        status=list(Reason).index(reason),
        reason=reason,
        message=message,
        fun=np.nan if summary.loss is None else summary.loss,
        jac_norm=figures.get("gradient_norm", np.nan),
        nit=int(figures.get("iteration", 0)),
        nfev=n_evaluations,
        njev=n_evaluations,
        n_wasted=int(figures.get("wasted", 0)),
        seconds=summary.seconds,
        model=trained,
        directory=Path(run.directory),
    )


def _reason(run: Run) -> Reason:
    """Return why it ended, as the algorithm has it."""
    text = run.summary.stop_reason
    if run.exit_code in INTERRUPTED:
        return Reason.STOPPED
    return next((one for one in Reason if one.sentence == text), Reason.STOPPED)


def _trained(run: Run) -> nn.Module | None:
    """Return the model, if one was saved."""
    try:
        return run.model
    except StorageError:
        return None


def _result(**figures: object) -> MinimizeResult:
    result = MinimizeResult()
    result.update(figures)
    return result
