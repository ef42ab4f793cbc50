"""Serialization of groups for checkpoints, exact in both directions. Pure; never changes a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, Segment, StopReason, Task

Arrays = dict[str, np.ndarray]
_PLACE = ("role", "trajectory", "context", "turn_key")


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
