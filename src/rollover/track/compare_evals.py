"""Comparison of two evaluations, paired by task: what became better, and whether that may be chance."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollover.files import lines_of, open_regular
from rollover.track.answers import Answer
from rollover.track.figures import decimal
from rollover.track.statistics import mean_interval, sign_flip_p


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of one setting ("": [eval] itself) over the tasks with scores in both evaluations, by their mean
    scores.

    `recorded`, `mean`: mean score before and now; `ci`: 95 % interval of `difference` over tasks (None with one task);
    `better`, `worse`: numbers of tasks; `p_value`: of `sign_flip_p`; `unpaired`: tasks without a score in one of them.
    """

    setting: str
    tasks: int
    recorded: float
    mean: float
    difference: float
    ci: list[float] | None
    better: int
    worse: int
    p_value: float
    unpaired: int

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)

    def __str__(self) -> str:
        named = f"setting {self.setting}: " if self.setting else ""
        interval = f" [{self.ci[0]:+.3f}, {self.ci[1]:+.3f}]" if self.ci else ""
        rest = f"; {self.unpaired} tasks are not in both" if self.unpaired else ""
        return (
            f"{named}{self.tasks} tasks: mean reward {decimal(self.recorded)} -> {decimal(self.mean)},"
            f" {self.difference:+.3f}{interval}; better in {self.better}, worse in {self.worse}; p ="
            f" {self.p_value:.2g}{rest}"
        )


def read_recorded(path: Path, option: str = "--against ") -> list[dict[str, Any]]:
    """Read the rows of a file of --answers, or of the newest evaluation in a run's directory.

    ValueError without rows; the message begins with `option`.
    """
    of_run = path.is_dir() or not option  # a file of the user may be a pipe
    if path.is_dir():
        files = sorted((path / "evaluations").glob("step-*.jsonl"))
        if not files:
            raise ValueError(f"{option}{path}: this folder has no evaluations/step-*.jsonl; name a file of answers")
        path = files[-1]
    try:
        with open_regular(path) if of_run else open(path, "rb") as file:
            rows = [json.loads(line) for line in lines_of(file, path)]
    except OSError as error:
        raise ValueError(f"{option}{path}: it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option}{path}: a line of it is no JSON ({error})") from error
    for number, row in enumerate(rows, start=1):
        if not (isinstance(row, dict) and {"task_id", "prompt", "score"} <= row.keys()):
            raise ValueError(f"{option}{path}: line {number} is no answer: it lacks task_id, prompt or score")
        texts = (row["task_id"], row["prompt"], row.get("setting", ""))
        if not (all(isinstance(text, str) for text in texts) and _is_score(row["score"])):
            raise ValueError(
                f"{option}{path}: line {number} is no answer: task_id, prompt and setting are texts, score is a"
                " finite number or null"
            )
    if not rows:
        raise ValueError(f"{option}{path}: it has no answers")
    return rows


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)


def compare_answers(answers: Sequence[Answer], recorded: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Compare each setting that both have, pairing tasks by task_id and prompt; ValueError without a pair."""
    now = _by_setting((a.setting, (a.task_id, a.prompt), a.score) for a in answers)
    found = _of_settings(now, _recorded_scores(recorded))
    if not found:
        raise ValueError(
            "--against: no task has a score in both evaluations (the same task_id and prompt, in the same setting):"
            " evaluate the same held-out tasks (tasks.*, eval.seed, eval.num_tasks)"
        )
    return found


def compare_recorded(rows: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Compare two recorded evaluations, as `compare_answers`; [] without a pair."""
    return _of_settings(_recorded_scores(rows), _recorded_scores(recorded))


_Scores = dict[tuple[str, str], list[float]]  # (task_id, prompt) -> scores, without missing ones


def _of_settings(now: Mapping[str, _Scores], then: Mapping[str, _Scores]) -> list[Comparison]:
    found = [_compared(setting, now[setting], then[setting]) for setting in now if setting in then]
    return [comparison for comparison in found if comparison is not None]


def _recorded_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, _Scores]:
    return _by_setting((r.get("setting", ""), (r["task_id"], r["prompt"]), r["score"]) for r in rows)


def _by_setting(rows: Iterable[tuple[str, tuple[str, str], float | None]]) -> dict[str, _Scores]:
    found: dict[str, _Scores] = {}
    for setting, task, score in rows:
        scores = found.setdefault(setting, {}).setdefault(task, [])
        if score is not None:
            scores.append(score)
    return found


def _compared(setting: str, now: _Scores, then: _Scores) -> Comparison | None:
    both = [task for task in now if now[task] and then.get(task)]
    if not both:
        return None
    means = [tuple(math.fsum(of[task]) / len(of[task]) for of in (then, now)) for task in both]
    differences = [after - before for before, after in means]
    difference, interval = mean_interval(differences)
    return Comparison(
        setting=setting,
        tasks=len(both),
        recorded=math.fsum(before for before, _ in means) / len(both),
        mean=math.fsum(after for _, after in means) / len(both),
        difference=difference,
        ci=list(interval) if len(both) > 1 else None,
        better=sum(value > 0 for value in differences),
        worse=sum(value < 0 for value in differences),
        p_value=sign_flip_p(differences),
        unpaired=len(now.keys() | then.keys()) - len(both),
    )
