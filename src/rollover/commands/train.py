"""`rollover train`, `rollover sft` (algorithm.preset = "sft") and `rollover demo` (the recipe quickstart)."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator
from functools import partial

from rollover.commands import Overrides, Verb, load
from rollover.std_streams import keep_streams, report_lost_output


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run in run.dir from its newest checkpoint")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration and print which process would be on which node; load no model",
    )


def run(args: argparse.Namespace, overrides: Overrides, *, supervised: bool = False) -> int:
    """Train, on examples if `supervised` (`rollover sft`). Return the exit code."""
    keep_streams()  # a lost line of output must not end a run
    try:
        return _run(args, overrides, supervised)
    finally:
        report_lost_output()


def _run(args: argparse.Namespace, overrides: Overrides, supervised: bool) -> int:
    resolved = load(args.files, overrides, supervised=supervised)
    name = resolved.config.checkpoint.resume_from
    if name and not args.resume:
        raise ValueError(f'checkpoint.resume_from = "{name}" has no effect without --resume: add it, or remove the key')
    if args.dry_run:
        from rollover.cluster.report import as_text
        from rollover.system import cores

        print(as_text(resolved.config, cores()), end="")
        return 0
    with _interrupt_held():
        from rollover.api.session import run_training

    command = [*map(str, args.files), *(f"--{key}={value}" for key, value in overrides)]
    return run_training(resolved, args.resume, command)


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Delay a Ctrl-C to the end of the block: within an import it may be lost, as Python ignores errors in callbacks of
    weak references, which locks of modules have."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_demo(args: argparse.Namespace, overrides: Overrides) -> int:
    """Train with the recipe quickstart. Return the exit code."""
    from rollover.config.recipes import QUICKSTART, word_for

    args.files, args.resume, args.dry_run = [word_for(QUICKSTART)], False, False
    return run(args, overrides)


VERB = Verb("Train a model.", run, arguments)
SFT = Verb("Train a model on examples (supervised fine-tuning).", partial(run, supervised=True), arguments)
DEMO = Verb("Train a small model on easy arithmetic, on a CPU too: the recipe quickstart.", run_demo, files="")
