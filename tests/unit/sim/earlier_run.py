"""The directory of a run that never was: what `rollover plan --from-run` reads of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollover.track.recorder import RolloutRecorder
from rollover.track.tracker import RecordedGroup
from rollover.types import Group, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task


def write_run(
    directory: Path, lengths: list[list[int]], step_s: Callable[[float], float], train_rate: float, steps: int = 4
) -> None:
    """`lengths`: of the siblings of each group, the same in every step."""
    recorder = RolloutRecorder(directory / "rollouts")
    rows, decode_steps, consumed = [], 0, 0
    for step in range(1, steps + 1):
        groups = [_group(consumed + i, of) for i, of in enumerate(lengths)]
        consumed += len(groups)
        recorder.write(step, [RecordedGroup(g, [""] * len(g.rollouts), [0.0] * len(g.rollouts)) for g in groups])
        tokens = sum(map(sum, lengths))
        steps_now = 5 * step  # another mean batch size in every step
        decode_steps += steps_now
        rows.append(
            {
                "engine/decode_steps": decode_steps,
                "tokens/step_generated": tokens,
                "tokens/step_trained": tokens,
                "groups/consumed": consumed,
                "time/generate_s": steps_now * step_s(tokens / steps_now),
                "time/train_s": (tokens + 3 * len(lengths)) / train_rate,
                "time/weights_s": 0.5,
            }
        )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _group(group_id: int, lengths: list[int]) -> Group:
    task = Task(task_id=str(group_id), source="s", reward="r", prompt="p")
    rollouts = []
    for i, n in enumerate(lengths):
        ids, logprobs = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.float32)
        segment = Segment(ids, logprobs, 0, SamplingParams(), StopReason.EOS)
        rollouts.append(Rollout(group_id, i, task, [segment], RolloutState.READY, StopReason.EOS, Reward(1.0)))
    return Group(group_id, task, (1, 2, 3), rollouts)
