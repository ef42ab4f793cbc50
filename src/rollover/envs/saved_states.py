"""Saved states of user-class objects: how an object is replaced that was lost with its process or failed.

    stateless   another object repeats its turns
    snapshot    another object gets what `snapshot()` returned after the last turn
    restart     it cannot be replaced

    a turn is played ──▶ save ──▶ keep, before the answer is appended      a kill ──▶ recall ──▶ find ──▶ restore

Owns the last state of each rollout, as JSON: {turns, digest, messages, done, rewards, state}. `turns`: number of turns
before the state. `messages`: the answer to the last of them, which may not be appended yet. `digest`: of the tokens up
to there; a state with another digest is ignored.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollover.envs.chat import sampled_turns
from rollover.envs.protocol import Keep
from rollover.envs.user_code import UserCode
from rollover.functions import as_json
from rollover.types import Rollout

logger = logging.getLogger(__name__)

_KEPT_AS = "environment"  # name of the state in Group.kept
KINDS = ("stateless", "snapshot", "restart")
RolloutKey = tuple[int, int]  # group id, sibling


@dataclass
class TurnAnswer:
    """The environment's answer to a turn. `done`: the episode has ended. `reward`: of a game."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    reward: float = 0.0


@dataclass
class EnvObject:
    """An object of the user's class (`made`), the turns that it has seen, and its answers. `unsaved`: its state could
    not be saved, and is not requested any more."""

    made: Any
    turns: list[list[int]] = field(default_factory=list)
    answers: list[TurnAnswer] = field(default_factory=list)
    unsaved: bool = False


class RestoreFailed(ValueError):
    """The user's `restore` failed."""


class SavedStates:
    """States of one run, whose class has this `kind` and is called `name` in messages. `keep` stores them.

    `num_restored`: objects that got a state; `num_unsaved`: episodes whose state could not be saved; `num_restarted`:
    episodes that began again. Evaluations are neither stored nor counted.
    """

    def __init__(self, kind: str, code: UserCode, name: str, keep: Keep) -> None:
        self.kind, self.code, self.name, self._keep = kind, code, name, keep
        self.num_restored = self.num_unsaved = self.num_restarted = 0
        self._saved: dict[RolloutKey, Mapping[str, Any]] = {}

    def can_replace(self, rollout: Rollout, *num_turns: int) -> bool:
        """Return whether another object can replace one that had seen one of these numbers of turns; always for 0."""
        return self.kind == "stateless" or 0 in num_turns or self.find(rollout, *num_turns) is not None

    def find(self, rollout: Rollout, *num_turns: int) -> Mapping[str, Any] | None:
        """Return the state of the rollout's object after one of these numbers of turns, if there is one."""
        saved = self._saved.get(_place(rollout)) if self.kind == "snapshot" else None
        if saved is None or saved["turns"] not in num_turns or saved["digest"] != _digest(rollout, saved["turns"]):
            return None
        return saved

    def recall(self, place: RolloutKey, kept: Mapping[str, Any]) -> None:
        """Restore a state that an earlier process kept, unless there is a newer one."""
        if (saved := kept.get(_KEPT_AS)) is not None:
            self._saved.setdefault(place, saved)

    def drop(self, rollout: Rollout) -> None:
        """Drop the rollout's state."""
        self._saved.pop(_place(rollout), None)

    def on_restart(self, rollout: Rollout, kept: Mapping[str, Any]) -> None:
        """Drop the state of a rollout that begins again, also where it is kept."""
        self.drop(rollout)
        self.num_restarted += rollout.group_id >= 0
        if kept.get(_KEPT_AS) is not None:
            self._keep(*_place(rollout), _KEPT_AS, None)

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        counted = {"restarted": self.num_restarted, "restored": self.num_restored, "unsaved": self.num_unsaved}
        return {f"episodes/{name}": float(num) for name, num in counted.items()}

    async def save(self, rollout: Rollout, episode: EnvObject) -> None:
        """Save the state of an object that has played the rollout's last turn. If that fails, log it and stop saving:
        after a kill the episode begins again."""
        if self.kind != "snapshot" or episode.unsaved:
            return
        outcome = await self.code.call(episode.made.snapshot)
        try:
            if outcome.failed:
                raise ValueError(f"failed at snapshot: {outcome.why}")
            state = as_json(outcome.value, "what snapshot() returns")
        except Exception as error:  # boundary: the user's object
            self._stop_saving(rollout, episode, str(error))
            return
        last = episode.answers[-1]
        saved = {
            "turns": len(episode.turns),
            "digest": _digest(rollout, len(episode.turns)),
            "messages": last.messages,
            "done": last.done,
            "rewards": [answer.reward for answer in episode.answers],
            "state": state,
        }
        self._saved[_place(rollout)] = saved
        if rollout.group_id >= 0:
            self._keep(*_place(rollout), _KEPT_AS, saved)

    async def restore(self, rollout: Rollout, new: EnvObject, saved: Mapping[str, Any]) -> EnvObject:
        """Give the state to `new`, an object after its `reset`. RestoreFailed if that fails."""
        outcome = await self.code.call(new.made.restore, as_json(saved["state"], "the state"))  # a copy
        if outcome.failed:
            raise RestoreFailed(f"failed at restore: {outcome.why}")
        self.num_restored += rollout.group_id >= 0
        *before, reward = saved["rewards"]
        new.turns = sampled_turns(rollout)[: saved["turns"]]
        messages = [dict(message) for message in saved["messages"]]
        new.answers = [
            *(TurnAnswer(reward=reward_of_turn) for reward_of_turn in before),
            TurnAnswer(messages, saved["done"], reward),
        ]
        return new

    def _stop_saving(self, rollout: Rollout, episode: EnvObject, why: str) -> None:
        episode.unsaved = True
        self.drop(rollout)
        if rollout.group_id < 0:
            return
        if not self.num_unsaved:
            logger.warning(
                f"{self.name}: {why}. Rollout {rollout.rollout_id} continues, and would begin again after a kill; later"
                " failures are counted (episodes/unsaved)"
            )
        self.num_unsaved += 1


def _place(rollout: Rollout) -> RolloutKey:
    return rollout.group_id, rollout.sibling


def _digest(rollout: Rollout, num_turns: int) -> int:
    """Return a checksum of the tokens up to the end of that turn, without its answer."""
    crc = num_answers = 0
    for segment in rollout.segments:
        num_answers += not segment.trainable
        if num_answers == num_turns:
            break
        crc = zlib.crc32(np.asarray(segment.token_ids, "<i4").tobytes(), crc)
        crc = zlib.crc32("".join(image.digest for image in segment.media).encode(), crc)
    return crc
