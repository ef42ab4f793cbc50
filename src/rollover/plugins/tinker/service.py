"""Session at a Tinker-compatible service, through its SDK: training clients and sampling clients.

Owns the connection, timeouts, retries and error messages. The SDK itself retries connection errors, 408, 409, 429 and
5xx for five minutes under the first request's number, so that the service does nothing twice. This module bounds the
total time and retries requests that change nothing. The key comes from the environment, and no message contains it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from rollover.config import Config
from rollover.engine.protocol import ServiceError

if TYPE_CHECKING:
    import tinker

Result = TypeVar("Result")
KEY = "TINKER_API_KEY"
_TRIES = 3
_SAMPLER_TTL_S = 7 * 24 * 3600  # weights to sample with are not needed for longer than a few steps


class TinkerSession:
    """One session at the service of `config`. Every method raises ServiceError when the service fails.

    Raises ValueError if the SDK or the key is missing.
    """

    def __init__(self, config: Config) -> None:
        self.config, self._key = config.backend, os.environ.get(KEY, "")
        if not self._key:
            raise ValueError(f'backend.type = "tinker" needs the key of the service: set {KEY} in the environment')
        os.environ["TINKER_TELEMETRY"] = "0"
        try:
            import tinker
        except ImportError as error:
            raise ValueError('backend.type = "tinker" needs the SDK: pip install "rollover[tinker]"') from error
        self.sdk: Any = tinker
        self.base_model = self.config.base_model or config.model.path
        self._client: tinker.ServiceClient = tinker.ServiceClient(base_url=self.config.url or None, api_key=self._key)
        opening = _in_thread(lambda: self._client.holder)  # the first request opens the session
        try:
            self._outcome("opening a session", opening)
        except BaseException:  # Ctrl-C, too
            # It may still open after the timeout, and would last until this process ends.
            opening.add_done_callback(lambda _: self._client.close("errored"))
            raise

    def new_training(self, rank: int, seed: int) -> tinker.TrainingClient:
        """Create adapters over the base model, on attention and MLP as those of model.lora."""
        return self._bounded(
            f"making adapters over {self.base_model}",
            lambda: self._client.create_lora_training_client(
                self.base_model, rank=rank, seed=seed, train_mlp=True, train_attn=True, train_unembed=False
            ).result(),
        )

    def training_from(self, path: str) -> tinker.TrainingClient:
        """Load weights and optimizer from a path of the service."""
        return self._bounded(
            f"loading {path}", lambda: self._client.create_training_client_from_state_with_optimizer(path).result()
        )

    def sampler(self, name: str) -> tinker.SamplingClient:
        """Open a sampling client for a path of the service (tinker://...) or for a base model."""
        client = self._client
        if name.startswith("tinker://"):
            return self._bounded(f"opening {name}", lambda: client.create_sampling_client(model_path=name).result())
        return self._bounded(f"opening {name}", lambda: client.create_sampling_client(base_model=name).result())

    def save_for_sampler(self, training: tinker.TrainingClient, name: str, *, expires: bool = True) -> str:
        """Save the current weights for `sampler` and return their path. `expires`: delete them after a week."""
        saved = self.result(
            "saving weights to sample with",
            lambda: training.save_weights_for_sampler(name, ttl_seconds=_SAMPLER_TTL_S if expires else None),
            retry=True,
        )
        return saved.path

    def result(self, what: str, submit: Callable[[], Any], *, retry: bool = False) -> Any:
        """Wait for the future that `submit` returns. `retry`: repeat after a failure of the service itself."""
        for left in reversed(range(_TRIES if retry else 1)):
            try:
                return self._bounded(what, lambda: submit().result())
            except ServiceError as error:
                if not left or not self._is_transient(error.__cause__):
                    raise
        raise AssertionError("there is one try at least")

    async def await_result(self, what: str, future: Any) -> Any:
        """Await a future of the SDK. A cancellation reaches the service."""
        try:
            return await asyncio.wait_for(_awaited(future), self.config.timeout_s)
        except Exception as error:  # boundary: the SDK, and what the service answers
            raise self._failed(what, error) from error

    def close(self) -> None:
        """End the session; errors are ignored."""
        try:
            self._bounded("ending the session", lambda: self._client.close("success").result(), at_most_s=10)
        except ServiceError:
            pass

    # Private

    def _bounded(self, what: str, work: Callable[[], Result], at_most_s: float | None = None) -> Result:
        """Run `work` in a thread, which is abandoned after timeout_s: the SDK has no timeout of its own."""
        return self._outcome(what, _in_thread(work), at_most_s)

    def _outcome(self, what: str, outcome: Future[Result], at_most_s: float | None = None) -> Result:
        try:
            return outcome.result(at_most_s or self.config.timeout_s)
        except Exception as error:  # boundary: the SDK, and what the service answers
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> ServiceError:
        if isinstance(error, TimeoutError) and not str(error):
            why = f"there was no answer within backend.timeout_s = {self.config.timeout_s:g} s"
        else:
            text = " ".join(str(error).split()).replace(self._key, "(the key)")
            why = f"{type(error).__name__}: {text}"[:500]
        where = self.config.url or os.environ.get("TINKER_BASE_URL", "") or "tinker"
        return ServiceError(f"the service at {where} failed at {what}: {why}")

    def _is_transient(self, error: Any) -> bool:
        """Return whether the service, and not the request, may be the cause."""
        sdk = self.sdk
        if isinstance(error, sdk.RequestFailedError):
            return error.category != sdk.types.RequestErrorCategory.User
        if isinstance(error, sdk.APIStatusError):
            return error.status_code in (408, 409, 410, 429) or error.status_code >= 500
        return isinstance(error, sdk.APIConnectionError) or type(error).__name__ == "RetryableException"


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="tinker").start()
    return outcome


async def _awaited(future: Any) -> Any:
    return await future
