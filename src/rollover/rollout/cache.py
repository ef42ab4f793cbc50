"""The rollout cache: sole owner and mutator of Group and Rollout objects.

Owns every held group (admitted, not yet consumed or dropped), the legal state transitions, the append-only rule and the
token budget of a rollout. Never decides what happens next, never counts (ledger.py). Illegal calls fail an assertion.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rollover.trajectories import up_to
from rollover.types import DropReason, Group, Prompt, Reward, Rollout, RolloutState, Segment, StopReason, Task

Arrays = dict[str, np.ndarray]
STATE_FORMAT = 2
_READABLE = (1, STATE_FORMAT)

_PLACE = ("role", "trajectory", "context", "turn_key")
_RUNNING = RolloutState.RUNNING  # needed at every transition; Enum member lookups are slow


_LEGAL = {
    RolloutState.WAITING: {RolloutState.RUNNING, RolloutState.ACTING, RolloutState.DROPPED},
    RolloutState.RUNNING: {RolloutState.WAITING, RolloutState.PARKED, RolloutState.ACTING, RolloutState.SCORING},
    RolloutState.ACTING: {RolloutState.WAITING, RolloutState.PARKED, RolloutState.SCORING, RolloutState.DROPPED},
    RolloutState.PARKED: {RolloutState.RUNNING, RolloutState.DROPPED},
    RolloutState.SCORING: {RolloutState.READY, RolloutState.DROPPED},
    RolloutState.READY: {RolloutState.CONSUMED, RolloutState.DROPPED},
    RolloutState.CONSUMED: set(),
    RolloutState.DROPPED: set(),
}
_HELD = {state for state, after in _LEGAL.items() if after}


class RolloutCache:
    """Held groups by id. `max_new_tokens` is the budget of a rollout over all its segments.

    `first_group_id`: id of the first group that is admitted; below 0 in an evaluation.
    `groups`: the held groups by id, in order of admission; read-only.
    """

    def __init__(self, max_new_tokens: int, first_group_id: int = 0) -> None:
        assert max_new_tokens >= 1
        self.max_new_tokens, self.first_group_id = max_new_tokens, first_group_id
        self._groups: dict[int, Group] = {}
        self.groups: Mapping[int, Group] = MappingProxyType(self._groups)
        self._rollouts: dict[str, Rollout] = {}
        self._next_group_id = first_group_id

    @property
    def num_admitted(self) -> int:
        """Return the number of groups ever admitted."""
        return self._next_group_id - self.first_group_id

    def rollout(self, rollout_id: str) -> Rollout:
        return self._rollouts[rollout_id]

    def running(self) -> list[Rollout]:
        """Return the RUNNING rollouts, in group order."""
        return [r for g in self._groups.values() for r in g.rollouts if r.state is _RUNNING]

    def acting(self) -> list[Rollout]:
        """Return the ACTING rollouts, in group order."""
        return [r for g in self._groups.values() for r in g.rollouts if r.state is RolloutState.ACTING]

    def unscored(self) -> list[Rollout]:
        """Return the SCORING rollouts, in group order: those in scoring, and those to score again after a restart."""
        return [r for g in self._groups.values() for r in g.rollouts if r.state is RolloutState.SCORING]

    def remaining(self, rollout_id: str) -> int:
        """Return the tokens left of the rollout's budget."""
        return self.max_new_tokens - self._rollouts[rollout_id].num_tokens

    def admit(self, task: Task, prompt: Prompt, group_size: int, greedy_baseline: bool = False) -> Group:
        """Hold a new group of `group_size` WAITING rollouts, plus a greedy one if wanted, under the next id."""
        assert group_size >= 1 and len(prompt) >= 1
        group_id = self._next_group_id
        self._next_group_id += 1
        rollouts = [Rollout(group_id, i, task) for i in range(group_size)]
        if greedy_baseline:
            rollouts.append(Rollout(group_id, group_size, task, greedy=True))
        group = Group(group_id, task, prompt, rollouts)
        self._hold(group)
        return group

    def start(self, rollout_id: str) -> None:
        """Move a WAITING or PARKED rollout to RUNNING."""
        rollout = self._rollouts[rollout_id]
        assert rollout.num_tokens < self.max_new_tokens, f"rollout {rollout_id} has no budget left"
        _move(rollout, _RUNNING)

    def append(self, rollout_id: str, segments: Sequence[Segment]) -> None:
        """Append the engine's segments to a RUNNING rollout, or the environment's to an ACTING one.

        Skips empty segments, and never changes earlier ones. `continuation_error` (engine/validate.py) validates an
        engine's answer beforehand.
        """
        rollout = self._rollouts[rollout_id]
        assert rollout.state in (_RUNNING, RolloutState.ACTING), f"rollout {rollout_id} is {rollout.state.value}"
        num_new = 0
        for segment in segments:
            assert segment.start in (None, rollout.num_tokens + num_new), f"rollout {rollout_id}: tokens come twice"
            num_new += segment.num_tokens
        assert rollout.num_tokens + num_new <= self.max_new_tokens, (
            f"rollout {rollout_id}: {num_new} new tokens exceed the remaining budget of {self.remaining(rollout_id)}"
        )
        for segment in segments:
            if segment.num_tokens:
                rollout.add(segment)

    def park(self, rollout_id: str) -> None:
        """Move a RUNNING or ACTING rollout to PARKED, or to WAITING if it has no token."""
        rollout = self._rollouts[rollout_id]
        assert rollout.num_tokens < self.max_new_tokens, (
            f"rollout {rollout_id} is out of budget: it stopped, it is not parked"
        )
        _move(rollout, RolloutState.PARKED if rollout.segments else RolloutState.WAITING)
        rollout.stop_reason = None

    def finish(self, rollout_id: str, stop_reason: StopReason, *, acts: bool = False) -> None:
        """Move a RUNNING or ACTING rollout to SCORING, or with `acts` (only its turn stopped) to ACTING."""
        assert stop_reason is not StopReason.PAUSED, "PAUSED belongs to a segment, never to a stopped rollout"
        rollout = self._rollouts[rollout_id]
        _move(rollout, RolloutState.ACTING if acts else RolloutState.SCORING)
        rollout.stop_reason = stop_reason

    def set_reward(self, rollout_id: str, reward: Reward) -> None:
        """SCORING -> READY. With a missing reward, too: the rollout stays in its group and is masked later."""
        rollout = self._rollouts[rollout_id]
        _move(rollout, RolloutState.READY)
        rollout.reward = reward

    def undo_reward(self, rollout_id: str) -> None:
        """Undo `set_reward` after a filter failed: READY -> SCORING. Not in `_LEGAL`: nothing else may do this."""
        rollout = self._rollouts[rollout_id]
        assert rollout.state is RolloutState.READY, f"rollout {rollout_id} is {rollout.state.value}, not ready"
        rollout.state, rollout.reward = RolloutState.SCORING, None

    def consume(self, group_id: int) -> Group:
        """Remove a READY group for training, and return it."""
        assert self._groups[group_id].ready, f"group {group_id} is not ready"
        return self._remove(group_id, RolloutState.CONSUMED)

    def give_back(self, group: Group) -> None:
        """Undo `consume`: hold the group again, READY. Not in `_LEGAL`: nothing else may do this."""
        for rollout in group.rollouts:
            assert rollout.state is RolloutState.CONSUMED, f"rollout {rollout.rollout_id} is {rollout.state.value}"
            rollout.state = RolloutState.READY
        self._hold(group)
        in_order = sorted(self._groups.items())
        self._groups.clear()
        self._groups.update(in_order)

    def drop(self, group_id: int, reason: DropReason) -> Group:
        """Remove a group untrained, and return it. None of its rollouts may be running."""
        assert isinstance(reason, DropReason)
        return self._remove(group_id, RolloutState.DROPPED)

    # Rollouts of an Episode: they join and leave with the calls of its agent

    def begin_acting(self, rollout_id: str) -> None:
        """Move a WAITING rollout without a token to ACTING: its agent runs before its first call."""
        rollout = self._rollouts[rollout_id]
        assert not rollout.segments, f"rollout {rollout_id} has tokens: its Episode has begun"
        _move(rollout, RolloutState.ACTING)

    def open(self, rollout: Rollout) -> Rollout:
        """Add a WAITING `rollout` to its group. Returns the held one.

        If the group has one of this id, which must be without tokens, that one gets the prompt and the role, and is
        WAITING again.
        """
        assert rollout.state is RolloutState.WAITING and rollout.prompt
        held = self._rollouts.get(rollout.rollout_id)
        if held is None:
            self._join(rollout)
            return rollout
        assert not held.segments, f"rollout {rollout.rollout_id} is open already"
        held.prompt, held.role, held.turn_key = rollout.prompt, rollout.role, rollout.turn_key
        if held.state is not RolloutState.WAITING:
            _move(held, RolloutState.WAITING)
        return held

    def rerun_agent(self, rollout_id: str) -> None:
        """Set a rollout that does not run to ACTING: the agent of its Episode was lost and runs again.

        Without a stop reason its turn has not ended. Not in `_LEGAL`: nothing else may do this.
        """
        rollout = self._rollouts[rollout_id]
        assert rollout.state in _HELD and rollout.state is not RolloutState.RUNNING, f"{rollout_id} runs, or has left"
        if rollout.stop_reason is not None:  # restore that of its last turn: the agent may have abandoned the rollout
            rollout.stop_reason = up_to(rollout, rollout.num_tokens).stop_reason
        rollout.state, rollout.reward = RolloutState.ACTING, None

    def truncate(self, rollout_id: str, num_tokens: int) -> Rollout:
        """Truncate an ACTING rollout to `num_tokens`; remove it if that is 0 and its Episode has others.

        Returns the shorter rollout that is held instead, or the one that left.
        """
        rollout = self._rollouts[rollout_id]
        group = self._groups[rollout.group_id]
        assert rollout.state is RolloutState.ACTING, f"rollout {rollout_id} is {rollout.state.value}"
        if not num_tokens and sum(r.sibling == rollout.sibling for r in group.rollouts) > 1:
            self._leave(rollout)
            return rollout
        shorter = up_to(rollout, num_tokens)
        group.rollouts[group.rollouts.index(rollout)] = self._rollouts[rollout_id] = shorter
        return shorter

    def keep(self, group_id: int, sibling: int, name: str, value: Any) -> None:
        """Store a value of an Episode of the group, which survives a kill."""
        self._groups[group_id].kept.setdefault(sibling, {})[name] = value

    def replace(self, leaving: Sequence[Rollout], by: Rollout) -> None:
        """Replace these rollouts of one group, which become DROPPED, by another."""
        for rollout in leaving:
            self._leave(rollout)
        self._join(by)

    # Snapshots

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        """Return (JSON-able meta, arrays of groups_to_state) of every held group.

        A RUNNING rollout is saved as PARKED (WAITING without tokens). A restored SCORING one is scored again, and the
        environment of an ACTING one is called again.
        """
        groups, arrays = groups_to_state(list(self._groups.values()))
        return {"format": STATE_FORMAT, "next_group_id": self._next_group_id, "groups": groups}, arrays

    def load_state_dict(self, meta: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the contents by a saved state.

        Raises ValueError if the format is unknown, or if an unfinished rollout has used up `max_new_tokens`.
        """
        if meta["format"] not in _READABLE:
            raise ValueError(
                f"the checkpoint's rollouts have format {meta['format']}; this version reads 1 to {STATE_FORMAT}"
            )
        self._groups.clear()
        self._rollouts.clear()
        self._next_group_id = meta["next_group_id"]
        for group in groups_from_state(meta["groups"], arrays):
            for rollout in group.rollouts:
                if rollout.state is RolloutState.PARKED and rollout.num_tokens >= self.max_new_tokens:
                    raise ValueError(
                        f"--resume with rollout.max_new_tokens = {self.max_new_tokens}: the unfinished rollout"
                        f" {rollout.rollout_id} has {rollout.num_tokens} tokens so far, and none is left for it."
                        " Set it to more than that"
                    )
            self._hold(group)

    # Private

    def _remove(self, group_id: int, state: RolloutState) -> Group:
        group = self._groups[group_id]
        for rollout in group.rollouts:
            if rollout.state is RolloutState.ACTING:
                rollout.stop_reason = None  # that of its turn
            _move(rollout, state)
        del self._groups[group_id]
        for rollout in group.rollouts:
            del self._rollouts[rollout.rollout_id]
        group.kept.clear()  # no longer needed, and a replay buffer may hold the group for long
        return group

    def _leave(self, rollout: Rollout) -> None:
        _move(rollout, RolloutState.DROPPED)
        rollout.stop_reason = rollout.stop_reason if rollout.reward is not None else None
        self._groups[rollout.group_id].rollouts.remove(rollout)
        del self._rollouts[rollout.rollout_id]

    def _join(self, rollout: Rollout) -> None:
        group = self._groups[rollout.group_id]
        rollout.greedy = rollout.greedy or any(r.greedy for r in group.rollouts if r.sibling == rollout.sibling)
        insort(group.rollouts, rollout, key=lambda r: (r.sibling, r.trajectory, r.context))
        self._rollouts[rollout.rollout_id] = rollout

    def _hold(self, group: Group) -> None:
        self._groups[group.group_id] = group
        self._rollouts.update((r.rollout_id, r) for r in group.rollouts)


def _move(rollout: Rollout, state: RolloutState) -> None:
    """Change the state. Raises AssertionError for an illegal transition."""
    assert state in _LEGAL[rollout.state], (
        f"rollout {rollout.rollout_id}: {rollout.state.value} -> {state.value} is not a legal transition"
    )
    rollout.state = state


# Groups in checkpoints


def groups_to_state(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], Arrays]:
    """Return (JSON-able meta, arrays). A RUNNING rollout becomes PARKED (WAITING without tokens).

    Arrays: prompt_ids int32, the distinct prompts; token_ids int32 and logprobs float32, of all segments in the order
    of meta. prompt_offsets int64 [prompts + 1] and segment_offsets int64 [segments + 1] split them. "prompt" in meta is
    the index of a group's prompt, and of a rollout's if that differs; "media" are those of the prompt.
    """
    segments = [s for g in groups for r in g.rollouts for s in r.segments]
    prompts: dict[Prompt, int] = {}

    def saved(prompt: Prompt) -> dict[str, Any]:
        return {"prompt": prompts.setdefault(prompt, len(prompts))} | prompt.media_to_json()

    def saved_rollout(rollout: Rollout, group: Group) -> dict[str, Any]:
        differs = rollout.prompt is not group.prompt and rollout.prompt != group.prompt
        return _rollout_to_json(rollout) | (saved(rollout.prompt) if differs else {})

    meta = [
        {
            "group_id": g.group_id,
            "task": g.task.to_json(),
            **saved(g.prompt),
            "rollouts": [saved_rollout(r, g) for r in g.rollouts],
            **({"kept": {str(sibling): kept for sibling, kept in g.kept.items()}} if g.kept else {}),
        }
        for g in groups
    ]
    arrays = {
        "prompt_ids": _concatenate([np.asarray(p.ids, dtype=np.int32) for p in prompts], np.int32),
        "prompt_offsets": _offsets([len(p) for p in prompts]),
        "token_ids": _concatenate([s.token_ids for s in segments], np.int32),
        "logprobs": _concatenate([s.logprobs for s in segments], np.float32),
        "segment_offsets": _offsets([len(s) for s in segments]),
    }
    return meta, arrays


def groups_from_state(meta: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> Iterator[Group]:
    """Yield the groups of `groups_to_state`, in order. Raises ValueError for an invalid log-prob.

    Format 1 has one prompt per group, and all siblings, in order.
    """
    prompt_offsets, segment_offsets = arrays["prompt_offsets"], arrays["segment_offsets"]
    ends = zip(prompt_offsets, prompt_offsets[1:], strict=False)
    ids = [tuple(arrays["prompt_ids"][start:end].tolist()) for start, end in ends]
    prompts: dict[int, Prompt] = {}  # by index: equal ones are one object

    def prompt_of(entry: Mapping[str, Any], index: int) -> Prompt:
        return prompts.setdefault(index, Prompt.of(ids[index], entry.get("media", ())))

    segment_index = 0
    for i, saved in enumerate(meta):
        task = Task.from_json(saved["task"])
        prompt = prompt_of(saved, saved.get("prompt", i))
        kept = {int(sibling): dict(values) for sibling, values in saved.get("kept", {}).items()}
        group = Group(saved["group_id"], task, prompt, [], kept)
        for sibling, entry in enumerate(saved["rollouts"]):
            rollout = Rollout(
                group.group_id,
                entry.get("sibling", sibling),
                task,
                greedy=entry.get("greedy", False),  # absent in old checkpoints
                prompt=prompt_of(entry, entry["prompt"]) if "prompt" in entry else prompt,
                **{name: entry[name] for name in _PLACE if name in entry},
            )
            for fields in entry["segments"]:
                part = slice(segment_offsets[segment_index], segment_offsets[segment_index + 1])
                token_ids = arrays["token_ids"][part].astype(np.int32)
                rollout.add(Segment.from_json(fields, token_ids, arrays["logprobs"][part].astype(np.float32)))
                segment_index += 1
            if (why := rollout.why_not_sampled()) is not None:
                raise ValueError(
                    f"the checkpoint's rollout {rollout.rollout_id} cannot be trained, as {why}. Go on from an earlier"
                    " checkpoint (checkpoint.resume_from), or start a new run"
                )
            rollout.state = RolloutState(entry["state"])
            rollout.stop_reason = None if entry["stop_reason"] is None else StopReason(entry["stop_reason"])
            rollout.reward = None if entry["reward"] is None else Reward(**entry["reward"])
            group.rollouts.append(rollout)
        yield group


def _concatenate(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype=dtype)


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    state = rollout.state
    if state is RolloutState.RUNNING:
        state = RolloutState.PARKED if rollout.segments else RolloutState.WAITING
    return {
        "state": state.value,
        "stop_reason": None if rollout.stop_reason is None else rollout.stop_reason.value,
        "reward": None if rollout.reward is None else rollout.reward.to_json(),
        "greedy": rollout.greedy,
        "sibling": rollout.sibling,
        **{name: value for name in _PLACE if (value := getattr(rollout, name)) is not None},
        "segments": [s.to_json() for s in rollout.segments],
    }
