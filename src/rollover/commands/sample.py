"""`rollover sample`: print what the model answers to a prompt."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rollover.commands.verb import Overrides, Verb, load, positive

if TYPE_CHECKING:
    from rollover.config import Config
    from rollover.run.answer_prompt import Answered


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="what to ask")
    parser.add_argument("--num", metavar="N", type=positive, default=1, help="number of answers (default: 1)")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    config = load(args.files, overrides, require_sources=False).config
    if config.workflow.environment:
        raise ValueError(
            f"workflow.environment = {config.workflow.environment!r} is reset with the columns of a task, and a prompt"
            " has none: see whole episodes with rollover eval FILE --worst 3, or remove it to see a first turn"
        )
    from rollover.ending import run_bounded

    found = run_bounded(answers(config, args.prompt, args.num), config.watchdog.grace_s)
    for i, answer in enumerate(found):
        print(f"--- {i + 1} of {args.num}" if args.num > 1 else "", answer.text, sep="\n" if args.num > 1 else "")
    return 0


async def answers(config: Config, prompt: str, num: int) -> list[Answered]:
    """`num` answers to the prompt, of an engine that is built for them alone."""
    from rollover.run.answer_prompt import answer_prompt
    from rollover.run.eval_parts import EvalParts

    parts = await EvalParts.build(config, None, with_rewards=False)
    try:
        return await answer_prompt(prompt, num, parts, config)
    finally:
        await parts.close()


VERB = Verb("Print what the model answers to a prompt.", run, arguments)
