"""The directory of a run that never was, as its trackers would have written it; and texts that nobody should print."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.track.jsonl import EvalFile, MetricsFile
from rollover.track.records import Format, RolloutRecorder
from rollover.track.trace import TRACE, TraceEvent, TraceFile
from rollover.track.tracker import RecordedGroup
from rollover.types import (
    DropReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

HOSTILE = {
    "escapes": "\x1b[2J\x1b]0;owned\x07red \x1b[31mtext\x9b5m",
    "directions": "\u202egnp.exe\u2066 \u200f\u061c",
    "script": "<script>alert(1)</script> [bold]x[/nothing] [link=file:///etc]y[/link]",
    "nul": "a\x00b\x08\x08c\x7f\r!",
    "surrogate": "\ud800 and \udfff",
    "lines": "\u2028one\u2029two\x0bthree\x0cfour\x85",
    "long": "x" * (1 << 20) + "\x1b[31m",
}


def is_harmless(printed: str) -> bool:
    """Whether it is nothing but text, in lines."""
    return all(c.isprintable() for line in printed.split("\n") for c in line)


def written(report: str) -> dict[str, Any]:
    """What a report has, as its page unpacks it."""
    match = re.search(r'<script type="application/gzip" id="written">(.*?)</script>', report, re.DOTALL)
    assert match is not None
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


def segment(version: int, num_tokens: int, *, trainable: bool = True, ended: bool = True) -> Segment:
    ids = np.arange(num_tokens, dtype=np.int32)
    reason = StopReason.EOS if ended else StopReason.PAUSED
    return Segment(ids, -ids.astype(np.float32) / 7, version, SamplingParams(), reason, trainable)


def group(group_id: int, scores: Sequence[float | None], versions: Sequence[int] = (0,), num_tokens: int = 3) -> Group:
    """Siblings with these scores (None: missing), each with a segment of so many tokens of each version."""
    task = Task(f"task-{group_id}", "sums", "own", messages=({"role": "user", "content": f"{group_id} + 1?"},))
    rollouts = []
    for sibling, score in enumerate(scores):
        segments = [segment(version, num_tokens) for version in versions]
        reward = Reward(score) if score is not None else Reward(None, error="it raised")
        rollouts.append(Rollout(group_id, sibling, task, segments, RolloutState.CONSUMED, StopReason.EOS, reward))
    return Group(group_id, task, Prompt((7, 8)), rollouts)


def recorded(of: Group, dropped: DropReason | None = None, text: str = "the answer") -> RecordedGroup:
    count = len(of.rollouts)
    return RecordedGroup(of, [f"{text} {i}" for i in range(count)], [0.25] * count, dropped)


def row(step: int, **more: float) -> dict[str, float]:
    """Of metrics.jsonl: a step of two groups of two rollouts of three tokens, and a dropped group."""
    accounts = {
        "tokens/generated": 19 * step + 4,
        "tokens/trained": 12 * step,
        "tokens/dropped": 7 * step,
        "tokens/held": 4,
        "dropped/stale/groups": step,
        "dropped/stale/tokens": 7 * step,
        "groups/admitted": 3 * step + 1,
        "groups/consumed": 2 * step,
        "groups/dropped": step,
        "groups/held": 1,
    }
    times = {"time/step_s": 2.0, "time/generate_s": 1.0, "time/train_s": 0.5}
    others = {"reward/mean": step / 10, "rollouts/partial_share": 0.5, "staleness/max": 1, "staleness/bound": 2}
    return {"step": step, "policy_version": step, **accounts, **times, **others, **more}


def write_run(
    directory: Path,
    steps: int = 3,
    formats: Sequence[Format] = ("jsonl",),
    num_steps: int = 5,
    text: Callable[[int], str] = lambda step: "the answer",
) -> Path:
    """Steps of two groups, of which the second is of two policy versions from the second step on, and a dropped one."""
    recorder = RolloutRecorder(directory / "rollouts", formats=formats)
    config = {"run": {"name": "told"}, "train": {"num_steps": num_steps}}
    (directory / "config.resolved.json").write_text(json.dumps(config))
    trace = TraceFile(directory / TRACE)
    with MetricsFile(directory / "metrics.jsonl") as metrics, EvalFile(directory / "eval.jsonl") as evaluations:
        evaluations.write({"step": 0, "mean": 0.1, "ci": [0.0, 0.2], "tasks": 9, "missing": 0, "sources": {}})
        for step in range(1, steps + 1):
            one = group(3 * step, [1.0, 0.0], [step - 1])
            two = group(3 * step + 1, [0.5, None], [max(0, step - 2), step - 1] if step > 1 else [0])
            stale = group(3 * step + 2, [0.25], [0], num_tokens=3 + step)
            of_step = [recorded(one, text=text(step)), recorded(two), recorded(stale, DropReason.STALE)]
            recorder.write(step, of_step)
            trace.write([TraceEvent("admit", float(step), step - 1, of.group.group_id) for of in of_step])
            metrics.write(row(step))
    return directory
