"""How often a run has lost its trainer's backend, and whether it goes on after one more loss. Owns these counts."""

from __future__ import annotations


class Losses:
    """`most`: so many losses without a step in between are borne (cluster.max_restarts). A step that was made before,
    and is made again, is none: a backend that is lost at the same step each time would go on for ever.

    `total`: over all processes of the run; `in_a_row`: since the run last came further.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = self.in_a_row = 0
        self._furthest = -1

    def on_step(self, number: int) -> None:
        """Step `number` was made."""
        if number > self._furthest:
            self._furthest, self.in_a_row = number, 0

    def on_loss(self) -> None:
        """The backend was lost."""
        self.total += 1
        self.in_a_row += 1

    @property
    def too_many(self) -> bool:
        """Whether the run ends with the last loss."""
        return self.in_a_row > self.most
