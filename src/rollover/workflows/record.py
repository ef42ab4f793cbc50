"""What is on record of an Episode whose agent was lost, as its function is run again. Pure.

    record    Rollout 0  [turn][appended][turn][appended][turn, not finished     Rollout 1  [turn]
    a call ──its tokens are those before a turn on record──▶ that turn: served as it is, or gone on with
       └── else ──▶ a turn of its own; what nobody has asked for by the end leaves

Owns how many turns of each Rollout were asked for again. A Rollout is found by the key of its first call
(matching.turn_key), and its later turns by the tokens that were appended before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rollover.trajectories import up_to
from rollover.types import Rollout, RolloutState, StopReason
from rollover.workflows.conversations import Continues

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
