"""`rollover train`: train a model, or go on with a run."""

from __future__ import annotations

import argparse

from rollover.commands.verb import Overrides, Verb, load


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run in run.dir from its newest checkpoint")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration and print which process would be on which node; load no model",
    )


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    resolved = load(args.files, overrides)
    name = resolved.config.checkpoint.resume_from
    if name and not args.resume:
        raise ValueError(f'checkpoint.resume_from = "{name}" has no effect without --resume: add it, or remove the key')
    if args.dry_run:
        from rollover.cluster.report import as_text
        from rollover.system import cores

        print(as_text(resolved.config, cores()), end="")
        return 0
    from rollover.api.session import run_training

    command = [*map(str, args.files), *(f"--{key}={value}" for key, value in overrides)]
    return run_training(resolved, args.resume, command)


VERB = Verb("Train a model.", run, arguments)
