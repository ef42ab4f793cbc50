"""Weights that are kept beside the current ones: of earlier policy versions, and of the reference policy.

Owns copies of the trained parameters (with LoRA: the adapters alone) in compute dtype, by name. For log-probs under
them the parameters are swapped in place: no second model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

REFERENCE = "reference"


def of_version(version: int) -> str:
    """The name of the weights of a policy version."""
    return f"version-{version}"


class KeptWeights:
    """`parameters`: name -> the trained parameter, as the module computes with it."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def keep(self, name: str) -> None:
        """Copy the current weights under `name`."""
        self._kept[name] = {key: p.detach().clone() for key, p in self._parameters.items()}

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all others."""
        self._kept = {name: tensors for name, tensors in self._kept.items() if name in names}

    @contextmanager
    def under(self, name: str) -> Iterator[None]:
        """Inside, the module computes with the weights kept as `name`, whose gradients must not be asked for."""
        kept = self._kept.get(name)
        assert kept is not None, f"no weights are kept as {name}, only {', '.join(self._kept) or 'none'}"
        current = {key: p.data for key, p in self._parameters.items()}
        try:
            for key, parameter in self._parameters.items():
                parameter.data = kept[key]
            yield
        finally:
            for key, parameter in self._parameters.items():
                parameter.data = current[key]

    def state(self) -> dict[str, torch.Tensor]:
        return {f"kept/{name}/{key}": t for name, tensors in self._kept.items() for key, t in tensors.items()}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces what is kept by what `state` gave; entries of other owners are left out."""
        self._kept = {}
        for full, tensor in tensors.items():
            owner, _, rest = full.partition("/")
            if owner == "kept":
                name, _, key = rest.partition("/")
                self._kept.setdefault(name, {})[key] = tensor.to(self._parameters[key].device).clone()
