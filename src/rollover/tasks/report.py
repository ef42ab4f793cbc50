"""The line about the tasks that is printed before a run: how many rows repeat others or are held out, and how many
held-out tasks look like tasks that are trained. It changes nothing.
"""

from __future__ import annotations

import re
import time
from collections import Counter

from rollover.config import Config
from rollover.rewards.answers import answer_of
from rollover.tasks.stream import MAX_ROWS, TaskStream
from rollover.types import Task

_NUM_DRAWN = 1000
_LIMIT_S = 2.0  # some generators take 50 ms a problem


def tasks_line(config: Config, num_drawn: int = _NUM_DRAWN, limit_s: float = _LIMIT_S) -> str:
    """Rows and duplicates of each dataset, what is left out of training as it is held out, and how many held-out tasks
    have the words and the answer of one of the first `num_drawn` training tasks (as many as `limit_s` allows)."""
    trained = TaskStream(config.tasks, config.run.seed, "train", rewards=config.rewards)
    parts = _datasets(config, trained)
    if config.eval.num_tasks:
        held_out = TaskStream(config.tasks, config.eval.seed, "eval", rewards=config.rewards)
        tasks, wanted = held_out.take(config.eval.num_tasks), config.eval.num_tasks
        rest = f" (eval.num_tasks = {wanted}, but there are no more)" if len(tasks) < wanted else ""
        if num := held_out.num_on_neither_side:
            rest += f"; {num:,} more were held out, but are not evaluated: rows that are trained are the same"
        parts.append(_overlap(tasks, trained, num_drawn, limit_s) + rest)
    return "tasks: " + "; ".join(parts) if parts else ""


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


def _overlap(held_out: list[Task], trained: TaskStream, num_drawn: int, limit_s: float) -> str:
    """Held-out tasks with the words and the answer of a training task. The split compares keys (same.py); this compares
    something else on purpose, so that keys which are too fine are seen."""
    started, drawn = time.monotonic(), set()
    num = 0
    while num < num_drawn and time.monotonic() - started < limit_s and (task := trained.next()) is not None:
        drawn.add(_words_and_answer(task))
        num += 1
    both = sum(_words_and_answer(task) in drawn for task in held_out)
    sources = ", ".join(f"{name} {count}" for name, count in Counter(t.source for t in held_out).items())
    advice = " (tasks.sources.problem_key says what makes problems the same)" if both else ""
    failed = f"; {trained.num_failed} problems beside these could not be made" if trained.num_failed else ""
    return (
        f"{len(held_out)} held-out tasks ({sources}), of which {both} have the words and the answer of one of {num:,}"
        f" training tasks{advice}{failed}"
    )


def _words_and_answer(task: Task) -> tuple[str, ...]:
    """The answer and the words, signs included, without regard to the order of the words."""
    return (str(answer_of(task.columns)), *sorted(re.findall(r"\w+|[^\w\s]", task.content.casefold())))
