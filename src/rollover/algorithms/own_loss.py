"""A policy loss of the user's own (algorithm.loss): found by its name, and checked at every call.

Owns what such a function must return. Never knows the formula.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from rollover.algorithms.token_batch import LossAndClipped, TokenBatch
from rollover.functions import OwnFunction, described, own_function

_RETURNS = (
    "two tensors of the shape of t.mask_BT: the loss of each token, finite and differentiable in t.logprobs_BT, and a"
    " bool that says where the gradient was clipped"
)


class OwnLoss:
    """Called as the functions of `LOSSES` are, with the signature of the user's own. FunctionError where that raises,
    changes a tensor that it is given, or returns anything but `_RETURNS`."""

    def __init__(self, spec: str) -> None:
        self._function: OwnFunction = own_function("algorithm.loss", spec, _RETURNS)
        functools.update_wrapper(self, self._function, updated=())

    def __call__(self, t: TokenBatch, **options: Any) -> LossAndClipped:
        given = {**{f"{name}_BT": values for name, values in t.streams.items()}, "mask_BT": t.mask_BT, **options}
        before = _versions(given)
        value = self._function(t, **options)
        if changed := [name for name, version in _versions(given).items() if version != before[name]]:
            raise self._function.changed(changed)
        wrong = _what_is_wrong(value, t)
        if wrong is not None:
            raise self._function.refused(wrong)
        return value[0], value[1].bool()


def _versions(given: Mapping[str, Any]) -> dict[str, int]:
    """How often each of the tensors was changed in place, as autograd counts it."""
    return {name: value._version for name, value in given.items() if isinstance(value, torch.Tensor)}


def _what_is_wrong(value: Any, t: TokenBatch) -> str | None:
    """What is wrong with a value that the user's function returned, in words; None if it is what it must be."""
    if not isinstance(value, tuple | list):
        return described(value)
    if len(value) != 2 or not all(isinstance(part, torch.Tensor) for part in value):
        return f"{len(value)} values: {', '.join(map(described, value))}"
    for name, part in zip(("a loss", "the clipped tokens"), value, strict=True):
        if part.shape != t.mask_BT.shape:
            return f"{name} of the shape {list(part.shape)}, where t.mask_BT is {list(t.mask_BT.shape)}"
    loss_M = value[0].detach()[t.mask_BT]
    # Where the log-probs of the model are not finite themselves, the loss is not to blame.
    if not torch.isfinite(loss_M).all() and torch.isfinite(t.logprobs_BT[t.mask_BT]).all():
        bad_M = loss_M[~torch.isfinite(loss_M)]
        return f"a loss that is {bad_M[0]:g} at {len(bad_M)} of {len(loss_M)} tokens"
    if t.logprobs_BT.requires_grad and not value[0].requires_grad:
        return "a loss without a gradient (something detached it)"
    return None
