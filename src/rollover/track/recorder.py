"""What was generated: one JSONL file a step under rollouts/, one line a rollout, and the way back to Groups.

Owns the record format (below). It decides nothing about rollouts and never changes them. The files are written whole,
so a step's file is complete or absent, and any Parquet or JSONL tool reads them: every key has one type throughout.
"columns" is JSON inside a string, because its values differ in type from one task source to the next.

What siblings share and may be long ("messages", "prompt", "columns", "prompt_ids") stands in the first line of a group
and is null in the others; a rollout with another prompt than the first one has "prompt_ids" of its own. Token ids and
log-probs are those of all segments in order; "segments" says how to cut them. Log-probs are the shortest decimals that
give the same float32, so a rollout is rebuilt exactly (non-finite numbers are null, and come back NaN).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.files import atomic_write_text
from rollover.track.sinks import to_json
from rollover.track.tracker import Cut, RecordedGroup, Tracker
from rollover.trajectories import place
from rollover.types import DropReason, Group, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task

_FILE = re.compile(r"step-(\d+)\.jsonl")
_TEMPORARY = re.compile(r"\.step-\d+\.jsonl\.tmp-\d+")
TRAINED = "trained"
_SHARED = ("messages", "prompt", "columns", "prompt_ids")  # in the first line of a group


class RolloutRecorder(Tracker):
    """Writes `<dir>/step-000012.jsonl`.

    `enabled` False: nothing is added, but what an earlier process of the run wrote stays, and is cut like the rest.
    """

    def __init__(self, dir: str | Path, enabled: bool = True) -> None:
        self.dir, self.enabled = Path(dir), enabled
        self.dir.mkdir(parents=True, exist_ok=True)

    @property
    def wants_groups(self) -> bool:
        return self.enabled

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        if self.enabled and groups:
            self.write(step, groups)

    def write(self, step: int, groups: Sequence[RecordedGroup]) -> Path:
        """Write the file of one step, or add to it. Returns its path."""
        path = self.dir / f"step-{step:06d}.jsonl"
        lines = [path.read_text(encoding="utf-8")] if path.exists() else []
        for recorded in groups:
            group = recorded.group
            assert len(recorded.completions) == len(recorded.advantages) == len(group.rollouts)
            each = zip(group.rollouts, recorded.completions, recorded.advantages, strict=True)
            for rollout, completion, advantage in each:
                record = _record(step, group, rollout, completion, advantage, recorded.dropped)
                lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        # A lone surrogate in a completion is not UTF-8, and the recording of it is not worth the run.
        atomic_write_text(path, "".join(lines).encode("utf-8", "replace").decode("utf-8"))
        return path

    def truncate(self, cut: Cut) -> None:
        """Remove the files of later steps and half-written ones, and from that of the step what comes again."""
        last = self.dir / f"step-{cut.step:06d}.jsonl"
        if last.exists():
            lines = last.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if not cut.comes_again(json.loads(line)["group_id"])]
            if len(kept) < len(lines):
                atomic_write_text(last, b"".join(kept).decode())
        for path in self.dir.iterdir():
            match = _FILE.fullmatch(path.name)
            if _TEMPORARY.fullmatch(path.name) or (match and int(match[1]) > cut.step):
                path.unlink()


def read_rollouts(dir: str | Path, include_dropped: bool = False) -> Iterator[list[Group]]:
    """The recorded groups, one list a step, in the order they were written.

    Trained groups are READY again, dropped ones (only with `include_dropped`) DROPPED; all else is as it was.
    Raises ValueError if there are no recordings, and for a malformed record with its file and line.
    """
    dir = Path(dir)
    names = _names(dir)
    if not names:
        raise ValueError(f"run.train_on_recorded: {dir} has no step-*.jsonl files. Give a run's rollouts/ directory.")
    for name in names:
        groups = _read_step(dir / name)
        yield [g for g in groups if include_dropped or g.rollouts[0].state is RolloutState.READY]


def read_records(dir: str | Path) -> Iterator[dict[str, Any]]:
    """The recorded rollouts as they are in the files, in the order they were written, dropped ones included.

    What siblings share is in each of them, and "columns" is a dict. Raises ValueError for a line that is not JSON.
    """
    for name in _names(Path(dir)):
        shared: dict[str, Any] = {}
        for number, line in enumerate((Path(dir) / name).read_bytes().splitlines(), start=1):
            try:
                record = json.loads(line)
                if record["columns"] is not None:
                    record["columns"] = json.loads(record["columns"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{Path(dir) / name}:{number}: not a recorded rollout: {error}") from error
            if record["columns"] is not None:
                shared = {key: record[key] for key in _SHARED}
            own = {} if record["prompt_ids"] is None else {"prompt_ids": record["prompt_ids"]}
            yield record | shared | own


def _names(dir: Path) -> list[str]:
    """Its files, by step."""
    return sorted((n for n in os.listdir(dir) if _FILE.fullmatch(n)), key=_step_of) if dir.is_dir() else []


def _step_of(name: str) -> int:
    match = _FILE.fullmatch(name)
    assert match is not None
    return int(match[1])


def _read_step(path: Path) -> list[Group]:
    groups: dict[int, Group] = {}
    sizes: dict[int, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                group_id, size = record["group_id"], int(record["group_size"])
                group = groups.get(group_id)
                if group is None:
                    group = groups[group_id] = Group(group_id, _task(record), tuple(record["prompt_ids"]), [])
                rollout = _rollout(record, group)
                last = group.rollouts[-1] if group.rollouts else None
                if (last is not None and place(rollout) <= place(last)) or sizes.setdefault(group_id, size) != size:
                    raise ValueError(f"rollout {rollout.rollout_id} is out of order")
                group.rollouts.append(rollout)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}:{number}: not a recorded rollout: {what}") from error
    for group in groups.values():
        if len(group.rollouts) != sizes[group.group_id]:
            raise ValueError(
                f"{path}: group {group.group_id} has {len(group.rollouts)} of its {sizes[group.group_id]} rollouts."
                " Lines are missing: a group can only be trained whole."
            )
    return list(groups.values())


def _record(
    step: int, group: Group, rollout: Rollout, completion: str, advantage: float | None, dropped: DropReason | None
) -> dict[str, Any]:
    task, reward = group.task, rollout.reward
    first = rollout is group.rollouts[0]
    error = reward.error if reward else None
    if reward is not None and reward.missing and error is None:
        error = "missing"  # a score and an error that are both null mean: not scored yet
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "sibling": rollout.sibling,
        "role": rollout.role,
        "trajectory": rollout.trajectory,
        "context": rollout.context,
        "group_size": len(group.rollouts),
        "task_id": task.task_id,
        "attempt": task.attempt,
        "source": task.source,
        "reward": task.reward,
        "step": step,
        "outcome": TRAINED if dropped is None else f"dropped:{dropped.value}",
        "messages": list(task.messages) if first and task.messages is not None else None,
        "prompt": task.prompt if first else None,
        "plain": task.plain,
        "columns": json.dumps(task.columns, ensure_ascii=False) if first else None,
        "prompt_ids": list(rollout.prompt_ids) if first or not _same_prompt(rollout, group.rollouts[0]) else None,
        "completion": completion,
        "score": to_json(_float(reward.score)) if reward else None,
        # Without entries null, because Parquet has no struct without fields.
        "extras": {name: to_json(_float(v)) for name, v in reward.extras.items()} if reward and reward.extras else None,
        "shaping": {name: float(v) for name, v in reward.shaping.items()} if reward and reward.shaping else None,
        "error": error,
        "turns": [to_json(_float(value)) for value in reward.turns] if reward and len(reward.turns) else None,
        "advantage": to_json(_float(advantage)),
        "stop_reason": rollout.stop_reason.value if rollout.stop_reason else None,
        "num_tokens": rollout.num_tokens,
        "segments": [
            {
                "policy_version": s.policy_version,
                "num_tokens": len(s),
                "stop_reason": s.stop_reason.value,
                "trainable": s.trainable,
                "sampling": {
                    "temperature": float(s.sampling.temperature),
                    "top_p": float(s.sampling.top_p),
                    "top_k": s.sampling.top_k,
                    "min_p": float(s.sampling.min_p),
                },
            }
            for s in rollout.segments
        ],
        "token_ids": rollout.token_ids(),
        "logprobs": [x for s in rollout.segments for x in _short_float32(s.logprobs)],
    }


def _short_float32(values: np.ndarray) -> list[float | None]:
    # numpy's text of a float32 is the shortest that reads back as the same float32.
    return [to_json(float(text)) for text in values.astype(np.float32).astype("U")]


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _task(record: dict[str, Any]) -> Task:
    messages = record["messages"]
    return Task(
        task_id=record["task_id"],
        source=record["source"],
        reward=record["reward"],
        messages=None if messages is None else tuple(messages),
        prompt=record["prompt"],
        plain=record.get("plain", False),
        columns=json.loads(record["columns"]),
        attempt=record["attempt"],
    )


def _same_prompt(a: Rollout, b: Rollout) -> bool:
    return a.prompt_ids is b.prompt_ids or a.prompt_ids == b.prompt_ids


def _rollout(record: dict[str, Any], group: Group) -> Rollout:
    token_ids = np.array(record["token_ids"], dtype=np.int32)
    logprobs = np.array([np.nan if x is None else x for x in record["logprobs"]], dtype=np.float32)
    lengths = [s["num_tokens"] for s in record["segments"]]
    if not len(token_ids) == len(logprobs) == sum(lengths):
        raise ValueError(
            f"{len(token_ids)} token_ids, {len(logprobs)} logprobs and segments of {sum(lengths)} tokens do not agree"
        )
    segments, start = [], 0
    for s, length in zip(record["segments"], lengths, strict=True):
        end = start + length
        segments.append(
            Segment(
                token_ids[start:end].copy(),
                logprobs[start:end].copy(),
                s["policy_version"],
                SamplingParams(**s["sampling"]),
                StopReason(s["stop_reason"]),
                s["trainable"],
            )
        )
        start = end
    return Rollout(
        group_id=record["group_id"],
        sibling=record["sibling"],
        task=group.task,
        segments=segments,
        state=_state(record["outcome"]),
        stop_reason=StopReason(record["stop_reason"]) if record["stop_reason"] is not None else None,
        reward=_reward(record),
        prompt_ids=group.prompt_ids if record["prompt_ids"] is None else tuple(record["prompt_ids"]),
        **{name: record[name] for name in ("role", "trajectory", "context") if name in record},
    )


def _state(outcome: str) -> RolloutState:
    if outcome == TRAINED:
        return RolloutState.READY
    DropReason(outcome.removeprefix("dropped:"))
    return RolloutState.DROPPED


def _reward(record: dict[str, Any]) -> Reward | None:
    if record["score"] is None and record["error"] is None:
        return None
    extras = {name: float("nan") if v is None else v for name, v in (record["extras"] or {}).items()}
    shaping = record.get("shaping") or {}
    return Reward(record["score"], extras, record["error"], turns=record.get("turns") or (), shaping=shaping)
