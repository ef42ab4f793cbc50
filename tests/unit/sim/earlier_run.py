"""The directory of a run that never was: what `rollover plan --from-run` reads of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollover.track.records import RolloutRecorder
from rollover.track.tracker import RecordedGroup
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task


def write_run(
    directory: Path,
    lengths: list[list[int]],
    step_s: Callable[[float], float],
    train_rate: float,
    steps: int = 4,
    turns: int = 1,
) -> None:
    """`lengths`: of the siblings of each group, the same in every step, sampled in so many `turns`, with five tokens of
    an environment between two of these."""
    recorder = RolloutRecorder(directory / "rollouts")
    rows, decode_steps, consumed = [], 0, 0
    for step in range(1, steps + 1):
        groups = [_group(consumed + i, of, turns) for i, of in enumerate(lengths)]
        consumed += len(groups)
        recorder.write(step, [RecordedGroup(g, [""] * len(g.rollouts), [0.0] * len(g.rollouts)) for g in groups])
        tokens = sum(map(sum, lengths))
        steps_now = 5 * step  # another mean batch size in every step
        decode_steps += steps_now
        rows.append(
            {
                "step": step,
                "engine/decode_steps": decode_steps,
                "tokens/step_generated": tokens,
                "tokens/trained": tokens * step,
                "groups/consumed": consumed,
                "time/generate_s": steps_now * step_s(tokens / steps_now),
                "time/train_s": (tokens + 3 * len(lengths)) / train_rate,
                "time/weights_s": 0.5,
            }
        )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _group(group_id: int, lengths: list[int], turns: int) -> Group:
    task = Task(task_id=str(group_id), source="s", reward="r", prompt="p")
    rollouts = []
    for i, n in enumerate(lengths):
        segments = [_segment(n // turns)]
        for _ in range(turns - 1):
            segments += [_segment(5, trainable=False), _segment(n // turns)]
        rollouts.append(Rollout(group_id, i, task, segments, RolloutState.READY, StopReason.EOS, Reward(1.0)))
    return Group(group_id, task, Prompt((1, 2, 3)), rollouts)


def _segment(num: int, *, trainable: bool = True) -> Segment:
    ids, logprobs = np.zeros(num, dtype=np.int32), np.zeros(num, dtype=np.float32)
    reason = StopReason.EOS if trainable else StopReason.PAUSED
    return Segment(ids, logprobs, 0, SamplingParams(), reason, trainable=trainable)
