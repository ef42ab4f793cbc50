"""A game: guess a number from 1 to 8 with three guesses; each but the last gets a reply.

`rollover train guess_number` runs it; docs/agents.md describes such classes.
"""

from __future__ import annotations

import random
import re

from rollover.envs.protocol import Observation
from rollover.tasks.source import SourceSetup
from rollover.types import Task

LARGEST, GUESSES = 8, 3


class GuessNumber:
    # An example game: form of a guess, meaning of the replies.
    examples = (
        {"role": "user", "content": "Game 0: my number is between 1 and 8. Guess it."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "5"},
    )

    def reset(self, answer: str) -> None:
        self.number, self.left = int(answer), GUESSES

    def step(self, message: str) -> Observation:
        self.left -= 1
        found = re.search(r"\d{1,3}", message, re.ASCII)
        if found is not None and int(found[0]) == self.number:
            return Observation(reward=1.0, done=True)
        if not self.left:
            return Observation(done=True)
        if found is None:
            return Observation("write a number")
        return Observation("higher" if int(found[0]) < self.number else "lower")


class Numbers:
    """Endless games. `setup`: see tasks/source.py."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup

    def problem(self, index: int) -> Task:
        draw = random.Random(f"{self.setup.seed}/{index}")
        text = f"Game {draw.randint(1, 99_999)}: my number is between 1 and {LARGEST}. Guess it."
        columns = {"answer": str(draw.randint(1, LARGEST))}
        label = self.setup.label
        return Task(f"{label}/{self.setup.seed}/{index}", label, self.setup.reward, prompt=text, columns=columns)
