"""All that a supervisor keeps of its job: one set of books, for all who do its work."""

from dataclasses import dataclass
from typing import Self, final

from distbelief.job.supervision.allowances import Allowances
from distbelief.job.supervision.ending import Ending
from distbelief.job.supervision.figures import Figures
from distbelief.job.supervision.membership import Membership
from distbelief.job.supervision.pairs import Pairs
from distbelief.job.supervision.rounds import Evaluations, Saves
from distbelief.job.supervision.supervisor_config import SupervisorConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What is known and what is under way.

    Attributes:
        config: What the supervisor was told.
        members: All roles.
        pairs: Which copy of each shard leads.
        figures: What is shown.
        evaluations: Requests to the evaluator.
        saves: Rounds of snapshots.
        ending: How far the job has ended.
        allowances: How far each replica may train.
    """

    config: SupervisorConfig
    members: Membership
    pairs: Pairs
    figures: Figures
    evaluations: Evaluations
    saves: Saves
    ending: Ending
    allowances: Allowances

    @classmethod
    def open(cls, config: SupervisorConfig) -> Self:
        """Return the books of a job that has not begun."""
        members = Membership(
            config.roster, incarnation=config.first_incarnation, admits_guests=config.admits_guests
        )
        figures = Figures(
            metric_name=config.metric_name,
            higher_is_better=config.higher_is_better,
            before=config.before,
        )
        return cls(
            config=config,
            members=members,
            pairs=Pairs(members, first=config.first_incarnation, clocks=config.before.clocks),
            figures=figures,
            evaluations=Evaluations(every=config.evaluate_every),
            saves=Saves(every=config.snapshot_every, first=config.first_label),
            ending=Ending(),
            allowances=Allowances(members, figures, stop=config.stop, batch_size=config.batch_size),
        )
