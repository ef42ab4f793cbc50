"""The hooks of the user's own (run.hooks): a class whose methods the loop calls, one after the other, at fixed places.

    on_train_start ──▶ (on_step_start ──▶ on_publish ──▶ on_step_end ──▶ on_evaluate) ... ──▶ on_train_end

Owns which methods there are and what becomes of one that fails: it ends the run, as every function of one's own does. A
tracker (track/tracker.py) keeps books, and is told again what a kill undid; a hook acts, and is called once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollover.config import Config
from rollover.functions import FunctionError, OwnFunction, own_function
from rollover.run import blocked_warning
from rollover.run.stop import Stop
from rollover.suggest import did_you_mean
from rollover.track.tracker import RunInfo

logger = logging.getLogger(__name__)

# Each hook, and the parameter that it is called with.
HOOKS = {
    "on_train_start": "run",
    "on_step_start": "step",
    "on_publish": "version",
    "on_step_end": "row",
    "on_evaluate": "row",
    "on_train_end": "error",
}
_KEY = "run.hooks"
_RETURNS = "without an error. Mend it, and go on with --resume"


class Hooks:
    """The hooks of one run; none where run.hooks is empty.

    ValueError where that names no class; FunctionError where it cannot be made, has no hook, a method `on_...` that is
    none, or one that does not take what it is called with.
    """

    def __init__(self, config: Config, stop: Stop) -> None:
        self.spec, self.watchdog, self.stop = config.run.hooks, config.watchdog, stop
        self._hooks: dict[str, OwnFunction] = {}
        if not self.spec:
            return
        make = own_function(_KEY, self.spec, f"an object with some of {', '.join(HOOKS)}")
        own = make()
        for name in (name for name in dir(own) if name.startswith("on_")):
            if name not in HOOKS:
                what = f"{type(own).__name__} with {name}, which is no hook{did_you_mean(name, HOOKS)}"
                raise make.refused(f"a {what}")
            self._hooks[name] = _checked(make, own, name)
        if not self._hooks:
            raise make.refused(f"a {type(own).__name__}, which has none")

    async def call(self, name: str, value: object) -> None:
        """Call this hook, if there is one, and wait for it; FunctionError where it fails.

        One that goes on after a stop was requested has watchdog.grace_s, if it awaits something: then it is cancelled,
        which is said.
        """
        hook = self._hooks.get(name)
        if hook is None:
            return
        what, grace_s = f"{_KEY} = {self.spec!r}: its {name}", self.watchdog.grace_s
        with blocked_warning.over_work(what, "called", self.watchdog.rollout_timeout_s):
            if not await self.stop.within(hook.awaited(value), grace_s):
                logger.warning(
                    f"{what} was cancelled, as it went on for {grace_s:g} s"
                    " (watchdog.grace_s) after the run was asked to stop"
                )

    @asynccontextmanager
    async def training(self, run: RunInfo) -> AsyncIterator[None]:
        """The block is between on_train_start and on_train_end, which comes after an error in it, too. That error is
        the one to be raised: beside it, what fails here is printed."""
        await self.call("on_train_start", run)
        try:
            yield
        except Exception as error:
            try:
                await self.call("on_train_end", error)
            except FunctionError as failure:
                logger.warning(str(failure))
            raise
        await self.call("on_train_end", None)


def _checked(make: OwnFunction, own: Any, name: str) -> OwnFunction:
    """The hook of this name. FunctionError where it is no method that takes one argument."""
    method = getattr(own, name)
    try:
        inspect.signature(method).bind(None)
    except TypeError as error:
        raise make.refused(f"a {type(own).__name__} whose {name} cannot be called as {name}({HOOKS[name]})") from error
    except ValueError:
        pass  # it is not written in Python, and has no signature
    return OwnFunction(method, _KEY, f"{make.spec}.{name}", _RETURNS)
