"""What a game answers: the public word for environments with `step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Observation:
    """What `step(message)` of an environment of one's own returns.

    text: what the policy is told, unless the episode is done: a text, or a list of content parts, where it shows
    images ({"type": "image", "image": a path, bytes or a PIL image}). reward: of this turn; those of an episode are
    added. done: the episode ends here.
    """

    text: str | Sequence[Mapping[str, Any]] = ""
    reward: float = 0.0
    done: bool = False
