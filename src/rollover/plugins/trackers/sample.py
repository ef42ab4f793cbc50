"""A sample of a step's rollouts for external trackers: of live groups, or of their records (rollouts/). Both give equal
rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rollover.text import named
from rollover.track.jsonl import to_json
from rollover.track.records import outcome_of
from rollover.track.tracker import RecordedGroup
from rollover.types import Rollout

Item = TypeVar("Item")


def sample_of(step: int, groups: Sequence[RecordedGroup], most: int) -> list[dict[str, Any]]:
    """Return at most `most` rollouts of these groups, evenly spaced in their order."""
    each = [
        (recorded, *of)
        for recorded in groups
        for of in zip(recorded.group.rollouts, recorded.completions, recorded.advantages, strict=True)
    ]
    return [_of_rollout(step, *of) for of in _evenly(each, most)]


def sample_of_records(records: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the same sample of a step's records (records.records_of)."""
    return [_of_record(record) for record in _evenly(records, most)]


def _evenly(each: Sequence[Item], most: int) -> list[Item]:
    num = min(most, len(each))
    return [each[i * len(each) // num] for i in range(num)]


def _of_rollout(
    step: int, recorded: RecordedGroup, rollout: Rollout, completion: str, advantage: float | None
) -> dict[str, Any]:
    return _row(
        {
            "step": step,
            "rollout_id": rollout.rollout_id,
            "task_id": rollout.task.task_id,
            "outcome": outcome_of(recorded.dropped, rollout),
            "score": rollout.reward.score if rollout.reward else None,
            "advantage": advantage,
            "num_tokens": rollout.num_tokens,
            "stop_reason": rollout.stop_reason.value if rollout.stop_reason else None,
            "messages": rollout.task.messages,
            "prompt": rollout.task.prompt,
            "completion": completion,
        },
        [segment.policy_version for segment in rollout.segments if segment.trainable],
    )


def _of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return _row(record, [of["policy_version"] for of in record["segments"] if of["trainable"]])


def _row(of: Mapping[str, Any], versions: Sequence[int]) -> dict[str, Any]:
    row = {
        "step": of["step"],
        "rollout_id": of["rollout_id"],
        "task_id": named(of["task_id"]),
        "outcome": of["outcome"],
        "score": of["score"],
        "advantage": of["advantage"],
        "tokens": of["num_tokens"],
        "policy_versions": f"{min(versions)}-{max(versions)}" if versions else "",
        "stop_reason": of["stop_reason"] or "",
        "prompt": named(_prompt(of)),
        "completion": named(of["completion"]),
    }
    return to_json(row)


def _prompt(of: Mapping[str, Any]) -> str:
    if of["messages"] is None:
        return of["prompt"] or ""
    return "\n\n".join(f"{message.get('role')}: {_text(message.get('content'))}" for message in of["messages"])


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, default=str)
