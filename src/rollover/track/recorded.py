"""What was recorded of rollouts, read back: every record as a dict, or whole groups as they were trained.

Owns which files of rollouts/ are read: of a step that was written in both formats, the Parquet file where pyarrow is
installed. What stands in them: track/recorder.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollover.files import lines_of, open_regular
from rollover.track.rollout_table import read_table_rows
from rollover.trajectories import place
from rollover.types import (
    DropReason,
    Group,
    Media,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

TRAINED = "trained"
SHARED = ("messages", "prompt", "columns", "prompt_ids")  # of a group's rollouts: in the first line of a JSONL file
_OF_TRAINED = (DropReason.BASELINE, DropReason.ABANDONED)  # reasons of single rollouts of groups that were trained
_FILE = re.compile(r"step-(\d+)\.(jsonl|parquet)")


class StepFile(NamedTuple):
    """What was recorded after `step`."""

    step: int
    path: Path


def step_files(dir: str | Path) -> list[StepFile]:
    """The files of the folder that are read, by step; [] where there is no folder."""
    dir, found = Path(dir), {}
    preferred = ".parquet" if find_spec("pyarrow") else ".jsonl"
    for name in sorted(os.listdir(dir)) if dir.is_dir() else ():
        if (step := step_of(name)) is not None:
            path = dir / name
            if (step not in found or path.suffix == preferred) and path.is_file():  # no pipe, which has no end
                found[step] = path
    return [StepFile(step, found[step]) for step in sorted(found)]


def step_of(name: str) -> int | None:
    """Whose step the file of this name in rollouts/ is; None: no step's."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def outcome_of(dropped: DropReason | None, rollout: Rollout) -> str:
    """What became of a Rollout of a group that was trained (None) or dropped: what is compared with and never trained
    itself, or had a call that its agent gave up, is dropped as in the ledger."""
    reason = dropped
    if dropped is None and rollout.greedy:
        reason = DropReason.BASELINE
    elif dropped is None and rollout.stop_reason is StopReason.ABANDONED:
        reason = DropReason.ABANDONED
    return TRAINED if reason is None else f"dropped:{reason.value}"


def read_rollouts(dir: str | Path, include_dropped: bool = False) -> Iterator[list[Group]]:
    """The recorded groups, one list a step, in the order they were written.

    Trained groups are READY again, dropped ones (only with `include_dropped`) DROPPED; all else is as it was.
    Raises ValueError if there are no recordings, and for a malformed record with its file and line.
    """
    files = step_files(dir)
    if not files:
        raise ValueError(
            f"run.train_on_recorded: {dir} has no step-*.jsonl or .parquet files. Give a run's rollouts/ directory."
        )
    for _, path in files:
        groups = _read_step(path)
        yield [g for g in groups if include_dropped or g.rollouts[0].state is RolloutState.READY]


def read_records(dir: str | Path) -> Iterator[dict[str, Any]]:
    """The recorded rollouts as they are in the files, in the order they were written, dropped ones included.

    What siblings share is in each of them, and "columns" is a dict. Raises ValueError for a line that is not JSON.
    """
    for _, path in step_files(dir):
        yield from records_of(path)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """`read_records` of one file."""
    shared: dict[str, Any] = {}
    for number, record in rows_of(path):
        try:
            if record["columns"] is not None:
                record["columns"] = json.loads(record["columns"])
                shared = shared_of(record)
            own = own_of(record)
        except (ValueError, KeyError, TypeError) as error:
            raise not_recorded(path, number, error) from error
        yield record | shared | own


def shared_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the first line of a group has for all of them. KeyError for another line."""
    return {key: record[key] for key in SHARED} | {"media": record.get("media")}  # earlier versions had no media


def own_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt of a rollout, where it is not that of its group's first one."""
    if record["prompt_ids"] is None:
        return {}
    return {"prompt_ids": record["prompt_ids"], "media": record.get("media")}


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, record) of each line or row of a file, as it stands there. Half a line at the end of a JSONL
    file, which a copy in the making may have, is none."""
    if path.suffix == ".parquet":
        yield from enumerate(read_table_rows(path), start=1)
        return
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                if line.endswith(b"\n"):
                    raise not_recorded(path, number, error) from error
                return
            if not isinstance(record, dict):
                raise not_recorded(path, number, TypeError("no object"))
            yield number, record


def not_recorded(path: Path, number: int, error: Exception) -> ValueError:
    """What to raise where the line or row of this number is no record, as `error` says."""
    what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path}:{number}: not a recorded rollout: {what}. Restore the file, or remove it")


def _read_step(path: Path) -> list[Group]:
    groups: dict[int, Group] = {}
    sizes: dict[int, int] = {}
    for number, record in rows_of(path):
        try:
            group_id, size = record["group_id"], int(record["group_size"])
            group = groups.get(group_id)
            if group is None:
                group = groups[group_id] = Group(group_id, _task(record), prompt_of(record), [])
            rollout = _rollout(record, group)
            last = group.rollouts[-1] if group.rollouts else None
            if (last is not None and place(rollout) <= place(last)) or sizes.setdefault(group_id, size) != size:
                raise ValueError(f"rollout {rollout.rollout_id} is out of order")
            group.rollouts.append(rollout)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise not_recorded(path, number, error) from error
    for group in groups.values():
        if len(group.rollouts) != sizes[group.group_id]:
            raise ValueError(
                f"{path}: group {group.group_id} has {len(group.rollouts)} of its {sizes[group.group_id]} rollouts."
                " Lines are missing: a group can only be trained whole."
            )
    return list(groups.values())


def prompt_of(record: Mapping[str, Any]) -> Prompt:
    """The prompt of a record that has one."""
    return Prompt.of(record["prompt_ids"], record.get("media") or ())


def media_of(record: Mapping[str, Any], key: str) -> tuple[Media, ...]:
    """Return the images that a record has under "media" or "later_media"."""
    return tuple(map(Media.from_json, record.get(key) or ()))


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


def _rollout(record: dict[str, Any], group: Group) -> Rollout:
    token_ids = np.array(record["token_ids"], dtype=np.int32)
    logprobs = np.array([np.nan if x is None else x for x in record["logprobs"]], dtype=np.float32)
    lengths = [s["num_tokens"] for s in record["segments"]]
    if not len(token_ids) == len(logprobs) == sum(lengths):
        raise ValueError(
            f"{len(token_ids)} token_ids, {len(logprobs)} logprobs and segments of {sum(lengths)} tokens do not agree"
        )
    media = media_of(record, "later_media")
    segments, start, num_prompt = [], 0, len(_own_prompt(record, group))
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
                media=tuple(m for m in media if start <= m.offset - num_prompt < end),
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
        prompt=_own_prompt(record, group),
        **{name: record[name] for name in ("role", "trajectory", "context") if name in record},
    )


def _state(outcome: str) -> RolloutState:
    if outcome == TRAINED or DropReason(outcome.removeprefix("dropped:")) in _OF_TRAINED:
        return RolloutState.READY  # it is a part of its group, which is given whole
    return RolloutState.DROPPED


def _reward(record: dict[str, Any]) -> Reward | None:
    if record["score"] is None and record["error"] is None:
        return None
    extras = {name: float("nan") if v is None else v for name, v in (record["extras"] or {}).items()}
    more = {name: record.get(name) or {} for name in ("shaping", "texts")}
    return Reward(record["score"], extras, record["error"], turns=record.get("turns") or (), **more)


def _own_prompt(record: dict[str, Any], group: Group) -> Prompt:
    """The group's, where it is the same: one copy of it."""
    own = group.prompt if record["prompt_ids"] is None else prompt_of(record)
    return group.prompt if own == group.prompt else own
