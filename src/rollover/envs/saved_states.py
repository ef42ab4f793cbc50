"""What becomes of an episode whose object of the user's class is lost, with the process or as it failed: its kind.

    stateless   another object plays its turns again
    snapshot    another object gets what `snapshot()` returned after the last turn that was played
    restart     nothing can stand in its place

    a turn is played ──▶ save ──▶ keep, before the answer is appended      a kill ──▶ recall ──▶ find ──▶ restore

Owns the states, the last one of each rollout, as JSON: {turns, digest, messages, done, rewards, state}. The state is
that after so many turns, the messages are the answer to the last of them, which may not be appended yet. `digest` is of
the tokens up to there: a state that belongs to other ones is none.
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

_KEPT_AS = "environment"  # the name of a state among what a group keeps (Group.kept)
KINDS = ("stateless", "snapshot", "restart")
Place = tuple[int, int]  # group id, sibling


@dataclass
class Told:
    """What the environment says after a turn. `done`: nothing, as the episode has ended. `reward`: a game's."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    reward: float = 0.0


@dataclass
class Played:
    """An object of the user's class, the turns that it has seen, and what it said to each. `unsaved`: its state could
    not be kept, and is not asked for any more."""

    made: Any
    turns: list[list[int]] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    unsaved: bool = False


class CannotRestore(ValueError):
    """The user's `restore` failed."""


class SavedStates:
    """Of one run, whose class has this `kind`. `keep` is told of every state, unless it is an evaluation's.

    `num_restored`: objects that got a state; `num_unsaved`: episodes whose state could not be kept; `num_restarted`:
    episodes that began again. Evaluations are left out.
    """

    def __init__(self, kind: str, code: UserCode, whose: str, keep: Keep) -> None:
        self.kind, self.code, self.whose, self._keep = kind, code, whose, keep
        self.num_restored = self.num_unsaved = self.num_restarted = 0
        self._saved: dict[Place, Mapping[str, Any]] = {}

    def can_be_had(self, rollout: Rollout, *num_turns: int) -> bool:
        """Whether another object can stand where one stood that had seen one of these numbers of the rollout's turns:
        before its first turn always."""
        return self.kind == "stateless" or 0 in num_turns or self.find(rollout, *num_turns) is not None

    def find(self, rollout: Rollout, *num_turns: int) -> Mapping[str, Any] | None:
        """The state of the rollout's object after one of these numbers of turns, if there is one."""
        saved = self._saved.get(_place(rollout)) if self.kind == "snapshot" else None
        if saved is None or saved["turns"] not in num_turns or saved["digest"] != _digest(rollout, saved["turns"]):
            return None
        return saved

    def recall(self, place: Place, kept: Mapping[str, Any]) -> None:
        """What an earlier process kept, unless there is something newer."""
        if (saved := kept.get(_KEPT_AS)) is not None:
            self._saved.setdefault(place, saved)

    def forget(self, rollout: Rollout) -> None:
        """It left."""
        self._saved.pop(_place(rollout), None)

    def on_restart(self, rollout: Rollout, kept: Mapping[str, Any]) -> None:
        """It begins again."""
        self.forget(rollout)
        self.num_restarted += rollout.group_id >= 0
        if kept.get(_KEPT_AS) is not None:
            self._keep(*_place(rollout), _KEPT_AS, None)

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        counted = {"restarted": self.num_restarted, "restored": self.num_restored, "unsaved": self.num_unsaved}
        return {f"episodes/{name}": float(num) for name, num in counted.items()}

    async def save(self, rollout: Rollout, played: Played) -> None:
        """Keep the state of the object, which has just played the last turn of the rollout. Where that fails it is
        said, and the episode is kept no more: after a kill it begins again."""
        if self.kind != "snapshot" or played.unsaved:
            return
        outcome = await self.code.call(played.made.snapshot)
        try:
            if outcome.failed:
                raise ValueError(f"failed at snapshot: {outcome.why}")
            state = as_json(outcome.value, "what snapshot() returns")
        except Exception as error:  # boundary: the user's object
            self._give_up(rollout, played, str(error))
            return
        last = played.told[-1]
        saved = {
            "turns": len(played.turns),
            "digest": _digest(rollout, len(played.turns)),
            "messages": last.messages,
            "done": last.done,
            "rewards": [told.reward for told in played.told],
            "state": state,
        }
        self._saved[_place(rollout)] = saved
        if rollout.group_id >= 0:
            self._keep(*_place(rollout), _KEPT_AS, saved)

    async def restore(self, rollout: Rollout, new: Played, saved: Mapping[str, Any]) -> Played:
        """`new`: another object, after its `reset`, which gets the state. CannotRestore where it fails."""
        outcome = await self.code.call(new.made.restore, as_json(saved["state"], "the state"))  # a copy
        if outcome.failed:
            raise CannotRestore(f"failed at restore: {outcome.why}")
        self.num_restored += rollout.group_id >= 0
        *before, reward = saved["rewards"]
        new.turns = sampled_turns(rollout)[: saved["turns"]]
        messages = [dict(message) for message in saved["messages"]]
        new.told = [*(Told(reward=of) for of in before), Told(messages, saved["done"], reward)]
        return new

    def _give_up(self, rollout: Rollout, played: Played, why: str) -> None:
        played.unsaved = True
        self.forget(rollout)
        if rollout.group_id < 0:
            return
        if not self.num_unsaved:
            logger.warning(
                f"{self.whose}: {why}. Rollout {rollout.rollout_id} goes on, and would begin again after a kill; later"
                " ones are counted (episodes/unsaved)"
            )
        self.num_unsaved += 1


def _place(rollout: Rollout) -> Place:
    return rollout.group_id, rollout.sibling


def _digest(rollout: Rollout, num_turns: int) -> int:
    """A checksum of the tokens up to the end of that turn, without the answer to it."""
    crc = num_answers = 0
    for segment in rollout.segments:
        num_answers += not segment.trainable
        if num_answers == num_turns:
            break
        crc = zlib.crc32(np.asarray(segment.token_ids, "<i4").tobytes(), crc)
        crc = zlib.crc32("".join(image.digest for image in segment.media).encode(), crc)
    return crc
