"""What was generated: one file a step under rollouts/, one line or row a rollout. How it is read back: recorded.py.

Owns the record format (below). It decides nothing about rollouts and never changes them. The files are written whole,
so a step's file is complete or absent, and any Parquet or JSONL tool reads them: every key has one type throughout.
"columns" is JSON inside a string, because its values differ in type from one task source to the next.

What siblings share and may be long ("messages", "prompt", "columns", "prompt_ids", "media") stands in the first line of
a group and is null in the others; a rollout with another prompt than the first one has "prompt_ids" and "media" of its
own. "media": where each image of the prompt lies, and its file; null where there is none. "later_media": those of the
images that an environment showed, whose offsets count from the first token of the prompt, too. Token ids and
log-probs are those of all segments in order; "segments" says how to cut them. Log-probs are the shortest decimals that
give the same float32, so a rollout is rebuilt exactly (non-finite numbers are null, and come back NaN). How a row of
Parquet differs: rollout_table.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollover.files import atomic_write_bytes, atomic_write_text, open_regular
from rollover.track import rollout_table
from rollover.track.jsonl import to_json
from rollover.track.recorded import not_recorded, outcome_of, rows_of, step_of
from rollover.track.token_stats import record_of
from rollover.track.tracker import Cut, RecordedCredit, RecordedGroup, Tracker
from rollover.types import Media, Rollout

Format = Literal["jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("jsonl", "parquet")
_TEMPORARY = re.compile(r"\.step-\d+\.(jsonl|parquet)\.tmp-\d+")


class RolloutRecorder(Tracker):
    """Writes `<dir>/step-000012.jsonl`, `.parquet`, or both.

    `enabled` False: nothing is added, but what an earlier process of the run wrote stays, and is cut like the rest.
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
        """Write the files of one step, or add to them. Returns the path of the last.

        A step that has been begun in another format, before a --resume that changed it, goes on in that.
        """
        paths = {of: self.dir / f"step-{step:06d}.{of}" for of in FORMATS}
        formats = [of for of in FORMATS if paths[of].exists()] or self.formats
        # What is read where there are both comes first: a kill in between leaves it whole.
        if "parquet" in formats:
            rollout_table.add_rows(paths["parquet"], list(_rows(step, groups)))
        if "jsonl" in formats:
            lines = [_content(paths["jsonl"]).decode()] if paths["jsonl"].exists() else []
            lines += [json.dumps(of, ensure_ascii=False, allow_nan=False) + "\n" for of in _lines(step, groups)]
            # A lone surrogate in a completion is not UTF-8, and the recording of it is not worth the run.
            atomic_write_text(paths["jsonl"], "".join(lines).encode("utf-8", "replace").decode("utf-8"))
        return paths["jsonl" if "jsonl" in formats else "parquet"]

    def truncate(self, cut: Cut) -> None:
        """Remove the files of later steps and half-written ones, and from those of the step what comes again."""
        last = self.dir / f"step-{cut.step:06d}.jsonl"
        if last.exists():
            content, kept = _content(last), []
            for line, (number, record) in zip(content.split(b"\n"), rows_of(last), strict=False):
                try:
                    if not cut.comes_again(record["group_id"]):
                        kept.append(line + b"\n")
                except (KeyError, TypeError) as error:
                    raise not_recorded(last, number, error) from error
            if b"".join(kept) != content:
                atomic_write_bytes(last, b"".join(kept))
        if last.with_suffix(".parquet").exists():
            rollout_table.leave_out(last.with_suffix(".parquet"), cut.comes_again)
        for path in self.dir.iterdir():
            step = step_of(path.name)
            if _TEMPORARY.fullmatch(path.name) or (step is not None and step > cut.step):
                path.unlink()


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _lines(step: int, groups: Sequence[RecordedGroup]) -> Iterator[dict[str, Any]]:
    """As they stand in JSONL."""
    for recorded, place, rollout in _each(groups):
        first = recorded.group.rollouts[0]
        record = _record(step, recorded, place, shared=rollout is first)
        if rollout is not first and not _same_prompt(rollout, first):
            record |= {"prompt_ids": list(rollout.prompt.ids), "media": _media(rollout.prompt.media)}
        # "token_ids" and what is of tokens stay last: who looks for the rest reads up to there.
        yield record | {
            "token_ids": rollout.token_ids(),
            "logprobs": [x for s in rollout.segments for x in _short_float32(s.logprobs)],
            **record_of(recorded.tokens[place] if recorded.tokens else None),
        }


def _rows(step: int, groups: Sequence[RecordedGroup]) -> Iterator[dict[str, Any]]:
    """As they are put into a table."""
    none = np.zeros(0, np.float32)
    for recorded, place, rollout in _each(groups):
        logprobs = np.concatenate([none, *(s.logprobs.astype(np.float32) for s in rollout.segments)])
        logprobs[~np.isfinite(logprobs)] = np.nan
        record = _record(step, recorded, place, shared=True)
        of_tokens = record_of(recorded.tokens[place] if recorded.tokens else None)
        yield record | {"token_ids": rollout.token_ids(), "logprobs": logprobs, **of_tokens}


def _each(groups: Sequence[RecordedGroup]) -> Iterator[tuple[RecordedGroup, int, Rollout]]:
    """(its group, its place there, the rollout) of each rollout, in order."""
    for of in groups:
        assert len(of.completions) == len(of.advantages) == len(of.group.rollouts)
        yield from ((of, place, rollout) for place, rollout in enumerate(of.group.rollouts))


def _record(step: int, recorded: RecordedGroup, place: int, *, shared: bool) -> dict[str, Any]:
    """All but its tokens, of the rollout at this place. `shared`: also what its siblings have, too."""
    group, rollout = recorded.group, recorded.group.rollouts[place]
    task, reward = group.task, rollout.reward
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
        # Without entries null, because Parquet has no struct without fields.
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
