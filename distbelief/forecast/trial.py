"""One variant of a job: whether its machines hold it, and a run with every seed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from distbelief.errors import JobError
from distbelief.forecast.hosting import Hosting
from distbelief.forecast.pricing import PricedHosting, as_of, stand_in_for
from distbelief.forecast.staging import StagedJob, Staging
from distbelief.forecast.sweeping import Variant
from distbelief.forecast.virtual_run import Ended, Host, run_virtually
from distbelief.forecast.waiting import Waiting
from distbelief.forecast.watching import Tell
from distbelief.job.display.view import SupervisorView
from distbelief.roles import Seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A variant that can be run.

    Attributes:
        settings: What was varied, by key.
        job: So, on its own data.
        runs: What is run of it: itself, or a stand-in at its price.
        hosting: Its machines.
        host: The same, as what is run sees them.
    """

    settings: Mapping[str, str]
    job: StagedJob
    runs: StagedJob
    hosting: Hosting
    host: Host

    @staticmethod
    def of(
        job: StagedJob,
        hosting: Hosting,
        settings: Mapping[str, str],
        *,
        priced_by: Staging | None = None,
    ) -> "Trial":
        """Return the trial of a job.

        Args:
            job: Made ready.
            hosting: Its machines.
            settings: What was varied.
            priced_by: Makes a stand-in ready, if nothing is to be learnt.

        Raises:
            JobError: it cannot be priced.
        """
        runs = job
        host: Host = hosting
        if priced_by is not None:
            runs = stand_in_for(job, priced_by)
            host = PricedHosting(hosting=hosting, large=job)
        return Trial(settings=settings, job=job, runs=runs, hosting=hosting, host=host)

    @property
    def name(self) -> str:
        """Its settings in words, or its job's name."""
        short = (f"{key.rpartition('.')[2]} {v}" for key, v in self.settings.items())
        return ", ".join(short) or self.job.job.name

    def variant(self, *, machines: int | None = None) -> Variant:
        """Return it as one that was not run, and why if it cannot be.

        Args:
            machines: The most that it may take; None: as many as there are.
        """
        n_machines, left_out = self.hosting.n_needed(self.job), None
        if machines is not None and n_machines > machines:
            left_out = f"takes {n_machines} machines"
        else:
            try:
                self.host.options(self.runs)
            except JobError as error:
                left_out = str(error)
        return Variant(
            settings=self.settings, job=self.job.job, n_machines=n_machines, left_out=left_out
        )

    def run(self, *, seed: int, waiting: Waiting, keeps_spans: bool) -> Ended:
        """Run it once; where machines are lost, as long as it takes with that.

        Raises:
            JobError: it takes longer than is known of the machines.
        """
        name = f"{self.name}, seed {seed}"
        loses = self.hosting.loses_machines
        waiting.begin(f"{name}, before machines are lost" if loses else name)
        tell = waiting.tell if self.runs is self.job else partial(_untaught, waiting)
        ended = self._run(seed, tell, keeps_spans=keeps_spans, horizon=None)
        horizon = 0.0
        while loses and ended.outcome.seconds > horizon:
            waiting.begin(name)
            # With every outage within twice that time it may take longer still.
            trace, seconds = self.hosting.cluster.trace, ended.outcome.seconds
            known = float("inf") if trace is None else trace.covers
            horizon = max(seconds, min(2 * seconds, known))
            ended = self._run(seed, tell, keeps_spans=keeps_spans, horizon=horizon)
        waiting.end()
        if self.runs is not self.job:
            ended = replace(ended, outcome=as_of(self.job, self.runs, ended.outcome))
        return ended

    def _run(self, seed: int, tell: Tell, *, keeps_spans: bool, horizon: Seconds | None) -> Ended:
        outages = self.hosting.outages
        return run_virtually(
            self.runs,
            self.host,
            seed=seed,
            faults=() if horizon is None else outages(self.runs, seed=seed, horizon=horizon),
            tell=tell,
            keeps_spans=keeps_spans,
        )


def _untaught(waiting: Waiting, view: SupervisorView) -> None:
    """Tell how far a stand-in is, but not what it has learnt."""
    waiting.tell(replace(view, metric=None))
