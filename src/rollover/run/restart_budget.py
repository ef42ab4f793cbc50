"""Counts the losses of a run's trainer backend, and decides whether the run continues after one more."""

from __future__ import annotations


class RestartBudget:
    """`most`: the number of losses in a row, without a new step in between, after which the run continues
    (cluster.max_restarts). A step that is repeated is not new: a backend that is lost at the same step each time would
    otherwise be restarted for ever.

    `total`: over all processes of the run; `in_a_row`: since the run last came further; `furthest`: the number of its
    newest step, -1 before the first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = self.in_a_row = 0
        self.furthest = -1

    def on_step(self, number: int) -> None:
        """Step `number` was made."""
        if number > self.furthest:
            self.furthest, self.in_a_row = number, 0

    def on_loss(self) -> None:
        """The backend was lost."""
        self.total += 1
        self.in_a_row += 1

    @property
    def too_many(self) -> bool:
        """Whether the run ends with the last loss."""
        return self.in_a_row > self.most
