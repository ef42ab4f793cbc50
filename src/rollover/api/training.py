"""`rollover.train`: a whole run in one call, from a script, a notebook's cell, or another event loop.

Owns in which thread and event loop a run goes on. What it trains is settings.py's and session.py's business.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from rollover.api.run import Run
from rollover.api.session import Session, finish
from rollover.api.settings import Arguments, Layer
from rollover.run.stop import signals_to

_SIGNAL_S = 0.5


def train(
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    tasks: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    config: Layer | Sequence[Layer] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> Run:
    """Train a model; returns the run, whose metrics, rollouts and model can then be looked at.

    model: a folder, a hub id or a known name (`model.path`), or a dict of the table [model].
    tasks: dicts with a prompt (a list, a `datasets.Dataset`, or an iterable without a length), or names: of
        reasoning-gym's generators, or of files (JSONL, Parquet, CSV).
    reward: a function with TRL's signature `f(prompts, completions, **columns)` or verl's, also a lambda or a closure;
        a name as `path.py:function` or `exact_match`; or a list of these, whose scores are summed.
    eval_tasks: held-out dicts, or a file; without them a share of `tasks` is held out (`tasks.eval_fraction`).
    config: a TOML file, a dict, or a list of both; later ones override earlier ones.
    resume: the directory of a run to go on with. Its settings are those of that run; functions and tasks that it was
        given as objects are given again.
    overrides: any key of the configuration: `num_steps=20` where one table alone has the name (or [run], [rollout]),
        `train={"num_steps": 20}`, or `**{"train.num_steps": 20}`. Where a key names a function, it itself may stand.

    Works inside a running event loop, too (a notebook): the run then has a thread of its own, for which this one waits.
    The first Ctrl-C (an interrupted cell) parks what is being generated and writes a checkpoint: the run that is
    returned says `finished` False, and `run.resume()` goes on. A second one raises KeyboardInterrupt. What fails
    raises; with anything to lose a checkpoint is written before. ConfigError (a ValueError) names the key and the fix.
    """
    return start(Arguments(model, tasks, reward, eval_tasks, config, resume, overrides))


async def train_async(
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    tasks: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    config: Layer | Sequence[Layer] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> Run:
    """As `train`, on the running event loop. A training step holds up the loop, unless rollout.overlap is on."""
    return await _trained(Arguments(model, tasks, reward, eval_tasks, config, resume, overrides))


def start(arguments: Arguments) -> Run:
    """`train`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_trained(arguments))
    session, live = _session(arguments)
    outcome: Future[None] = Future()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        await finish(session)

    def thread() -> None:
        try:
            asyncio.run(body())
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    # In the caller's context: a notebook shows what is printed below the cell that it belongs to.
    threading.Thread(target=contextvars.copy_context().run, args=(thread,), name="rollover.train").start()
    with signals_to(session.on_signal):
        try:
            while not outcome.done():  # Python looks at a signal that another thread got when this one wakes
                wait([outcome], timeout=_SIGNAL_S)
        except KeyboardInterrupt:
            for loop, task in running:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(task.cancel)
            raise
    outcome.result()
    return _run(session, live)


async def _trained(arguments: Arguments) -> Run:
    session, live = _session(arguments)
    await finish(session)
    return _run(session, live)


def _session(arguments: Arguments) -> tuple[Session, dict[str, Any]]:
    settings = arguments.settle()
    live = dict(settings.live)
    return Session.of(settings, arguments.resume is not None), live


def _run(session: Session, live: Mapping[str, Any]) -> Run:
    run = Run(session.directory, live)
    if not run.finished:
        print(run)
    return run
