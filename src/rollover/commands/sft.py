"""`rollover sft`: train on examples, as a start for `rollover train`. It is `rollover train` with algorithm.preset =
"sft"."""

from __future__ import annotations

import argparse

from rollover.commands.train import arguments, train
from rollover.commands.verb import Overrides, Verb


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    return train(args, overrides, supervised=True)


VERB = Verb("Train a model on examples (supervised fine-tuning).", run, arguments)
