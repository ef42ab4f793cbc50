"""`rollover sample`: print what the model answers to a prompt, or whole episodes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rollover.commands.verb import Overrides, Verb, load, positive, to_stderr

if TYPE_CHECKING:
    from rollover.config import Config
    from rollover.run.answer_prompt import Answered
    from rollover.types import Task


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="what to ask; without it episodes have the first task of the configuration")
    add("--columns", metavar="JSON", type=columns, help='what else the task of an episode has, as \'{"answer": "12"}\'')
    add("--num", metavar="N", type=positive, default=1, help="number of answers or episodes (default: 1)")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    config = load(args.files, overrides, require_sources=False).config
    from rollover.ending import run_bounded
    from rollover.track.shown import printable_lines

    workflow, grace_s = config.workflow, config.watchdog.grace_s
    if workflow.agent or workflow.environment or config.rollout.environment != "single_turn":
        texts = run_bounded(episodes(config, args.prompt, args.columns or {}, args.num), grace_s)
    elif args.prompt is None or args.columns is not None:
        raise ValueError("a run of single turns is asked with --prompt TEXT, and without --columns: nothing is scored")
    else:
        texts = [answer.text for answer in run_bounded(answers(config, args.prompt, args.num), grace_s)]
    if sys.stdout.isatty():  # what is piped stays as it is
        texts = [printable_lines(text) for text in texts]
    for i, text in enumerate(texts):
        print(f"--- {i + 1} of {args.num}" if args.num > 1 else "", text, sep="\n" if args.num > 1 else "")
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


async def episodes(config: Config, prompt: str | None, given: dict[str, Any], num: int) -> list[str]:
    """`num` episodes of a task, sampled as [rollout] says, to be read. `given`: columns of the task beside its prompt.

    ValueError where there is neither a prompt nor a task.
    """
    from rollover.run.eval_parts import EvalParts
    from rollover.run.playing import Playing
    from rollover.run.transcript import transcript
    from rollover.tasks.prompts import encoder
    from rollover.trajectories import episodes_of
    from rollover.types import SamplingParams

    task, rollout = task_of(config, prompt, given), config.rollout
    parts = await EvalParts.build(config, None)
    try:
        assert parts.environment is not None
        sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
        seed, stops = config.run.seed, parts.stop_token_ids
        playing = Playing(parts.engine, parts.environment, config, stops, sampling, seed, num, to_stderr)
        prompt_ids = encoder(parts.tokenizer, parts.environment)(task)
        group = await playing.unless_it_stalls(playing.play(-1, task, prompt_ids, num))
        return [transcript(episode, parts.tokenizer) for episode in episodes_of(group)]
    finally:
        await parts.close()


def task_of(config: Config, prompt: str | None, given: dict[str, Any]) -> Task:
    """The first task that training has; or one with this prompt and these columns, scored as those are."""
    from rollover.tasks.stream import TaskStream, decorated
    from rollover.types import Task

    if not config.tasks.sources and prompt is None:
        raise ValueError("there is no task: set [[tasks.sources]], or give one by --prompt and --columns")
    first = (
        TaskStream(config.tasks, config.run.seed, "train", rewards=config.rewards).next()
        if config.tasks.sources
        else None
    )
    if prompt is None:
        assert first is not None
        return first
    reward = "" if first is None else first.reward
    return decorated(Task("sample", "sample", reward, prompt=prompt, columns=given), config.tasks)


def columns(text: str) -> dict[str, Any]:
    """An argument's type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object of columns")
    return value


VERB = Verb("Print what the model answers to a prompt, or whole episodes of a task.", run, arguments)
