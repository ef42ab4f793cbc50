"""`rollover demo`: train with the recipe quickstart."""

from __future__ import annotations

import argparse

from rollover.commands import train
from rollover.commands.verb import Overrides, Verb


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.config.recipes import QUICKSTART, word_for

    args.files, args.resume, args.dry_run = [word_for(QUICKSTART)], False, False
    return train.run(args, overrides)


VERB = Verb("Train a small model on easy arithmetic, on a CPU too: the recipe quickstart.", run, files="")
