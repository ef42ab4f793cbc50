"""A session at a Tinker-compatible service, through its SDK: what trains (`training`), and what samples (`sampler`).

Owns the connection, how long an answer is waited for, what is asked again after a failure, and what is said of one. The
SDK asks again by itself where no answer came, or 408, 409, 429 or 5xx did: for five minutes, under the number of the
first request, so that nothing is done twice. Here is a bound of the whole, and another try of what changes nothing. The
key is read from the environment alone, and is in no message.
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


class Service:
    """One session at the service of `config`. ValueError where the SDK or the key is missing; ServiceError where the
    service cannot be reached. Every other method, too, raises ServiceError."""

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
        opening = _begun(lambda: self._client.holder)  # the first request makes the session
        try:
            self._outcome("opening a session", opening)
        except BaseException:  # Ctrl-C, too
            # It may still open, when nobody waits for it any more, and would last as long as this process does.
            opening.add_done_callback(lambda _: self._client.close("errored"))
            raise

    def new_training(self, rank: int, seed: int) -> tinker.TrainingClient:
        """Adapters of this rank over the base model, on attention and MLP: as those of model.lora."""
        return self._bounded(
            f"making adapters over {self.base_model}",
            lambda: self._client.create_lora_training_client(
                self.base_model, rank=rank, seed=seed, train_mlp=True, train_attn=True, train_unembed=False
            ).result(),
        )

    def training_from(self, path: str) -> tinker.TrainingClient:
        """Weights and optimizer as they were saved at that path of the service."""
        return self._bounded(
            f"loading {path}", lambda: self._client.create_training_client_from_state_with_optimizer(path).result()
        )

    def sampler(self, name: str) -> tinker.SamplingClient:
        """What samples with the weights at a path of the service (tinker://...), or with a base model."""
        client = self._client
        if name.startswith("tinker://"):
            return self._bounded(f"opening {name}", lambda: client.create_sampling_client(model_path=name).result())
        return self._bounded(f"opening {name}", lambda: client.create_sampling_client(base_model=name).result())

    def save_for_sampler(self, training: tinker.TrainingClient, name: str, *, expires: bool = True) -> str:
        """Save the current weights for `sampler` and return their path. `expires`: after a week."""
        saved = self.result(
            "saving weights to sample with",
            lambda: training.save_weights_for_sampler(name, ttl_seconds=_SAMPLER_TTL_S if expires else None),
            again=True,
        )
        return saved.path

    def result(self, what: str, submit: Callable[[], Any], *, again: bool = False) -> Any:
        """The result of the future that `submit` gives. `again`: where that fails by the service's own fault, it may be
        asked again, as it changes nothing."""
        for left in reversed(range(_TRIES if again else 1)):
            try:
                return self._bounded(what, lambda: submit().result())
            except ServiceError as error:
                if not left or not self._is_of_the_service(error.__cause__):
                    raise
        raise AssertionError("there is one try at least")

    async def answered(self, what: str, future: Any) -> Any:
        """The result of a future of the SDK, awaited. A cancellation is handed on to the service."""
        try:
            return await asyncio.wait_for(_awaited(future), self.config.timeout_s)
        except Exception as error:  # boundary: the SDK, and what the service answers
            raise self._failed(what, error) from error

    def close(self) -> None:
        """End the session. What fails here is of no use to anyone."""
        try:
            self._bounded("ending the session", lambda: self._client.close("success").result(), at_most_s=10)
        except ServiceError:
            pass

    # Private

    def _bounded(self, what: str, work: Callable[[], Result], at_most_s: float | None = None) -> Result:
        """What `work` returns. A thread that takes longer than timeout_s is left alone: the SDK has no bound of it."""
        return self._outcome(what, _begun(work), at_most_s)

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

    def _is_of_the_service(self, error: Any) -> bool:
        """Whether the service, and not what it was asked, may be the cause."""
        sdk = self.sdk
        if isinstance(error, sdk.RequestFailedError):
            return error.category != sdk.types.RequestErrorCategory.User
        if isinstance(error, sdk.APIStatusError):
            return error.status_code in (408, 409, 410, 429) or error.status_code >= 500
        return isinstance(error, sdk.APIConnectionError) or type(error).__name__ == "RetryableException"


def _begun(work: Callable[[], Result]) -> Future[Result]:
    """The result of `work`, which runs in a thread."""
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
