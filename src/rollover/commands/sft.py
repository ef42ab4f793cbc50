"""`rollover sft`: train on examples, as a start for `rollover train`. It is `rollover train` with algorithm.preset =
"sft"."""

from __future__ import annotations

from functools import partial

from rollover.commands.train import arguments, run
from rollover.commands.verb import Verb

VERB = Verb("Train a model on examples (supervised fine-tuning).", partial(run, supervised=True), arguments)
