"""`rollover sample`: print answers to a prompt, whole episodes, or continuations of a recorded rollout."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.commands import Overrides, Verb, load, positive

if TYPE_CHECKING:
    from rollover.config import Config
    from rollover.run.sample import BranchPoint, Continuation, SampledAnswer
    from rollover.types import Task

logger = logging.getLogger(__name__)

TRUST = "run the functions and programs, and use the addresses, that the configuration of RUN_DIR names"

# With --from only an engine and a model are built: no rewards, no environment, no training.
UNUSED = (
    "rewards.", "tasks.", "workflow.", "filters.", "algorithm.", "distill.", "critic.", "track.", "run.",
    "rollout.order", "rollout.environment",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="what to ask; without it episodes have the first task of the configuration")
    add("--columns", metavar="JSON", type=columns, help='what else the task of an episode has, as \'{"answer": "12"}\'')
    add("--num", metavar="N", type=positive, default=1, help="number of answers or episodes (default: 1)")
    add(
        "--from",
        dest="place",
        nargs=2,
        metavar=("RUN_DIR", "STEP/ID[:TOKEN]"),
        help="continue this rollout of a run after its first TOKEN tokens (default: 0), with the run's own"
        " configuration and its newest weights, and print the log-prob of each token that comes",
    )
    add("--model", metavar="DIR", help="with --from: continue with this model in place of the run's newest weights")
    add("--trust", action="store_true", help=f"with --from: {TRUST}")
    add("--json", action="store_true", help="with --from: print JSON")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    if args.place is not None:
        return run_from(args, overrides)
    if not args.files or args.model or args.json or args.trust:
        raise ValueError("give FILE.toml, or a rollout of a run by --from, to which --model, --trust and --json belong")
    config = load(args.files, overrides, require_sources=False).config
    from rollover.shutdown import run_bounded
    from rollover.text import printable_lines

    workflow, grace_s = config.workflow, config.watchdog.grace_s
    if workflow.agent or workflow.environment or config.rollout.environment != "single_turn":
        texts = run_bounded(episodes(config, args.prompt, args.columns or {}, args.num), grace_s)
    elif args.prompt is None or args.columns is not None:
        raise ValueError("a run of single turns is asked with --prompt TEXT, and without --columns: nothing is scored")
    else:
        texts = [answer.text for answer in run_bounded(answers(config, args.prompt, args.num), grace_s)]
    if sys.stdout.isatty():  # piped output stays as it is
        texts = [printable_lines(text) for text in texts]
    for i, text in enumerate(texts):
        print(f"--- {i + 1} of {args.num}" if args.num > 1 else "", text, sep="\n" if args.num > 1 else "")
    return 0


def run_from(args: argparse.Namespace, overrides: Overrides) -> int:
    """Continue a rollout of a run (--from)."""
    from rollover.api.settings import settings_of_run
    from rollover.config.load import load_config
    from rollover.config.trust import OfRun
    from rollover.files import local_path
    from rollover.images import media_kept_in
    from rollover.processes import prepare_libraries
    from rollover.run.sample import Weights, continue_from, newest_weights
    from rollover.shutdown import run_bounded

    if args.prompt is not None or args.columns is not None:
        raise ValueError("--from has the prompt of its rollout: leave --prompt and --columns out")
    directory = Path(args.place[0]).expanduser()
    place = branch_point_of(directory, args.place[1])
    of_run = OfRun(settings_of_run(directory, "--from"), str(directory), args.trust, "--from", "--trust", {}, UNUSED)
    config = load_config([of_run, *args.files], overrides, require_sources=False).config
    prepare_libraries(config.run)
    weights = Weights(args.model, args.model) if args.model else newest_weights(config, directory)
    logger.info(f"with {weights.description}, after {place.kept} of {place.record['num_tokens']} tokens")
    with media_kept_in(local_path(directory) / "media"):
        found = run_bounded(continue_from(place, args.num, weights, config, directory), config.watchdog.grace_s)
    if args.json:
        print(json.dumps([asdict(of) for of in found]))
        return 0
    for number, of in enumerate(found):
        if args.num > 1:
            print(f"--- {number + 1} of {args.num}")
        print_continuation(of, place.kept)
    return 0


def branch_point_of(directory: Path, text: str) -> BranchPoint:
    """Return the branch point STEP/ID[:TOKEN]. ValueError where there is none."""
    from rollover.run.run_files import RunFiles
    from rollover.run.sample import BranchPoint
    from rollover.track.records import records_of, step_files

    match = re.fullmatch(r"(\d+)/(\d+-\d+(?:\.\d+\.\d+)?)(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"--from: {text!r} names no rollout: write STEP/ID, or STEP/ID:TOKEN, as 12/40-3:57")
    files = [file.path for file in step_files(RunFiles(directory).recorded) if file.step == int(match[1])]
    records = (record for path in files for record in records_of(path))
    found = next((record for record in records if record["rollout_id"] == match[2]), None)
    if found is None:
        raise ValueError(f"--from: no rollout {match[2]} left the run in {directory} with step {match[1]}")
    return BranchPoint(found, int(match[3] or 0))


def print_continuation(found: Continuation, kept: int) -> None:
    """Print the kept text, the new text, and each new token."""
    from rollover.text import printable_lines

    print(f"kept: {printable_lines(found.kept)}\nthen: {printable_lines(found.text)}\nends by {found.stop_reason}")
    for number, (of, logprob, piece) in enumerate(
        zip(found.token_ids, found.logprobs, found.pieces, strict=True), start=kept
    ):
        print(f"{number:>7} {of:>7} {logprob:>9.4f}  {json.dumps(piece, ensure_ascii=True)}")


async def answers(config: Config, prompt: str, num: int) -> list[SampledAnswer]:
    """Return `num` answers to the prompt, with an engine built for them."""
    from rollover.run.sample import answer_prompt
    from rollover.run.setup import EvalComponents

    async with await EvalComponents.build(config, None, with_rewards=False) as components:
        return await answer_prompt(prompt, num, components, config)


async def episodes(config: Config, prompt: str | None, given: dict[str, Any], num: int) -> list[str]:
    """Return the transcripts of `num` episodes of a task. `given`: columns of the task beside its prompt.

    ValueError where there is neither a prompt nor a task.
    """
    from rollover.envs.chat import answer_decoder
    from rollover.run.evaluate import play_groups
    from rollover.run.sample import transcript
    from rollover.run.setup import EvalComponents
    from rollover.trajectories import episodes_of

    task, rollout = task_of(config, prompt, given), config.rollout
    async with await EvalComponents.build(config, None) as components:
        assert components.environment is not None
        seed, stops = config.run.seed, components.stop_token_ids
        encoded = components.environment.prompt(task)
        [group] = await play_groups(
            [(task, encoded)], components.engine, components.environment, config, stops, seed, num
        )
        decode = answer_decoder(components.tokenizer, rollout.keep_special_tokens)
        return [transcript(episode, decode) for episode in episodes_of(group)]


def task_of(config: Config, prompt: str | None, given: dict[str, Any]) -> Task:
    """Return the first training task, or one with this prompt and these columns and the same reward."""
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
    """Parse an argument: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object of columns")
    return value


VERB = Verb(
    "Print what the model answers to a prompt, whole episodes of a task, or how a recorded rollout continues.",
    run,
    arguments,
    files="*",
)
