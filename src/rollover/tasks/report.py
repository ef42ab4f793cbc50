"""The line about the tasks that is printed before a run: how many rows are repeated or held out, and how many held-out
tasks resemble training tasks.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from rollover.config import Config
from rollover.functions import shortened
from rollover.images import no_media_kept
from rollover.rewards.answers import RULES, answer_of, can_read, reference_answer
from rollover.rewards.built_in import answer_rules
from rollover.tasks.stream import MAX_ROWS, TaskStream
from rollover.types import Task

_NUM_DRAWN = 1000
_LIMIT_S = 2.0  # some generators take 50 ms a problem


def tasks_line(config: Config, num_drawn: int = _NUM_DRAWN, limit_s: float = _LIMIT_S) -> str:
    """Return the line: rows and duplicates of each dataset, rows that are held out, and how many held-out tasks have
    the words and the answer of one of the first `num_drawn` training tasks (as many as `limit_s` allows). A second line
    lists answer rules that cannot read the references of these tasks. Stores no image.
    """
    with no_media_kept():
        return _tasks_line(config, num_drawn, limit_s)


# Private


def _tasks_line(config: Config, num_drawn: int, limit_s: float) -> str:
    trained = TaskStream(config.tasks, config.run.seed, "train", rewards=config.rewards)
    parts = _datasets(config, trained)
    # Reading ahead in a stream may take long, and exhaust an iterator: read one row of it.
    drawn = _drawn(trained, num_drawn if config.eval.num_tasks or not trained.streamed() else 1, limit_s)
    tasks: list[Task] = []
    if config.eval.num_tasks:
        held_out = TaskStream(config.tasks, config.eval.seed, "eval", rewards=config.rewards)
        tasks, wanted = held_out.take(config.eval.num_tasks), config.eval.num_tasks
        rest = f" (eval.num_tasks = {wanted}, but there are no more)" if len(tasks) < wanted else ""
        if num := held_out.num_on_neither_side:
            rest += f"; {num:,} more were held out, but are not evaluated: rows that are trained are the same"
        parts.append(_overlap(tasks, drawn, trained.num_failed) + rest)
    lines = ["tasks: " + "; ".join(parts)] if parts else []
    return "\n".join(lines + _unreadable({"training": drawn, "held-out": tasks}))


def _datasets(config: Config, trained: TaskStream) -> list[str]:
    parts = []
    for source, rows, keys in trained.counted():
        if source.weight == 0:
            parts.append(f"{rows.label} has {len(keys):,} rows, of which none is trained (weight = 0)")
            continue
        by_file = source.names_held_out
        left_out = sum(not trained.accepts(of_row, by_file) for of_row in keys)
        for_text = left_out - sum(not trained.accepts(of_row[:1], by_file) for of_row in keys)
        repeated = len(keys) - len({of_row[0] for of_row in keys})
        first = "the first " if (rows.num_problems or 0) > MAX_ROWS else ""
        if not by_file:
            why = f"held out (tasks.eval_fraction = {config.tasks.eval_fraction:g})"
        else:
            where = source.eval_path or f"its split {source.eval_split}"
            why = f"left out, as {where} has their problems"
            if not config.eval.num_tasks:
                why += ", which is not evaluated: eval.num_tasks = 0"
        if for_text:
            why += f" ({for_text:,} of them for their text alone: rows with another value of problem_key have the same)"
        parts.append(
            f"{rows.label} has {first}{len(keys):,} rows: {len(keys) - left_out:,} are trained, {left_out:,} {why};"
            f" {repeated:,} repeat another's problem"
        )
    return parts + [f"{label} is streamed, and not counted" for label in trained.streamed()]


def _drawn(trained: TaskStream, num_drawn: int, limit_s: float) -> list[Task]:
    started, drawn = time.monotonic(), []
    while len(drawn) < num_drawn and time.monotonic() - started < limit_s and (task := trained.next()) is not None:
        drawn.append(task)
    return drawn


def _unreadable(sides: Mapping[str, Iterable[Task]]) -> list[str]:
    """Return a line for each answer rule that cannot read some references, with counts by side of the split."""
    tasks = {side: {task.task_id: task for task in of_side}.values() for side, of_side in sides.items()}
    found: dict[str, dict[str, list[str]]] = {}
    for side, of_side in tasks.items():
        for task in of_side:
            answer = answer_of(task.columns)
            for rule in [] if answer is None else answer_rules(task.reward):
                if not can_read(reference := reference_answer(answer), rule):
                    found.setdefault(rule, {}).setdefault(side, []).append(reference)
    lines = []
    for rule, by_side in found.items():
        counts = " and ".join(f"{len(r):,} of {len(tasks[side]):,} {side} tasks" for side, r in by_side.items())
        example = next(iter(by_side.values()))[0]
        readers = ", ".join(other for other in RULES if can_read(example, other)) or "no rule"
        lines.append(
            f"tasks.answer_rule = {rule!r} can never read the references of {counts}, whose answers all score 0. For"
            f" example {shortened(example)}: {readers} can. Choose another rule or reward, or leave these tasks out"
        )
    return lines


def _overlap(held_out: list[Task], drawn: list[Task], num_failed: int) -> str:
    """Count held-out tasks with the words and the answer of a training task. The split compares keys (split.py); this
    differs on purpose, to reveal keys that are too fine."""
    known = set(map(_words_and_answer, drawn))
    both = sum(_words_and_answer(task) in known for task in held_out)
    sources = ", ".join(f"{name} {count}" for name, count in Counter(t.source for t in held_out).items())
    advice = " (tasks.sources.problem_key says what makes problems the same)" if both else ""
    failed = f"; {num_failed} problems beside these could not be made" if num_failed else ""
    return (
        f"{len(held_out)} held-out tasks ({sources}), of which {both} have the words and the answer of one of"
        f" {len(drawn):,} training tasks{advice}{failed}"
    )


def _words_and_answer(task: Task) -> tuple[str, ...]:
    """Return the answer and the sorted words, signs included."""
    return (str(answer_of(task.columns)), *sorted(re.findall(r"\w+|[^\w\s]", task.content.casefold())))
