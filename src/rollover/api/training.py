"""`rollover.train`, `rollover.sft` and `rollover.train_async`: a whole run in one call (session.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rollover.api.run import Run, after_training
from rollover.api.session import train_and_wait, train_here
from rollover.api.settings import Arguments, Layer


def train(
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    tasks: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    config: Layer | Sequence[Layer] | None = None,
    resume: str | os.PathLike[str] | None = None,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Train a model; returns the run, whose metrics, rollouts and model can then be looked at.

    - model: a folder, a hub id or a known name (`model.path`), or a dict of the table [model].
    - tasks: dicts with a prompt (a list, a `datasets.Dataset`, or an iterable without a length), or names: of
      reasoning-gym's generators, or of files (JSONL, Parquet, CSV).
    - reward: a function with TRL's signature `f(prompts, completions, **columns)` or verl's, also a lambda or closure;
      a name as `path.py:function` or `exact_match`; or a list of these, whose scores are summed.
    - eval_tasks: held-out dicts, or a file; without them a share of `tasks` is held out (`tasks.eval_fraction`).
    - config: a TOML file, a dict, or a list of both; later ones override earlier ones.
    - resume: the directory of a run to continue. Its settings are those of that run; functions and tasks that it was
      given as objects are given again. So are functions of files, programs and addresses that its configuration names.
    - trust: run what the configuration of `resume` names without that: the directory is your own, or you have read it.
    - overrides: any key of the configuration: `num_steps=20` where one table alone has the name (or [run], [rollout]),
      `train={"num_steps": 20}`, or `**{"train.num_steps": 20}`. Where a key names a function, it itself may stand.

    Works inside a running event loop, too (a notebook): the run then has a thread of its own, for which this one waits.
    The first Ctrl-C (an interrupted cell) parks what is being generated and writes a checkpoint: the run that is
    returned says `finished` False, and `run.resume()` goes on. A second one raises KeyboardInterrupt. What fails
    raises; with anything to lose a checkpoint is written before. ConfigError (a ValueError) names the key and the fix.
    """
    arguments = Arguments(model, tasks, reward, eval_tasks, config, resume, overrides, trust=trust)
    return after_training(*train_and_wait(arguments))


async def train_async(
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    tasks: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    config: Layer | Sequence[Layer] | None = None,
    resume: str | os.PathLike[str] | None = None,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Train on the running event loop (see `train`). A training step blocks the loop unless rollout.overlap is on."""
    arguments = Arguments(model, tasks, reward, eval_tasks, config, resume, overrides, trust=trust)
    return after_training(*await train_here(arguments))


def sft(  # noqa: PLR0913 - the arguments of the Python API
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    examples: Any = None,
    rollouts: str | os.PathLike[str] | None = None,
    tasks: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    config: Layer | Sequence[Layer] | None = None,
    resume: str | os.PathLike[str] | None = None,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Train a model on examples, as a start for `train`; returns the run, as `train` does.

    - examples: dicts with `messages` that end with the assistant's, a `prompt` and a `completion`, or a `text` (a list
      or a `datasets.Dataset`); or the name of a file of them (`sft.path`).
    - rollouts: the directory of a run whose recorded rollouts are examples (`sft.rollouts`): rejection sampling.
    - tasks, reward, eval_tasks: what is evaluated by generation, with num_tasks of [eval].

    All others are those of `train`; a keyword such as `epochs=2` or `batch_examples=16` means the key of [sft] first.
    """
    arguments = Arguments(
        model, tasks, reward, eval_tasks, config, resume, overrides, trust=trust, supervised=True, examples=examples,
        rollouts=rollouts,
    )  # fmt: skip
    return after_training(*train_and_wait(arguments))
