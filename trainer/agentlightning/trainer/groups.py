"""Which groups a step can learn from, and how many it must ask for again.

A group without variance teaches nothing, and neither does one that infrastructure failures left with fewer than two
scored rollouts. Such groups are replaced by groups of other tasks (DAPO's dynamic sampling, arXiv 2503.14476), in bounded
rounds: a policy that solves everything, or nothing, must not keep a step waiting for ever. The rate at which groups are
accepted says how near that is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from agentlightning.trainer.advantage import GroupStats

__all__ = ["Intake"]


@dataclass(slots=True)
class Intake:
    """The groups of one step, round by round.

    intake = Intake(wanted=8, refills=2)
    while intake.missing:
        ...sample intake.missing groups, score all of the step's...
        intake.admit(scored.groups, asked=intake.missing)
    """

    wanted: int
    """Groups with a signal that the step should have."""
    refills: int
    """Rounds after the first."""
    asked: int = 0
    """Groups that have been sampled."""
    accepted: set[str] = field(default_factory=set)
    """Those of them with a signal."""
    rounds: int = 0

    def admit(self, groups: Iterable[GroupStats], *, asked: int) -> None:
        """Take note of a round: `asked` groups were sampled, and these are the statistics of all so far."""
        self.rounds += 1
        self.asked += asked
        self.accepted |= {group.group_id for group in groups if not group.zero_variance}

    @property
    def missing(self) -> int:
        """How many groups to sample in the next round; 0: the step has what it wanted, or no round is left."""
        if self.rounds > self.refills:
            return 0
        return max(0, self.wanted - len(self.accepted))

    @property
    def accept_rate(self) -> float:
        """Of the groups that were sampled, the share with a signal."""
        return len(self.accepted) / self.asked if self.asked else 1.0
