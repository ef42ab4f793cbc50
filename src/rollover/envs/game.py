"""What a game answers: the public word for environments with `step`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Observation:
    """What `step(message)` of an environment of one's own returns.

    text: what the policy is told, unless the episode is done. reward: of this turn; those of an episode are added.
    done: the episode ends here.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
