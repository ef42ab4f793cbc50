"""Records of rollouts: one file per step under rollouts/, one JSON line or Parquet row per rollout.

Files are written whole, so a step's file is complete or absent. Every key has one type; "columns" is a JSON string,
because its values differ in type between task sources. parquet.py describes how a Parquet row differs.

The first line of a group holds the values that siblings share ("messages", "prompt", "columns", "prompt_ids", "media");
they are null in the other lines. A rollout with another prompt has its own "prompt_ids" and "media". "media": offset
and file of each image of the prompt, or null. "later_media": the same for images from an environment; their offsets
also count from the first token of the prompt. "token_ids" and "logprobs" concatenate all segments; "segments" has their
lengths. A log-prob is the shortest decimal that gives the same float32, so a rollout is restored exactly (non-finite
numbers are null and restored as NaN).

If a step has files in both formats, readers use the Parquet file where pyarrow is installed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rollover.files import atomic_write_bytes, atomic_write_text, lines_of, open_regular
from rollover.track.jsonl import to_json
from rollover.track.parquet import append_rollouts, read_table_rows, remove_groups
from rollover.track.token_stats import record_of
from rollover.track.tracker import Cut, RecordedCredit, RecordedGroup, Tracker
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

Format = Literal["jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("jsonl", "parquet")
_TEMPORARY = re.compile(r"\.step-\d+\.(jsonl|parquet)\.tmp-\d+")


class RolloutRecorder(Tracker):
    """Tracker that writes `<dir>/step-000012.jsonl`, `.parquet`, or both.

    `enabled` False: it writes nothing, but still truncates the files of earlier processes of the run.
    """

    def __init__(self, dir: str | Path, enabled: bool = True, formats: Sequence[Format] = ("jsonl",)) -> None:
        self.dir, self.enabled, self.formats = Path(dir), enabled, tuple(formats)
        self.dir.mkdir(parents=True, exist_ok=True)

    @property
    def wants_groups(self) -> bool:
        return self.enabled

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        if self.enabled and groups:
            self.write(step, groups)

    def write(self, step: int, groups: Sequence[RecordedGroup]) -> Path:
        """Write the files of one step, or append to them. Returns the path of the last file.

        A step that was begun in another format, before a --resume that changed it, keeps that format.
        """
        paths = {of: self.dir / f"step-{step:06d}.{of}" for of in FORMATS}
        formats = [of for of in FORMATS if paths[of].exists()] or self.formats
        # Readers prefer Parquet, so it is written first: a kill in between leaves it complete.
        if "parquet" in formats:
            append_rollouts(paths["parquet"], list(_table_records(step, groups)))
        if "jsonl" in formats:
            lines = [_read_bytes(paths["jsonl"]).decode()] if paths["jsonl"].exists() else []
            lines += [json.dumps(of, ensure_ascii=False, allow_nan=False) + "\n" for of in _jsonl_records(step, groups)]
            # A lone surrogate in a completion is not UTF-8; a failed write would end the run.
            atomic_write_text(paths["jsonl"], "".join(lines).encode("utf-8", "replace").decode("utf-8"))
        return paths["jsonl" if "jsonl" in formats else "parquet"]

    def truncate(self, cut: Cut) -> None:
        """Remove later steps and half-written files, and the repeated groups of the step itself."""
        last = self.dir / f"step-{cut.step:06d}.jsonl"
        if last.exists():
            content, kept = _read_bytes(last), []
            for line, (number, record) in zip(content.split(b"\n"), numbered_records(last), strict=False):
                try:
                    if not cut.is_repeated(record["group_id"]):
                        kept.append(line + b"\n")
                except (KeyError, TypeError) as error:
                    raise invalid_record(last, number, error) from error
            if b"".join(kept) != content:
                atomic_write_bytes(last, b"".join(kept))
        if last.with_suffix(".parquet").exists():
            remove_groups(last.with_suffix(".parquet"), cut.is_repeated)
        for path in self.dir.iterdir():
            step = step_of(path.name)
            if _TEMPORARY.fullmatch(path.name) or (step is not None and step > cut.step):
                path.unlink()


def _read_bytes(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _jsonl_records(step: int, groups: Sequence[RecordedGroup]) -> Iterator[dict[str, Any]]:
    """Yield the records in JSONL form."""
    for recorded, index, rollout in _each_rollout(groups):
        first = recorded.group.rollouts[0]
        record = _record_of(step, recorded, index, shared=rollout is first)
        if rollout is not first and not _same_prompt(rollout, first):
            record |= {"prompt_ids": list(rollout.prompt.ids), "media": _media(rollout.prompt.media)}
        # The keys of tokens stay last: readers of the other keys stop there (plugins/dashboard/rollout_index.py).
        yield record | {
            "token_ids": rollout.token_ids(),
            "logprobs": [x for s in rollout.segments for x in _short_float32(s.logprobs)],
            **record_of(recorded.tokens[index] if recorded.tokens else None),
        }


def _table_records(step: int, groups: Sequence[RecordedGroup]) -> Iterator[dict[str, Any]]:
    """Yield the records in table form."""
    none = np.zeros(0, np.float32)
    for recorded, index, rollout in _each_rollout(groups):
        logprobs = np.concatenate([none, *(s.logprobs.astype(np.float32) for s in rollout.segments)])
        logprobs[~np.isfinite(logprobs)] = np.nan
        record = _record_of(step, recorded, index, shared=True)
        of_tokens = record_of(recorded.tokens[index] if recorded.tokens else None)
        yield record | {"token_ids": rollout.token_ids(), "logprobs": logprobs, **of_tokens}


def _each_rollout(groups: Sequence[RecordedGroup]) -> Iterator[tuple[RecordedGroup, int, Rollout]]:
    """Yield (group, index in the group, rollout) in order."""
    for recorded in groups:
        rollouts = recorded.group.rollouts
        assert len(recorded.completions) == len(recorded.advantages) == len(rollouts)
        yield from ((recorded, index, rollout) for index, rollout in enumerate(rollouts))


def _record_of(step: int, recorded: RecordedGroup, place: int, *, shared: bool) -> dict[str, Any]:
    """Record of one rollout without its tokens. `shared`: with the values that siblings share."""
    group, rollout = recorded.group, recorded.group.rollouts[place]
    task, reward = group.task, rollout.reward
    error = reward.error if reward else None
    if reward is not None and reward.missing and error is None:
        error = "missing"  # score and error both null would mean: not scored yet
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
        "outcome": outcome_of(recorded.dropped, rollout),
        "messages": list(task.messages) if shared and task.messages is not None else None,
        "prompt": task.prompt if shared else None,
        "plain": task.plain,
        "columns": json.dumps(task.columns, ensure_ascii=False) if shared else None,
        "prompt_ids": list(rollout.prompt.ids) if shared else None,
        "media": _media(rollout.prompt.media) if shared else None,
        "later_media": _media(rollout.later_media),
        "completion": recorded.completions[place],
        "score": to_json(_float(reward.score)) if reward else None,
        # Null instead of {}: Parquet has no struct without fields.
        "extras": {name: to_json(_float(v)) for name, v in reward.extras.items()} if reward and reward.extras else None,
        "texts": reward.texts if reward and reward.texts else None,
        "shaping": {name: float(v) for name, v in reward.shaping.items()} if reward and reward.shaping else None,
        "error": error,
        "turns": [to_json(_float(value)) for value in reward.turns] if reward and len(reward.turns) else None,
        "advantage": to_json(_float(recorded.advantages[place])),
        "credit": _credit(recorded.credits[place] if recorded.credits else None),
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
    }


def _media(media: Sequence[Media]) -> list[dict[str, Any]] | None:
    return [of.to_json() for of in media] or None


def _credit(credit: RecordedCredit | None) -> dict[str, Any] | None:
    if credit is None:
        return None
    return {
        "compared": credit.compared,
        "reward": to_json(_float(credit.reward)),
        "terms": {name: float(value) for name, value in credit.terms.items()} or None,
        "kl_penalty": to_json(_float(credit.kl_penalty)),
        "left_out": credit.left_out or None,
    }


def _short_float32(values: np.ndarray) -> list[float | None]:
    # numpy's text of a float32 is the shortest that reads back as the same float32.
    return [to_json(float(text)) for text in values.astype(np.float32).astype("U")]


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _same_prompt(a: Rollout, b: Rollout) -> bool:
    return a.prompt is b.prompt or a.prompt == b.prompt


TRAINED = "trained"
SHARED = ("messages", "prompt", "columns", "prompt_ids")  # only in the first JSONL line of a group
_OF_TRAINED = (DropReason.BASELINE, DropReason.ABANDONED)  # single rollouts of trained groups
_FILE = re.compile(r"step-(\d+)\.(jsonl|parquet)")


class StepFile(NamedTuple):
    """The file of one step."""

    step: int
    path: Path


def step_files(dir: str | Path) -> list[StepFile]:
    """Return the file to read for each step of the folder, in order; [] without a folder."""
    dir, found = Path(dir), {}
    preferred = ".parquet" if find_spec("pyarrow") else ".jsonl"
    for name in sorted(os.listdir(dir)) if dir.is_dir() else ():
        if (step := step_of(name)) is not None:
            path = dir / name
            if (step not in found or path.suffix == preferred) and path.is_file():  # reading a pipe would not end
                found[step] = path
    return [StepFile(step, found[step]) for step in sorted(found)]


def step_of(name: str) -> int | None:
    """Return the step of a file name in rollouts/, None for other files."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def outcome_of(dropped: DropReason | None, rollout: Rollout) -> str:
    """Return the outcome of a rollout: "trained" or "dropped:REASON". `dropped`: of its group, None if trained.

    As in the ledger, a greedy baseline and an abandoned call of a trained group count as dropped.
    """
    reason = dropped
    if dropped is None and rollout.greedy:
        reason = DropReason.BASELINE
    elif dropped is None and rollout.stop_reason is StopReason.ABANDONED:
        reason = DropReason.ABANDONED
    return TRAINED if reason is None else f"dropped:{reason.value}"


def read_rollouts(dir: str | Path, include_dropped: bool = False) -> Iterator[list[Group]]:
    """Yield the recorded groups, one list per step, in the order of writing.

    Trained groups are READY again, dropped ones (only with `include_dropped`) DROPPED. Raises ValueError without
    records, and for a malformed record with its file and line.
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
    """Yield the records of all rollouts, dropped ones included, in the order of writing.

    Each has the values that siblings share, and "columns" as a dict. Raises ValueError for a line that is not JSON.
    """
    for _, path in step_files(dir):
        yield from records_of(path)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of one file, as `read_records` does."""
    shared: dict[str, Any] = {}
    for number, record in numbered_records(path):
        try:
            if record["columns"] is not None:
                record["columns"] = json.loads(record["columns"])
                shared = shared_fields(record)
            own = own_prompt_fields(record)
        except (ValueError, KeyError, TypeError) as error:
            raise invalid_record(path, number, error) from error
        yield record | shared | own


def shared_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared values in the first line of a group; KeyError for other lines."""
    return {key: record[key] for key in SHARED} | {"media": record.get("media")}  # earlier versions had no media


def own_prompt_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return "prompt_ids" and "media" if the rollout has a prompt of its own, else {}."""
    if record["prompt_ids"] is None:
        return {}
    return {"prompt_ids": record["prompt_ids"], "media": record.get("media")}


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, record) of each line or row of a file. A truncated last line is ignored."""
    if path.suffix == ".parquet":
        yield from enumerate(read_table_rows(path), start=1)
        return
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                if line.endswith(b"\n"):
                    raise invalid_record(path, number, error) from error
                return
            if not isinstance(record, dict):
                raise invalid_record(path, number, TypeError("no object"))
            yield number, record


def invalid_record(path: Path, number: int, error: Exception) -> ValueError:
    """Return the error to raise for an invalid line or row."""
    what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path}:{number}: not a recorded rollout: {what}. Restore the file, or remove it")


def _read_step(path: Path) -> list[Group]:
    groups: dict[int, Group] = {}
    sizes: dict[int, int] = {}
    for number, record in numbered_records(path):
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
            raise invalid_record(path, number, error) from error
    for group in groups.values():
        if len(group.rollouts) != sizes[group.group_id]:
            raise ValueError(
                f"{path}: group {group.group_id} has {len(group.rollouts)} of its {sizes[group.group_id]} rollouts."
                " Lines are missing: a group can only be trained whole."
            )
    return list(groups.values())


def prompt_of(record: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a record with "prompt_ids"."""
    return Prompt.of(record["prompt_ids"], record.get("media") or ())


def media_of(record: Mapping[str, Any], key: str) -> tuple[Media, ...]:
    """Return the images under "media" or "later_media"."""
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
        return RolloutState.READY  # groups are returned complete
    return RolloutState.DROPPED


def _reward(record: dict[str, Any]) -> Reward | None:
    if record["score"] is None and record["error"] is None:
        return None
    extras = {name: float("nan") if v is None else v for name, v in (record["extras"] or {}).items()}
    more = {name: record.get(name) or {} for name in ("shaping", "texts")}
    return Reward(record["score"], extras, record["error"], turns=record.get("turns") or (), **more)


def _own_prompt(record: dict[str, Any], group: Group) -> Prompt:
    # An equal prompt is the group's object: one copy in memory.
    own = group.prompt if record["prompt_ids"] is None else prompt_of(record)
    return group.prompt if own == group.prompt else own
