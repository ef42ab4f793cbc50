"""`rollover.Engine`: inference with the engine of training, in a thread with its own event loop.

So `generate` works in a script, in a cell of a notebook and inside another event loop. run/sample.py samples.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from rollover.api.settings import Arguments, Layer
from rollover.config import Config
from rollover.run.sample import answer_prompt
from rollover.run.setup import EvalComponents
from rollover.types import StopReason

Result = TypeVar("Result")
Prompt = str | Sequence[Mapping[str, Any]]  # a text, or chat messages, perhaps with images


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer to `prompt`. logprobs: of each token of token_ids, under the distribution that it was sampled from."""

    prompt: Prompt
    text: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


class Engine:
    """A model that answers prompts; as a context manager, or until `close`.

    `model` and the keywords are those of `rollover.train`; of the configuration [model], [engine], [rollout]'s sampling
    and run.seed act. ConfigError where one is wrong, ValueError for a model that cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        config: Layer | Sequence[Layer] | None = None,
        **overrides: Any,
    ) -> None:
        self._settings = Arguments(model=model, config=config, overrides=overrides).settle(require_sources=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollover.Engine", daemon=True)
        self._thread.start()
        self._components: EvalComponents | None = None
        try:
            self._components = self._submit(EvalComponents.build(self.config, None, with_rewards=False)).result()
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> Config:
        """The configuration of the engine."""
        return self._settings.config

    def generate(self, prompts: str | Sequence[Prompt], *, num: int = 1) -> list[Completion]:
        """`num` answers to each prompt (a text, or a list of chat messages): those of the first prompt come first.

        All are generated together. The same seed, prompts and threads give the same answers. ValueError for a prompt
        that leaves no room for an answer of `rollout.max_new_tokens`.
        """
        return self._submit(self._answers(_listed(prompts), num)).result()

    async def generate_async(self, prompts: str | Sequence[Prompt], *, num: int = 1) -> list[Completion]:
        """`generate`, awaited; several calls at the same time share the engine's batches."""
        return await asyncio.wrap_future(self._submit(self._answers(_listed(prompts), num)))

    def close(self) -> None:
        """Free the model. Later calls raise RuntimeError."""
        if self._loop.is_closed():
            return
        if self._components is not None:
            self._submit(self._components.close()).result()
            self._components = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._settings.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _answers(self, prompts: Sequence[Prompt], num: int) -> list[Completion]:
        components = self._components
        assert components is not None
        answers = await asyncio.gather(*(answer_prompt(prompt, num, components, self.config) for prompt in prompts))
        return [Completion(p, **vars(answer)) for p, of_one in zip(prompts, answers, strict=True) for answer in of_one]

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this Engine is closed: make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _listed(prompts: str | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list; one list of messages is one prompt. ValueError for an invalid prompt."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(isinstance(p, Mapping) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    for prompt in prompts:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt)
        ):
            raise ValueError(f"a prompt is a {type(prompt).__name__}: expected a text, or a list of chat messages")
    return prompts
