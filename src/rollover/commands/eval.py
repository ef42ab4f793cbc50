"""`rollover eval`: evaluate a model on held-out tasks."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.commands import Overrides, Verb, load, positive

if TYPE_CHECKING:
    from rollover.config import Config
    from rollover.run.evaluate import EvalAnswers

logger = logging.getLogger(__name__)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--answers",
        metavar="OUT",
        type=Path,
        help="write every answer, with task and score: OUT.md as a text to read, any other name as JSONL",
    )
    add(
        "--against",
        metavar="RECORDED",
        type=Path,
        help="compare with a recorded evaluation, by task: a JSONL file of --answers, or a run's folder (its newest)",
    )
    add("--worst", metavar="N", type=positive, default=0, help="print the N answers scored lowest")
    add("--model", metavar="DIR", help="model to evaluate in place of model.path")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    config = load(args.files, overrides).config
    from rollover.files import check_output_file, local_path
    from rollover.run.evaluate import summarize
    from rollover.shutdown import run_bounded
    from rollover.text import printable_lines
    from rollover.track.answers import print_worst, worst, write_answers
    from rollover.track.compare_evals import compare_answers, read_recorded

    if config.eval.num_tasks == 0:
        raise ValueError("eval.num_tasks = 0 means no evaluation: set it, for instance --eval.num_tasks 100")
    if args.answers is not None:
        check_output_file(args.answers, "--answers")
    recorded = None if args.against is None else read_recorded(args.against)  # before OUT may overwrite it
    logger.info(tasks_line(config))
    found = run_bounded(answers_to_all(config, args.model), config.watchdog.grace_s)
    answers = found.answers
    if args.answers is not None:  # before `summarize`, which fails if every reward failed
        write_answers(local_path(args.answers), answers)
    result, chosen = summarize(found, config), worst(answers, args.worst)
    comparisons = [] if recorded is None else compare_answers(answers, recorded)
    if args.json:
        result |= {"worst": [a.as_json() for a in chosen]} if args.worst else {}
        result |= {"against": [of.as_json() for of in comparisons]} if comparisons else {}
        print(json.dumps(result))
        return 0
    print_eval(result)
    for comparison in comparisons:
        print(printable_lines(f"against {args.against}: {comparison}"))
    print_worst(chosen)
    return 0


async def answers_to_all(config: Config, model: str | None) -> EvalAnswers:
    """Return scored answers of `model` (None: model.path) to the held-out tasks."""
    from rollover.run.evaluate import answer_tasks, held_out_tasks
    from rollover.run.setup import EvalComponents

    async with await EvalComponents.build(config, model) as components:
        assert components.environment is not None
        held_out = held_out_tasks(config, components.environment.prompt, components.engine.max_tokens)
        return await answer_tasks(
            held_out, components.engine, components.environment, components.tokenizer, config, components.stop_token_ids
        )


def tasks_line(config: Config) -> str:
    """Return the line about the tasks, as a run logs it. Invalid training tasks do not end an evaluation."""
    from rollover.tasks import report

    try:
        return report.tasks_line(config)
    except ValueError as error:
        return f"tasks: those for training cannot be looked at, so nothing is said of them here: {error}"


def print_eval(result: dict[str, Any]) -> None:
    """Print a table of mean reward, pass@k and maj@k with 95 % intervals.

    Rows: each file or generator, data_source and setting, and all tasks in the setting of [eval].
    """
    from rich.table import Table
    from rich.text import Text

    from rollover.track.console import new_console, shown
    from rollover.track.figures import with_interval
    from rollover.track.statistics import PER_K, parts_of

    console = new_console()
    rows = [*parts_of(result).items(), ("all", result)]
    names = list(dict.fromkeys(k for _, row in reversed(rows) for k in row if PER_K.fullmatch(k)))
    table = Table("source", "tasks", "mean reward", *names)
    for source, row in rows:
        cells = [with_interval(row.get(name), row.get(f"{name}_ci")) for name in names]
        mean = with_interval(row["mean"], row["ci"])
        table.add_row(Text(shown(source, console)), str(row["tasks"]), mean, *cells)
    console.print(table)
    if result.get("left_out"):
        console.print(Text(f"{result['left_out']} more tasks are left out: their prompts are too long"))


VERB = Verb("Evaluate on held-out tasks: mean reward, pass@1 and pass@k per source.", run, arguments)
