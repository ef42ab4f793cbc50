"""Validation of a custom trainer backend: its errors and invalid results are reported as its own.

    backend.type = "mine.py:make" ──▶ make(setup) ──▶ CustomBackend ──▶ trainer, weight sync, checkpoints

Never changes a result: it is passed on, or refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.functions import CustomObject, described, is_number
from rollover.trainer.backend import BackendLost, RunBackend, Stream, TrainerBackend, Version
from rollover.trainer.objective import Counts, Tally
from rollover.types import Sample, Segment

# The contract of each member, completing "it must ...".
_MUST = {
    "policy_version": "be a property with the training steps of the current weights, an integer",
    "flops": "be a property with the FLOPs so far, a number",
    "compute_logprobs": "return a dict: rollout id -> float32 array with a log-prob for each loss token",
    "compute_values": "return a dict: rollout id -> float32 array with a value for each loss token",
    "compute_statistics": "return a dict: rollout id -> float32 array [loss tokens, 3] with log-prob, entropy and sum"
    " of squared probabilities",
    "forward_backward": "add the gradient of the samples, and return a Tally",
    "optim_step": "step, and return a dict of numbers with grad_norm, learning_rate and train/skipped_steps",
    "forget_gradients": "discard the gradient, without an exception",
    "publish": "be an async def that returns pairs of a name and a tensor",
    "sample": "be an async def that returns a list of Segments for each request",
    "save_state": "return (tensors by name, what JSON can hold)",
    "load_state": "restore what save_state returned",
    "save_model": "write the model into the folder",
}
_UPDATE = ("grad_norm", "learning_rate", "train/skipped_steps")


def _parameters(verb: Callable[..., object]) -> Container[str]:
    """Return the parameter names of a verb, if Python knows them."""
    try:
        return inspect.signature(verb).parameters
    except (TypeError, ValueError):
        return ()


class CustomBackend(CustomObject, RunBackend):
    """Wrapper of `backend`, which the function `spec` of backend.type made. Each verb: see `TrainerBackend`.

    FunctionError if a verb raises or returns an invalid result; it names the verb and the contract. BackendLost is
    passed on, and so are AssertionError and EngineDied, which end a run at once.
    """

    _must, _file, _passed_on = _MUST, "trainer/backend.py", (AssertionError, BackendLost, EngineDied)

    def __init__(self, backend: TrainerBackend, spec: str) -> None:
        super().__init__(backend, "backend.type", spec)
        self.backend = backend
        if "known" in _parameters(backend.forward_backward):
            raise self._failed(
                "forward_backward",
                "takes the streams of tokens as a third argument, `known`. Now it gets samples and counts alone, and"
                ' each sample has its streams: sample.streams["proximal_logprobs"] (docs/backends.md)',
            )

    @property
    def policy_version(self) -> int:
        return self._integer("policy_version")

    @property
    def flops(self) -> float:
        with self._calling("flops"):
            value = self.backend.flops
        if not is_number(value):
            raise self._failed("flops", f"gave {described(value)}")
        return value

    def compute_logprobs(self, samples: list[Sample], version: Version | None = None) -> Stream:
        with self._calling("compute_logprobs"):
            found = self.backend.compute_logprobs(samples, version)
        return self._stream("compute_logprobs", found, samples)

    def compute_values(self, samples: list[Sample]) -> Stream:
        with self._calling("compute_values"):
            found = self.backend.compute_values(samples)
        return self._stream("compute_values", found, samples)

    def compute_statistics(self, samples: list[Sample]) -> Stream:
        with self._calling("compute_statistics"):
            found = self.backend.compute_statistics(samples)
        return self._stream("compute_statistics", found, samples, 3)

    def forward_backward(self, samples: list[Sample], counts: Counts) -> Tally:
        with self._calling("forward_backward"):
            sums = self.backend.forward_backward(samples, counts)
        if not isinstance(sums, Tally):
            raise self._failed("forward_backward", f"returned {described(sums)}")
        return sums

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        with self._calling("optim_step"):
            update = self.backend.optim_step(rate_scale, divisor=divisor, ends_step=ends_step)
        if not isinstance(update, Mapping) or not all(is_number(update.get(name)) for name in _UPDATE):
            raise self._failed("optim_step", f"returned {described(update)}")
        return dict(update)

    def forget_gradients(self) -> None:
        with self._calling("forget_gradients"):
            self.backend.forget_gradients()

    async def publish(self) -> Iterable[tuple[str, torch.Tensor]]:
        with self._calling("publish"):
            return await self.backend.publish()

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        with self._calling("sample"):
            return await self.backend.sample(requests)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        with self._calling("save_state"):
            state = self.backend.save_state()
        if not isinstance(state, tuple) or len(state) != 2 or not all(isinstance(part, dict) for part in state):
            raise self._failed("save_state", f"returned {described(state)}")
        return state

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        with self._calling("load_state"):
            self.backend.load_state(tensors, meta)

    def save_model(self, folder: Path) -> None:
        with self._calling("save_model"):
            self.backend.save_model(folder)

    # Optional in a custom backend

    @property
    def trained_tokens(self) -> int | None:
        return getattr(self.backend, "trained_tokens", None)

    def close(self) -> None:
        getattr(self.backend, "close", lambda: None)()

    # Private

    def _stream(self, verb: str, found: object, samples: list[Sample], *width: int) -> Stream:
        """Raise FunctionError unless there is a number (`width` of them) for each loss token."""
        if not isinstance(found, Mapping):
            raise self._failed(verb, f"returned {described(found)}")
        for s in samples:
            if num := int(s.mask.sum()):
                values = found.get(s.rollout_id)
                if not isinstance(values, np.ndarray) or values.shape != (num, *width):
                    what = f"returned {described(values)} for rollout {s.rollout_id}, which has {num} loss tokens"
                    raise self._failed(verb, what)
        return dict(found)
