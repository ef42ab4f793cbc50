"""User hooks (run.hooks): a class whose methods the loop calls at fixed points.

    on_train_start ──▶ (on_step_start ──▶ on_publish ──▶ on_step_end ──▶ on_evaluate) ... ──▶ on_train_end

A hook that fails ends the run, like every user function. A hook is called once; a tracker (track/tracker.py) gets again
the steps that a kill undid.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollover.config import Config
from rollover.functions import CustomFunction, FunctionError, custom_function
from rollover.run import blocked_warning
from rollover.run.stop import Stop
from rollover.suggest import did_you_mean
from rollover.track.tracker import RunInfo

logger = logging.getLogger(__name__)

# Hook -> name of its parameter.
HOOKS = {
    "on_train_start": "run",
    "on_step_start": "step",
    "on_publish": "version",
    "on_step_end": "row",
    "on_evaluate": "row",
    "on_train_end": "error",
}
_KEY = "run.hooks"
_RETURNS = "without an error. Fix it, and resume with --resume"


class Hooks:
    """The hooks of one run; none where run.hooks is empty.

    ValueError where it names no class; FunctionError where the class cannot be made, has no hook, an unknown method
    `on_...`, or one that does not take one argument.
    """

    def __init__(self, config: Config, stop: Stop) -> None:
        self.spec, self.watchdog, self.stop = config.run.hooks, config.watchdog, stop
        self._hooks: dict[str, CustomFunction] = {}
        if not self.spec:
            return
        make = custom_function(_KEY, self.spec, f"an object with some of {', '.join(HOOKS)}")
        own = make()
        for name in (name for name in dir(own) if name.startswith("on_")):
            if name not in HOOKS:
                what = f"{type(own).__name__} with {name}, which is no hook{did_you_mean(name, HOOKS)}"
                raise make.refused(f"a {what}")
            self._hooks[name] = _checked(make, own, name)
        if not self._hooks:
            raise make.refused(f"a {type(own).__name__}, which has none")

    async def call(self, name: str, value: object) -> None:
        """Call the hook `name`, if there is one, and wait for it; FunctionError where it fails.

        After a stop is requested, an awaiting hook has watchdog.grace_s; then it is cancelled, which is logged.
        """
        hook = self._hooks.get(name)
        if hook is None:
            return
        what, grace_s = f"{_KEY} = {self.spec!r}: its {name}", self.watchdog.grace_s
        with blocked_warning.over_work(what, "called", self.watchdog.rollout_timeout_s):
            if not await self.stop.within(hook.awaited(value), grace_s):
                logger.warning(
                    f"{what} was cancelled, as it ran for {grace_s:g} s"
                    " (watchdog.grace_s) after the run was asked to stop"
                )

    @asynccontextmanager
    async def training(self, run: RunInfo) -> AsyncIterator[None]:
        """Call on_train_start before the block and on_train_end after it, also after an error in the block.

        That error is raised; one of on_train_end is then only logged.
        """
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


def _checked(make: CustomFunction, own: Any, name: str) -> CustomFunction:
    """Return the hook of this name. FunctionError where it does not take one argument."""
    method = getattr(own, name)
    try:
        inspect.signature(method).bind(None)
    except TypeError as error:
        raise make.refused(f"a {type(own).__name__} whose {name} cannot be called as {name}({HOOKS[name]})") from error
    except ValueError:
        pass  # not written in Python: no signature
    return CustomFunction(method, _KEY, f"{make.spec}.{name}", _RETURNS)
