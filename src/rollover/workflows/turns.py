"""Turns of an Episode: a call continues a Rollout, opens one, or repeats a recorded turn. Pure.

    call ──▶ Opened(rollout) | Continued(rollout id, tokens) ──▶ the policy samples ──▶ reply
       └──▶ Replayed(reply): the turn is recorded

The record holds the Rollouts of an Episode that lost its agent, while the workflow runs again:

    record    Rollout 0  [turn][appended][turn][appended][turn, unfinished     Rollout 1  [turn]
    a call ──has the tokens before a recorded turn──▶ that turn: its reply, or its continuation if it is unfinished
       └── else ──▶ a new turn; recorded turns without a call are removed at the end

A recorded Rollout is found by the key of its first call (`turn_key`), its later turns by the tokens that were appended
before them. This file owns the options of each present turn, the number of turns, the ids of new Rollouts, and how many
turns of each recorded Rollout were replayed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from rollover.envs.protocol import TurnOptions
from rollover.trajectories import up_to
from rollover.types import Prompt, Rollout, RolloutState, StopReason
from rollover.workflows.conversations import MODEL, BudgetUsedUp, Call, Continues, Opens, Reply
from rollover.workflows.episode import EpisodeTrajectory

EpisodePlace = tuple[int, int]  # group id, sibling
FitsCall = Callable[[int, Sequence[int], StopReason | None], bool]
"""(number of tokens before a turn, its tokens, its stop reason; None: unfinished) -> whether it can answer a call."""


def turn_key(role: str, prompt: Prompt, max_tokens: int | None, stop: Sequence[str], occurrence: int) -> int:
    """Return the 64-bit key of a turn within its Episode: equal for the same call of another run of the workflow.

    `prompt`: everything before the turn. `occurrence`: number of earlier turns of the Episode with the same call; equal
    calls are exchangeable.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps([role, max_tokens, list(stop), occurrence]).encode())
    digest.update(np.asarray(prompt.ids, "<i4").tobytes())
    for media in prompt.media:
        digest.update(media.digest.encode())
    return int.from_bytes(digest.digest(), "little")


@dataclass(eq=False)
class _Recorded:
    """A recorded Rollout. `turns`: begin and end of each, in tokens after the prompt; end None: unfinished."""

    rollout: Rollout
    turns: list[tuple[int, int | None]]
    num_replayed: int = 0

    @property
    def next_turn(self) -> tuple[int, int | None] | None:
        return self.turns[self.num_replayed] if self.num_replayed < len(self.turns) else None

    @property
    def end(self) -> int:
        """End of the replayed turns."""
        end = self.turns[self.num_replayed - 1][1] if self.num_replayed else 0
        return self.rollout.num_tokens if end is None else end


class ReplayRecord:
    """Rollouts that an earlier run of the workflow left, as copies. `key_of`: the key of the call that opened one;
    None: unknown."""

    def __init__(self, rollouts: Iterable[Rollout] = (), key_of: Callable[[Rollout], int | None] = lambda _: None):
        self._by_id = {r.rollout_id: _Recorded(r, _turns(r)) for r in rollouts}
        self._by_key = {key_of(entry.rollout): entry for entry in self._by_id.values()}

    def next_context(self, trajectory: int) -> int:
        """Return the first context number of the trajectory that is not recorded."""
        return 1 + max((r.context for r in self.rollouts if r.trajectory == trajectory), default=-1)

    @property
    def rollouts(self) -> list[Rollout]:
        return [entry.rollout for entry in self._by_id.values()]

    def opened_by(self, key: int) -> Rollout | None:
        """Return the Rollout that a call with this key opened, unless it is being replayed already."""
        found = self._by_key.get(key)
        return None if found is None or found.num_replayed else found.rollout

    def has_next(self, rollout_id: str) -> bool:
        """Return whether the Rollout has a turn that is not replayed yet."""
        found = self._by_id.get(rollout_id)
        return found is not None and found.next_turn is not None

    def progress(self, rollout_id: str) -> tuple[int | None, bool]:
        """Return the number of tokens of the next turn (None: there is none), and whether it is finished."""
        found = self._by_id.get(rollout_id)
        if found is None or found.next_turn is None:
            return None, False
        start, end = found.next_turn
        return (found.rollout.num_tokens if end is None else end) - start, end is not None

    def diverges(self, place: Continues, fits: FitsCall) -> bool:
        """Return whether the Rollout's next turn belongs to another call: other tokens precede it, or it does not
        `fit` the call."""
        found = self._by_id.get(place.rollout_id)
        if found is None or (turn := found.next_turn) is None:
            return False
        (start, end), tokens = turn, found.rollout.token_ids()
        reason = None if end is None else up_to(found.rollout, end).stop_reason
        first = len(found.rollout.prompt)
        shown = [m.digest for m in found.rollout.later_media if found.end <= m.offset - first < start]
        wanted = place.tokens.ids, [media.digest for media in place.tokens.media]
        is_other = (tuple(tokens[found.end : start]), shown) != wanted
        return is_other or not fits(start, tokens[start:end], reason)

    def replay_next(self, rollout_id: str) -> Rollout:
        """Replay the next turn. Return a copy of the Rollout up to the turn's end, with its stop reason; None:
        unfinished."""
        found = self._by_id[rollout_id]
        turn = found.next_turn
        assert turn is not None
        found.num_replayed += 1
        if turn[1] is None:
            return replace(found.rollout, state=RolloutState.WAITING, stop_reason=None)
        return up_to(found.rollout, turn[1])

    def unreplayed(self) -> dict[str, int]:
        """Return the Rollouts with turns that were not replayed, and the number of their tokens that were."""
        return {rollout_id: entry.end for rollout_id, entry in self._by_id.items() if entry.next_turn is not None}


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one Episode.

    `max_new_tokens`: of a Rollout, sampled and appended. `max_prompt_tokens`: of its prompt. `max_tokens`: sampled by
    all Rollouts together; 0: no limit. `precomputed`: whether the workflow sets the advantages of a role. `stop`: stop
    strings of every turn, besides those of its call. `image_urls`: whether image URLs of calls over HTTP are fetched
    (tasks.allow_image_urls).
    """

    max_new_tokens: int
    max_prompt_tokens: int
    max_turns: int = 16
    timeout_s: float = 300.0
    on_timeout: str = "missing"
    timeout_score: float = 0.0
    retries: int = 1
    precomputed: Callable[[str], bool] = lambda role: False
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    image_urls: bool = False


@dataclass(frozen=True)
class Opened:
    """The call opens `rollout`."""

    rollout: Rollout

    @property
    def rollout_id(self) -> str:
        return self.rollout.rollout_id


@dataclass(frozen=True)
class Continued:
    """The call continues the Rollout after `tokens`; after none if it continues an unfinished recorded turn."""

    rollout_id: str
    tokens: Prompt = Prompt()


@dataclass(frozen=True)
class Replayed:
    """The turn is recorded: nothing is sampled."""

    reply: Reply


@dataclass(frozen=True)
class FoundTurn:
    """The turn of a call. `key`: of a call that opens a Rollout. `begun`: number of recorded tokens; None: no such turn
    is recorded. `has_ended`: whether the recorded turn is finished."""

    place: Continues | Opens
    key: int
    begun: int | None = None
    has_ended: bool = False


class Turns:
    """Turns of one run of the workflow. `first`: the Rollout that the group was admitted with. `recorded`: copies of
    the Rollouts that an earlier run left. `options`: of the present turn of each Rollout, by rollout id."""

    def __init__(
        self, first: Rollout, limits: EpisodeLimits, counts: Counter[str], recorded: Sequence[Rollout] = ()
    ) -> None:
        self._first, self._limits, self._counts = first, limits, counts
        self.options: dict[str, TurnOptions] = {}
        self._plain_key = turn_key(MODEL, first.prompt, None, (), 0)
        self.record = ReplayRecord(recorded, self._key_of)
        self._num_turns = 0
        self._opened_keys: set[int] = set()  # keys of the calls that opened a Rollout
        self._replayed_trajectories: set[int] = set()
        self._next_trajectory = 1 + max((r.trajectory for r in recorded), default=-1)
        self._next_context: dict[int, int] = {}

    def check_turns_left(self) -> None:
        """Raise BudgetUsedUp if the Episode has had all its turns."""
        if self._num_turns >= (most := self._limits.max_turns):
            raise BudgetUsedUp(f"the episode has had its {most} turns (workflow.max_turns)")

    def find(self, trajectory: EpisodeTrajectory, call: Call, place: Continues | Opens) -> FoundTurn:
        """Return the turn of a call with this place in the trajectory's conversations. CallRefused beyond a limit."""
        self.check_turns_left()
        fits = partial(self._fits, call, trajectory.conversations.chats.tokenizer)
        if isinstance(place, Continues) and self.record.diverges(place, fits):
            # Another call continued the Rollout in the earlier run, and may do so again: this one branches off.
            place = trajectory.conversations.branch(call)
        if isinstance(place, Continues):
            return FoundTurn(place, 0, *self.record.progress(place.rollout_id))
        if len(place.prompt) > (most := self._limits.max_prompt_tokens):
            raise BudgetUsedUp(
                f"the prompt has {len(place.prompt)} tokens, and {most} are the most that leave room for an answer"
                " of rollout.max_new_tokens"
            )
        key, recorded = self._opened_by(trajectory, call, place.prompt)
        return FoundTurn(place, key, *self.record.progress(recorded.rollout_id if recorded is not None else ""))

    def begin(
        self, trajectory: EpisodeTrajectory, call: Call, found: FoundTurn, room: int
    ) -> Opened | Continued | Replayed:
        """Begin the turn, which may have `room` tokens. BudgetUsedUp if no token is left."""
        if room <= (found.begun or 0) and not found.has_ended:
            raise BudgetUsedUp(f"the episode has sampled its {self._limits.max_tokens} tokens (workflow.max_tokens)")
        if isinstance(found.place, Continues):
            turn = self._continue(trajectory, call, found.place, room)
        else:
            turn = self._open(trajectory, call, found.place, found.key, room)
        self._num_turns += 1
        return turn

    # Private

    def _fits(
        self, call: Call, tokenizer: Any, start: int, token_ids: Sequence[int], reason: StopReason | None
    ) -> bool:
        """Whether the call's limits allow a turn of these tokens with this stop reason (None: unfinished). Stop strings
        are searched for after each token, in the text of the turn."""
        limits, num = self._limits, len(token_ids)
        room = limits.max_new_tokens - start
        room = room if call.max_tokens is None else min(room, call.max_tokens)

        def has(ids: Sequence[int], stop: tuple[str, ...]) -> bool:
            text = tokenizer.decode(list(ids), skip_special_tokens=False) if stop else ""
            return any(string in text for string in stop)

        if reason is None:
            return num < room and not has(token_ids, call.stop)
        if num > room or has(token_ids[:-1], call.stop):
            return False
        if reason is StopReason.STOP_STRING:
            return has(token_ids, (*limits.stop, *call.stop))
        if reason is StopReason.LENGTH and num < room and not limits.max_tokens:
            return False  # with workflow.max_tokens, it may have ended when the Episode's tokens were used up
        return reason is StopReason.EOS or not has(token_ids, call.stop)

    def _continue(
        self, trajectory: EpisodeTrajectory, call: Call, place: Continues, room: int
    ) -> Continued | Opened | Replayed:
        rollout_id, before = place.rollout_id, self.options[place.rollout_id]
        num_tokens = place.num_tokens + len(place.tokens)
        self.options[rollout_id] = self._options(call, room, num_tokens, before.seed_key)
        trajectory.conversations.on_continue(rollout_id, call)
        if self.record.has_next(rollout_id):
            return self._replay(trajectory, rollout_id)
        self._counts["turns/continued"] += 1
        return Continued(rollout_id, place.tokens)

    def _open(
        self, trajectory: EpisodeTrajectory, call: Call, place: Opens, key: int, room: int
    ) -> Continued | Opened | Replayed:
        # The first call with the task's own prompt and no options draws like a plain rollout of the sibling.
        options = self._options(call, room, 0, None if key == self._plain_key else key)
        recorded = self.record.opened_by(key)
        self._opened_keys.add(key)
        if trajectory.index is None:
            trajectory.index = self._index_of(recorded)
        rollout = recorded or self._new(trajectory, place.prompt, options)
        self.options[rollout.rollout_id] = options
        trajectory.conversations.on_open(rollout.rollout_id, call)
        if recorded is not None:
            return self._replay(trajectory, rollout.rollout_id)
        if place.reason is not None:
            self._counts[f"turns/breaks/{place.reason.value}"] += 1
        return Opened(rollout)

    def _replay(self, trajectory: EpisodeTrajectory, rollout_id: str) -> Continued | Opened | Replayed:
        rollout = self.record.replay_next(rollout_id)
        if rollout.stop_reason is not None:
            return Replayed(trajectory.conversations.on_turn(rollout))
        return Continued(rollout_id) if rollout.num_tokens else Opened(rollout)

    def _opened_by(self, trajectory: EpisodeTrajectory, call: Call, prompt: Prompt) -> tuple[int, Rollout | None]:
        """Return the key of a call that opens a Rollout, and that Rollout if it is recorded."""
        for occurrence in count():
            key = turn_key(trajectory.role, prompt, call.max_tokens, call.stop, occurrence)
            if key in self._opened_keys:
                continue
            recorded = self.record.opened_by(key)
            if recorded is None or self._may_match(trajectory, recorded):
                return key, recorded
        raise AssertionError

    def _may_match(self, trajectory: EpisodeTrajectory, recorded: Rollout) -> bool:
        """Whether the recorded Rollout may belong to this trajectory."""
        if trajectory.index is None:
            return recorded.trajectory not in self._replayed_trajectories
        return recorded.trajectory == trajectory.index

    def _index_of(self, recorded: Rollout | None) -> int:
        """Return the index of a trajectory at its first call."""
        if recorded is not None:
            self._replayed_trajectories.add(recorded.trajectory)
            return recorded.trajectory
        self._next_trajectory += 1
        return self._next_trajectory - 1

    def _new(self, trajectory: EpisodeTrajectory, prompt: Prompt, options: TurnOptions) -> Rollout:
        index = trajectory.index
        assert index is not None
        context = self._next_context.get(index, self.record.next_context(index))
        self._next_context[index] = context + 1
        return Rollout(
            self._first.group_id,
            self._first.sibling,
            self._first.task,
            prompt=prompt,
            role=trajectory.role,
            trajectory=index,
            context=context,
            turn_key=options.seed_key,
        )

    def _options(self, call: Call, room: int, num_tokens: int, seed_key: int | None) -> TurnOptions:
        most = self._limits.max_new_tokens
        if num_tokens >= most:
            raise BudgetUsedUp(f"the rollout has had its {most} tokens (rollout.max_new_tokens): no answer fits")
        return TurnOptions(min(most, num_tokens + room), call.stop, seed_key)

    def _key_of(self, rollout: Rollout) -> int | None:
        """Return the key of the call that opened a recorded Rollout."""
        if rollout.turn_key is not None:
            return rollout.turn_key
        is_plain = rollout.role == MODEL and rollout.prompt == self._first.prompt
        return self._plain_key if is_plain else None  # unknown in checkpoints of earlier versions


# Private


def _turns(rollout: Rollout) -> list[tuple[int, int | None]]:
    turns: list[tuple[int, int | None]] = []
    start = at = 0
    for segment in rollout.segments:
        if segment.trainable:
            at += len(segment)
            continue
        if at > start:
            turns.append((start, at))
        start = at = at + len(segment)
    if rollout.stop_reason is None:
        return [*turns, (start, None)]
    return [*turns, (start, at)] if at > start else turns
