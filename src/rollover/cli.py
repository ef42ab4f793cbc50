"""The command line: verbs, overrides, exit codes. Imports what a verb needs when the verb runs.

Owns how arguments are read and how an error becomes a message and an exit code. Never does a verb's work itself:

    0  done            1  failed (traceback, or a message: full disk, dead engine)
    2  your input      130  Ctrl-C

Set ROLLOVER_TRACEBACK=1 to see the traceback of an exit 2.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rollover
from rollover import system

if TYPE_CHECKING:
    from rollover.config.load import Resolved

Overrides = list[tuple[str, str]]

# --table.key, --table.key=VALUE. Everything else is argparse's.
_DOTTED = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
_OVERRIDES = "Any key of the configuration can be set as --table.key VALUE, for instance --train.num_steps 5."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code. argparse itself exits (0 for --help, 2 for wrong arguments)."""
    if reason := system.refusal():
        _complain(reason)
        return 2
    parser = build_parser()
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv, parser)
    args = parser.parse_args(rest)
    try:
        return args.verb(args, overrides)
    except KeyboardInterrupt:
        print("rollover: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) went away: nothing is left to say, and the exit must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        if os.environ.get("ROLLOVER_TRACEBACK"):
            traceback.print_exc()
        _complain(error)
        return 2
    except (OSError, RuntimeError) as error:
        if not _is_of_the_machine(error):
            raise
        _complain(error)
        return 1


def split_overrides(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], Overrides]:
    """Takes `--table.key VALUE` and `--table.key=VALUE` out of the arguments: (the rest, overrides in order)."""
    rest: list[str] = []
    overrides: Overrides = []
    tokens = iter(argv)
    for token in tokens:
        match = _DOTTED.fullmatch(token)
        if match is None:
            rest.append(token)
            continue
        key, value = match[1], match[2]
        if value is None:
            value = next(tokens, None)
            if value is None or value.startswith("--"):
                parser.error(f"--{key} needs a value: --{key} VALUE (or --{key}=VALUE if the value starts with --)")
        overrides.append((key, value))
    return rest, overrides


class _Verb(argparse.ArgumentParser):
    """One verb's arguments. An option that there is not is told first: what it was meant to give is missing."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        options = [*re.findall(r"--[a-z-]+", self.format_usage()), "--help"]
        words = list(itertools.takewhile(lambda word: word != "--", args or ()))
        flags = [word.partition("=")[0] for word in words if word.startswith("--") and " " not in word]
        unknown = [flag for flag in flags if flag not in options]
        if not unknown:
            namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from rollover.config.suggest import unknown_flags

            self.error(unknown_flags(unknown, options, keys=self.epilog == _OVERRIDES))
        return namespace, unknown


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their options. Each verb's function is `args.verb(args, overrides) -> exit code`."""
    parser = argparse.ArgumentParser(
        prog="rollover",
        description="Train language models by reinforcement learning with resumable rollouts.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rollover {rollover.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Verb)

    def verb(
        name: str, run, about: str, *, files: str | None = "+", epilog: str | None = _OVERRIDES
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=about, description=about, epilog=epilog, allow_abbrev=False)
        sub.set_defaults(verb=run)
        if files:
            text = "configuration, or the name of a recipe (rollover init --list); later ones override earlier ones"
            sub.add_argument("files", nargs=files, metavar="FILE.toml", type=Path, help=text)
        return sub

    train = verb("train", _train, "Train a model.")
    train.add_argument("--resume", action="store_true", help="continue the run in run.dir from its newest checkpoint")

    verb("demo", _demo, "Train a small model on easy arithmetic, on a CPU too: the recipe quickstart.", files=None)

    init = verb("init", _init, "Write a recipe as a file of your own, every key explained.", files=None, epilog=None)
    init.add_argument("name", nargs="?", metavar="NAME", default="", help="which recipe (default: quickstart)")
    init.add_argument("file", nargs="?", metavar="FILE.toml", default="", help="what to write (default: NAME.toml)")
    init.add_argument("--list", action="store_true", help="print the names of all recipes, and write nothing")

    evaluate = verb("eval", _eval, "Evaluate on held-out tasks: mean reward, pass@1 and pass@k per source.")
    evaluate.add_argument("--answers", metavar="OUT.jsonl", type=Path, help="write every answer, with task and score")
    evaluate.add_argument("--worst", metavar="N", type=_positive, default=0, help="print the N answers scored lowest")
    evaluate.add_argument("--model", metavar="DIR", help="model to evaluate in place of model.path")
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    sample = verb("sample", _sample, "Print what the model answers to a prompt.")
    sample.add_argument("--prompt", metavar="TEXT", required=True, help="what to ask")
    sample.add_argument("--num", metavar="N", type=_positive, default=1, help="number of answers (default: 1)")

    config = verb("config", _config, "Print the resolved configuration, with the doc of every key.", files="*")
    form = config.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON without docs")
    form.add_argument("--schema", action="store_true", help="print the JSON schema of a file; needs no FILE.toml")

    plan = verb("plan", _plan, "Predict speed, idleness, staleness and waste of a configuration, without running it.")
    plan.add_argument("--from-run", metavar="DIR", type=Path, help="take lengths and speeds from this run's directory")
    plan.add_argument("--devices", metavar="N", type=_positive, help="engines and trainers together")
    plan.add_argument("--engines", metavar="N", type=_positive, help="in place of plan.engines")
    plan.add_argument("--trainers", metavar="N", type=_positive, help="in place of plan.trainers")
    plan.add_argument("--steps", metavar="N", type=_positive, help="in place of plan.steps")
    plan.add_argument(
        "--rollouts-per-engine", metavar="N", type=_positive, help="rollouts that a step trains, for each engine"
    )
    plan.add_argument("--svg", metavar="OUT.svg", type=Path, help="draw the first steps, synchronous training above")
    plan.add_argument("--json", action="store_true", help="print JSON")

    trace = verb("trace", _trace, "Show what happened in a run, and when.", files=None, epilog=None)
    trace.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", type=Path, help="a run's directory; the SVG takes two")
    trace.add_argument("--perfetto", metavar="OUT.json", type=Path, help="write one run for ui.perfetto.dev")
    trace.add_argument("--svg", metavar="OUT.svg", type=Path, help="draw the runs, one above the other")

    bench = verb("bench", _bench, "Measure engine, trainer, whole steps, long tails or growth.", files=None)
    bench.add_argument("what", choices=("engine", "train", "step", "tail", "scale"), help="what to measure")
    bench.add_argument("--json", action="store_true", help="print JSON")
    return parser


# Verbs


def _train(args: argparse.Namespace, overrides: Overrides) -> int:
    resolved = _load(args.files, overrides)
    name = resolved.config.checkpoint.resume_from
    if name and not args.resume:
        raise ValueError(f'checkpoint.resume_from = "{name}" has no effect without --resume: add it, or remove the key')
    from rollover.api.session import run_training

    command = [*map(str, args.files), *(f"--{key}={value}" for key, value in overrides)]
    return run_training(resolved, args.resume, command)


def _demo(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.config.recipes import QUICKSTART, word_for

    args.files, args.resume = [word_for(QUICKSTART)], False
    return _train(args, overrides)


def _init(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.config import recipes
    from rollover.config.starter import write_starter

    if overrides:
        raise ValueError(f"rollover init writes a recipe as it is: leave out --{overrides[0][0]}, and edit the file")
    if args.list:
        for name, path in recipes.recipes().items():
            print(f"{name:18} {recipes.about(path)}")
        return 0
    name, file = args.name, args.file
    if not file and name.endswith(".toml"):
        name, file = "", name
    name = name or recipes.QUICKSTART
    target = Path(file or f"{name}.toml")
    write_starter(name, target)
    print(f"wrote {target}; to train with it: rollover train {shlex.quote(str(target))}")
    return 0


def _eval(args: argparse.Namespace, overrides: Overrides) -> int:
    resolved = _load(args.files, overrides)
    from rollover.run.evaluate import run_eval

    return run_eval(resolved, args.model, args.json, args.answers, args.worst)


def _sample(args: argparse.Namespace, overrides: Overrides) -> int:
    resolved = _load(args.files, overrides, require_sources=False)
    from rollover.run.evaluate import run_sample

    return run_sample(resolved, args.prompt, args.num)


def _config(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.config import describe

    if args.schema:
        print(describe.schema(), end="")
        return 0
    if not args.files:
        raise ValueError("rollover config needs a FILE.toml (or --schema)")
    resolved = _load(args.files, overrides, require_sources=False)
    print(describe.as_json(resolved) if args.json else describe.as_toml(resolved), end="")
    return 0


def _plan(args: argparse.Namespace, overrides: Overrides) -> int:
    resolved = _load(args.files, overrides, require_sources=False)
    from rollover.sim.main import run_plan

    return run_plan(resolved, args)


def _trace(args: argparse.Namespace, overrides: Overrides) -> int:
    if overrides:
        raise ValueError(f"rollover trace reads no configuration: leave out --{overrides[0][0]}")
    from rollover.track.show import show_traces

    return show_traces(args.run_dirs, args.perfetto, args.svg)


def _bench(args: argparse.Namespace, overrides: Overrides) -> int:
    # Measured alone, beside peers: all threads, which wait as the library does.
    resolved = _load([], [("run.threads", "0"), *overrides], require_sources=False)
    from rollover.bench import main as run_bench

    return run_bench(args.what, resolved.config, as_json=args.json)


def _load(files: list[Path], overrides: Overrides, *, require_sources: bool = True) -> Resolved:
    from rollover.config.load import load_config
    from rollover.processes import prepare_libraries

    resolved = load_config(files, overrides, require_sources=require_sources)
    for notice in resolved.notices:
        print(f"rollover: notice: {notice}", file=sys.stderr)
    prepare_libraries(resolved.config.run)
    return resolved


# Errors


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _is_of_the_machine(error: Exception) -> bool:
    """A full or broken disk, a checkpoint that could not be written, an engine process that was killed: the message
    alone lets the user act."""
    from rollover.checkpoint.store import CheckpointWriteError
    from rollover.engine.protocol import EngineDied

    if isinstance(error, CheckpointWriteError | EngineDied):
        return True
    of_disk = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    return isinstance(error, OSError) and error.errno in of_disk


def _complain(error: Exception | str) -> None:
    print(f"rollover: error: {error}", file=sys.stderr)
