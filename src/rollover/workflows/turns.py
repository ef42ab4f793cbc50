"""Which turn a call of an Episode is: one of a Rollout that it continues or opens, or one that is on record. Pure.

    call ──▶ Opened(rollout) | Continued(rollout id, tokens) ──▶ the policy is asked ──▶ reply
       └──▶ Played(reply): the turn is on record

A record is what there is of an Episode whose agent was lost, as its function is run again:

    record    Rollout 0  [turn][appended][turn][appended][turn, not finished     Rollout 1  [turn]
    a call ──its tokens are those before a turn on record──▶ that turn: served as it is, or gone on with
       └── else ──▶ a turn of its own; what nobody has asked for by the end leaves

A Rollout on record is found by the key of its first call (matching.turn_key), and its later turns by the tokens that
were appended before them. Owns what each present turn asks for, how many the Episode has had, the names of its
Rollouts, and how many turns of each Rollout on record were asked for again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from rollover.envs.protocol import TurnOptions
from rollover.trajectories import up_to
from rollover.types import Prompt, Rollout, RolloutState, StopReason, Task
from rollover.workflows.calls import MODEL, BudgetUsedUp, Call, Reply
from rollover.workflows.conversations import Continues, Opens
from rollover.workflows.episode import EpisodeTrajectory
from rollover.workflows.matching import turn_key

EpisodePlace = tuple[int, int]  # group id, sibling
Answers = Callable[[int, Sequence[int], StopReason | None], bool]
"""Whether a turn may be the answer to a call: tokens before it, its own ones, and why it ended (None: not yet)."""


@dataclass(eq=False)
class _Recorded:
    """`turns`: where each begins and ends, in tokens after the prompt; None: the last one has not ended."""

    rollout: Rollout
    turns: list[tuple[int, int | None]]
    num_asked: int = 0

    @property
    def next_turn(self) -> tuple[int, int | None] | None:
        return self.turns[self.num_asked] if self.num_asked < len(self.turns) else None

    @property
    def end(self) -> int:
        """Of what was asked for again."""
        end = self.turns[self.num_asked - 1][1] if self.num_asked else 0
        return self.rollout.num_tokens if end is None else end


class Record:
    """`rollouts`: copies of all that the Episode has. `key_of`: the key of the call that opened one; None: unknown."""

    def __init__(self, rollouts: Iterable[Rollout] = (), key_of: Callable[[Rollout], int | None] = lambda _: None):
        self._of_id = {r.rollout_id: _Recorded(r, _turns(r)) for r in rollouts}
        self._of_key = {key_of(of.rollout): of for of in self._of_id.values()}

    def next_place(self, trajectory: int) -> int:
        """The first context of the trajectory that is not on record."""
        return 1 + max((r.context for r in self.rollouts if r.trajectory == trajectory), default=-1)

    @property
    def rollouts(self) -> list[Rollout]:
        return [of.rollout for of in self._of_id.values()]

    def opened_by(self, key: int) -> Rollout | None:
        """The Rollout that the call with this key opened, if nobody has asked for it again yet."""
        found = self._of_key.get(key)
        return None if found is None or found.num_asked else found.rollout

    def has_next(self, rollout_id: str) -> bool:
        """Whether there is a turn that is not asked for yet."""
        found = self._of_id.get(rollout_id)
        return found is not None and found.next_turn is not None

    def progress(self, rollout_id: str) -> tuple[int | None, bool]:
        """How many tokens the next turn of the Rollout has, and whether it has ended; None where there is none."""
        found = self._of_id.get(rollout_id)
        if found is None or found.next_turn is None:
            return None, False
        start, end = found.next_turn
        return (found.rollout.num_tokens if end is None else end) - start, end is not None

    def goes_on_otherwise(self, place: Continues, answers: Answers) -> bool:
        """Whether the Rollout has a next turn, and that is none of a call which belongs there: other tokens are before
        it, or it is no answer to the call."""
        found = self._of_id.get(place.rollout_id)
        if found is None or (turn := found.next_turn) is None:
            return False
        (start, end), tokens = turn, found.rollout.token_ids()
        reason = None if end is None else up_to(found.rollout, end).stop_reason
        first = len(found.rollout.prompt)
        shown = [m.digest for m in found.rollout.later_media if found.end <= m.offset - first < start]
        wanted = place.tokens.ids, [media.digest for media in place.tokens.media]
        is_other = (tuple(tokens[found.end : start]), shown) != wanted
        return is_other or not answers(start, tokens[start:end], reason)

    def ask(self, rollout_id: str) -> Rollout:
        """A copy of the Rollout up to the end of its next turn, which is asked for now. Its stop reason is that of the
        turn; None: it has not ended."""
        found = self._of_id[rollout_id]
        turn = found.next_turn
        assert turn is not None
        found.num_asked += 1
        if turn[1] is None:
            return replace(found.rollout, state=RolloutState.WAITING, stop_reason=None)
        return up_to(found.rollout, turn[1])

    def unasked(self) -> dict[str, int]:
        """The Rollouts with turns that nobody asked for, and how many of their tokens were."""
        return {rollout_id: of.end for rollout_id, of in self._of_id.items() if of.next_turn is not None}


@dataclass(frozen=True)
class Limits:
    """Of one Episode. `max_new_tokens`: of a Rollout, sampled and appended; `max_prompt_tokens`: before those;
    `max_tokens`: sampled, over all Rollouts, 0: no limit; `precomputed`: whether the advantages of a role come with its
    trajectories; `stop`: what ends every turn, besides the stop strings of its call; `image_urls`: whether image URLs
    of calls over HTTP are fetched (tasks.allow_image_urls)."""

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
    """The call opens this Rollout."""

    rollout: Rollout

    @property
    def rollout_id(self) -> str:
        return self.rollout.rollout_id


@dataclass(frozen=True)
class Continued:
    """The Rollout goes on after these tokens; after none where its turn is on record, and has not ended."""

    rollout_id: str
    tokens: Prompt = Prompt()


@dataclass(frozen=True)
class Played:
    """The turn is on record: nothing is sampled."""

    reply: Reply


@dataclass(frozen=True)
class Found:
    """Where a call belongs. `key`: of one that opens a Rollout. `begun`: tokens of its turn on record; None: that is
    not there. `has_ended`: that turn."""

    place: Continues | Opens
    key: int
    begun: int | None = None
    has_ended: bool = False


class Turns:
    """Of one run of the function. `task_prompt`: the task's own prompt. `recorded`: copies of the Rollouts that an
    earlier run left. `options`: of the present turn of each Rollout, by its id."""

    def __init__(
        self,
        place: EpisodePlace,
        task: Task,
        task_prompt: Prompt,
        limits: Limits,
        counts: Counter[str],
        recorded: Sequence[Rollout] = (),
    ) -> None:
        self._place, self._task, self._task_prompt = place, task, task_prompt
        self._limits, self._counts = limits, counts
        self.options: dict[str, TurnOptions] = {}
        self._plain_key = turn_key(MODEL, task_prompt, None, (), 0)
        self.record = Record(recorded, self._key_of)
        self._num = 0
        self._asked: set[int] = set()  # keys of the calls that opened a Rollout
        self._taken: set[int] = set()  # trajectories of the record that were asked for again
        self._next_trajectory = 1 + max((r.trajectory for r in recorded), default=-1)
        self._next_context: dict[int, int] = {}

    def refuse_after_the_last(self) -> None:
        """BudgetUsedUp where the Episode has had all its turns."""
        if self._num >= (most := self._limits.max_turns):
            raise BudgetUsedUp(f"the episode has had its {most} turns (workflow.max_turns)")

    def find(self, trajectory: EpisodeTrajectory, call: Call, place: Continues | Opens) -> Found:
        """The turn of a call that belongs there, as its conversation tells. CallRefused where it can have none."""
        self.refuse_after_the_last()
        answers = partial(self._answers, call, trajectory.conversations.chats.tokenizer)
        if isinstance(place, Continues) and self.record.goes_on_otherwise(place, answers):
            # As where another call had gone on from there first: so it did, and may do so again.
            place = trajectory.conversations.branch(call)
        if isinstance(place, Continues):
            return Found(place, 0, *self.record.progress(place.rollout_id))
        if len(place.prompt) > (most := self._limits.max_prompt_tokens):
            raise BudgetUsedUp(
                f"the prompt has {len(place.prompt)} tokens, and {most} are the most that leave room for an answer"
                " of rollout.max_new_tokens"
            )
        key, recorded = self._opened_by(trajectory, call, place.prompt)
        return Found(place, key, *self.record.progress(recorded.rollout_id if recorded is not None else ""))

    def begin(self, trajectory: EpisodeTrajectory, call: Call, found: Found, room: int) -> Opened | Continued | Played:
        """The turn begins, which may have `room` tokens in all. CallRefused where those are too few."""
        if room <= (found.begun or 0) and not found.has_ended:
            raise BudgetUsedUp(f"the episode has sampled its {self._limits.max_tokens} tokens (workflow.max_tokens)")
        if isinstance(found.place, Continues):
            turn = self._continue(trajectory, call, found.place, room)
        else:
            turn = self._open(trajectory, call, found.place, found.key, room)
        self._num += 1
        return turn

    # Private

    def _answers(
        self, call: Call, tokenizer: Any, start: int, token_ids: Sequence[int], reason: StopReason | None
    ) -> bool:
        """Whether a turn of these tokens, which ended for `reason` (None: not yet), is what the call's limits leave of
        what the policy says. Stop strings are looked for after each token, in the text of the turn."""
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
            return False  # with those it may have ended for want of tokens of the Episode
        return reason is StopReason.EOS or not has(token_ids, call.stop)

    def _continue(
        self, trajectory: EpisodeTrajectory, call: Call, place: Continues, room: int
    ) -> Continued | Opened | Played:
        rollout_id, before = place.rollout_id, self.options[place.rollout_id]
        num_tokens = place.num_tokens + len(place.tokens)
        self.options[rollout_id] = self._options(call, room, num_tokens, before.seed_key)
        trajectory.conversations.on_continue(rollout_id, call)
        if self.record.has_next(rollout_id):
            return self._on_record(trajectory, rollout_id)
        self._counts["turns/continued"] += 1
        return Continued(rollout_id, place.tokens)

    def _open(
        self, trajectory: EpisodeTrajectory, call: Call, place: Opens, key: int, room: int
    ) -> Continued | Opened | Played:
        # The sibling's own draws are those of one question: the task's, asked as a plain rollout asks it, once.
        options = self._options(call, room, 0, None if key == self._plain_key else key)
        recorded = self.record.opened_by(key)
        self._asked.add(key)
        if trajectory.index is None:
            trajectory.index = self._index_of(recorded)
        rollout = recorded or self._new(trajectory, place.prompt, options)
        self.options[rollout.rollout_id] = options
        trajectory.conversations.on_open(rollout.rollout_id, call)
        if recorded is not None:
            return self._on_record(trajectory, rollout.rollout_id)
        if place.reason is not None:
            self._counts[f"turns/breaks/{place.reason.value}"] += 1
        return Opened(rollout)

    def _on_record(self, trajectory: EpisodeTrajectory, rollout_id: str) -> Continued | Opened | Played:
        rollout = self.record.ask(rollout_id)
        if rollout.stop_reason is not None:
            return Played(trajectory.conversations.on_turn(rollout))
        return Continued(rollout_id) if rollout.num_tokens else Opened(rollout)

    def _opened_by(self, trajectory: EpisodeTrajectory, call: Call, prompt: Prompt) -> tuple[int, Rollout | None]:
        """The key of a call that opens a Rollout, and that Rollout where it is on record."""
        for occurrence in count():
            key = turn_key(trajectory.role, prompt, call.max_tokens, call.stop, occurrence)
            if key in self._asked:
                continue
            recorded = self.record.opened_by(key)
            if recorded is None or self._may_be(trajectory, recorded):
                return key, recorded
        raise AssertionError

    def _may_be(self, trajectory: EpisodeTrajectory, recorded: Rollout) -> bool:
        """Whether the Rollout is one of this trajectory."""
        if trajectory.index is None:
            return recorded.trajectory not in self._taken
        return recorded.trajectory == trajectory.index

    def _index_of(self, recorded: Rollout | None) -> int:
        """Of a trajectory at its first call."""
        if recorded is not None:
            self._taken.add(recorded.trajectory)
            return recorded.trajectory
        self._next_trajectory += 1
        return self._next_trajectory - 1

    def _new(self, trajectory: EpisodeTrajectory, prompt: Prompt, options: TurnOptions) -> Rollout:
        index = trajectory.index
        assert index is not None
        context = self._next_context.get(index, self.record.next_place(index))
        self._next_context[index] = context + 1
        return Rollout(
            *self._place,
            self._task,
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
        """Of the call that opened a Rollout of the record."""
        if rollout.turn_key is not None:
            return rollout.turn_key
        is_plain = rollout.role == MODEL and rollout.prompt == self._task_prompt
        return self._plain_key if is_plain else None  # unknown in checkpoints of before


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
