"""The answers of an evaluation for people: a file of all of them, and the worst ones on the console."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rollover.files import atomic_write_text
from rollover.text import encodable, printable, printable_lines
from rollover.track.console import excerpt, new_console
from rollover.track.figures import decimal
from rollover.track.jsonl import to_json
from rollover.track.statistics import summarise_eval

_OPTIONAL = ("roles", "setting", "vote", "task_score")


@dataclass(frozen=True, slots=True)
class RoleScore:
    """Score of one trajectory; None if missing."""

    role: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a held-out task.

    `source`: file or generator of the task; `data_source`: of its row, if any. `expected`: the reference answer, if
    any. `score`: None if missing, because of `error`. `roles`: scores of its trajectories, if workflows name roles.
    `setting`: of [[eval.settings]], "" for [eval] itself. `vote`: its answer for maj@k, None if it abstains or without
    maj@k. `task_score`: with eval.shaped, the score without shaping terms.
    """

    task_id: str
    sibling: int
    source: str
    data_source: str | None
    expected: str | None
    stop_reason: str
    num_tokens: int
    score: float | None
    error: str | None
    prompt: str
    answer: str
    roles: tuple[RoleScore, ...] = ()
    setting: str = ""
    vote: str | None = None
    task_score: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-able dict, without empty "roles", "setting", "vote" and "task_score"."""
        fields = {**asdict(self), "score": to_json(self.score)}
        empty = (None, "", ())
        return {name: value for name, value in fields.items() if name not in _OPTIONAL or value not in empty}


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write one JSON object per line in the order of tasks, or Markdown if the name ends in .md. Replaces the file."""
    if path.suffix == ".md":
        text = "".join(map(_markdown, answers))
    else:
        text = "".join(json.dumps(a.as_json(), ensure_ascii=False) + "\n" for a in answers)
    atomic_write_text(path, encodable(text))


def _markdown(answer: Answer) -> str:
    score = f"no score: {answer.error}" if answer.score is None else f"score {decimal(answer.score, 2)}"
    expected = "" if answer.expected is None else f", expected {answer.expected!r}"
    setting = f" ({answer.setting})" if answer.setting else ""
    title = f"## {answer.task_id}, answer {answer.sibling}{setting}: {score}{expected}"
    texts = [printable_lines(text).strip("\n") or "(nothing)" for text in (answer.prompt, answer.answer)]
    texts = [textwrap.indent(text, "    ") for text in texts]
    end = f"{answer.stop_reason} after {answer.num_tokens} tokens"
    return f"{printable(title)}\n\nprompt:\n\n{texts[0]}\n\nanswer ({end}):\n\n{texts[1]}\n\n"


def worst(answers: Sequence[Answer], num: int) -> list[Answer]:
    """Return the `num` answers with the lowest scores, ties in the order of tasks, unscored ones last."""
    return sorted(answers, key=lambda a: (a.score is None, a.score or 0.0))[:num]


def print_worst(answers: Sequence[Answer], console: Console | None = None) -> None:
    """Print each answer: task, score, stop reason, expected answer, beginnings of prompt and answer."""
    console = console or new_console()
    for a in answers:
        score = f"no score: {a.error}" if a.score is None else f"score {decimal(a.score, 2)}"
        expected = "" if a.expected is None else f", expected {a.expected!r}"
        head = f"{a.task_id} ({a.source}): {score}, {a.stop_reason} after {a.num_tokens} tokens{expected}"
        for text in (
            f"\n{excerpt(head, console)}",
            f"  {excerpt(a.prompt, console)}",
            f"  -> {excerpt(a.answer, console)}",
        ):
            console.print(Text(text), soft_wrap=True)


def summarise_answers(
    answers: Sequence[Answer], threshold: float, ks: Sequence[int], majority_ks: Sequence[int] = ()
) -> dict[str, Any]:
    """Summarise the answers by `summarise_eval`.

    "data_sources": the same by data source, if these differ from the sources. "roles": the same by role, if there are
    several. "missing" counts every missing reward; a task without any is in no other statistic. "tokens": mean sampled
    tokens of an answer; "truncated": share of answers that ended at the token limit.
    """
    tasks: dict[str, list[Answer]] = {}
    for answer in answers:
        tasks.setdefault(answer.task_id, []).append(answer)
    scores = {of: [a.score for a in tasks[of]] for of in tasks}
    votes = {of: [a.vote for a in tasks[of]] for of in tasks} if majority_ks else None
    shaped = any(a.task_score is not None for a in answers)
    passing = {of: [a.task_score for a in tasks[of]] for of in tasks} if shaped else None
    named = [(tasks[of][0].source, of, scores[of]) for of in tasks]
    summary = summarise_eval(named, threshold, ks, votes, majority_ks, passing)
    named = [(tasks[of][0].data_source or tasks[of][0].source, of, scores[of]) for of in tasks]
    if len({name for name, *_ in named}) > 1 and any(name != tasks[of][0].source for name, of, _ in named):
        summary["data_sources"] = summarise_eval(named, threshold, ks, votes, majority_ks, passing)["sources"]
    if len(roles := {of.role for a in answers for of in a.roles}) > 1:
        summary["roles"] = {role: _of_role(role, tasks, threshold, ks) for role in sorted(roles)}
    summary["tokens"] = sum(a.num_tokens for a in answers) / len(answers)
    summary["truncated"] = sum(a.stop_reason == "length" for a in answers) / len(answers)
    return summary


def _of_role(
    role: str, tasks: Mapping[str, Sequence[Answer]], threshold: float, ks: Sequence[int]
) -> Mapping[str, Any]:
    scores = {task: [of.score for a in answers for of in a.roles if of.role == role] for task, answers in tasks.items()}
    return summarise_eval([(role, task, of) for task, of in scores.items() if of], threshold, ks)["sources"][role]
