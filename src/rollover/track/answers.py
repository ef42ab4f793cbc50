"""The answers of an evaluation, to be read: a JSONL file of all of them, and the worst ones on the console.

Owns the record (below) and what "worst" means. It scores nothing.
"""

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

_WHERE_THERE = ("roles", "setting", "vote", "task_score")


@dataclass(frozen=True, slots=True)
class RoleScore:
    """Of a trajectory of this role. None: missing."""

    role: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to one held-out task. `source`: the file (or generator) that the task is from; `data_source`: the
    row's own, if it has one. `expected`: the reference answer, if there is one. `score` None: missing, for `error`.
    `roles`: the scores of the trajectories that it is made of, where workflows name roles. `setting`: of
    [[eval.settings]], "" for that of [eval] itself. `vote`: what it says for maj@k, None where it says nothing, or
    nobody asks. `task_score`: with eval.shaped, the score without the shaping terms that `score` includes."""

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
        """JSON-able; "roles", "setting", "vote" and "task_score" only where there are some."""
        fields = {**asdict(self), "score": to_json(self.score)}
        empty = (None, "", ())
        return {name: value for name, value in fields.items() if name not in _WHERE_THERE or value not in empty}


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """One JSON object a line, in the order of tasks; of a name that ends in .md a text to be read. An existing file is
    replaced."""
    if path.suffix == ".md":
        text = "".join(map(_to_read, answers))
    else:
        text = "".join(json.dumps(a.as_json(), ensure_ascii=False) + "\n" for a in answers)
    atomic_write_text(path, encodable(text))


def _to_read(answer: Answer) -> str:
    """In Markdown: a heading with score and stop reason, then prompt and answer as a terminal may have them."""
    score = f"no score: {answer.error}" if answer.score is None else f"score {decimal(answer.score, 2)}"
    expected = "" if answer.expected is None else f", expected {answer.expected!r}"
    setting = f" ({answer.setting})" if answer.setting else ""
    title = f"## {answer.task_id}, answer {answer.sibling}{setting}: {score}{expected}"
    texts = [printable_lines(text).strip("\n") or "(nothing)" for text in (answer.prompt, answer.answer)]
    texts = [textwrap.indent(text, "    ") for text in texts]
    end = f"{answer.stop_reason} after {answer.num_tokens} tokens"
    return f"{printable(title)}\n\nprompt:\n\n{texts[0]}\n\nanswer ({end}):\n\n{texts[1]}\n\n"


def worst(answers: Sequence[Answer], num: int) -> list[Answer]:
    """The `num` answers of the lowest scores, in the order of tasks where these are equal; last those without one."""
    return sorted(answers, key=lambda a: (a.score is None, a.score or 0.0))[:num]


def print_worst(answers: Sequence[Answer], console: Console | None = None) -> None:
    """Each with its task, score and stop reason, what was expected, and the beginnings of prompt and answer."""
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


def summary_of(
    answers: Sequence[Answer], threshold: float, ks: Sequence[int], majority_ks: Sequence[int] = ()
) -> dict[str, Any]:
    """`summarise_eval` of the answers, with the same under "data_sources" where rows name theirs and these are not the
    sources, and of the trajectories of each role under "roles" where there are several. "missing" counts every missing
    reward; a task without any reward is in no other statistic. "tokens": sampled tokens of an answer, on average;
    "truncated": the share of answers that the limit of tokens ended."""
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
    """Of the trajectories of this role: all of a task are samples of it."""
    scores = {task: [of.score for a in answers for of in a.roles if of.role == role] for task, answers in tasks.items()}
    return summarise_eval([(role, task, of) for task, of in scores.items() if of], threshold, ks)["sources"][role]
