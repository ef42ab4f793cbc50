"""Weights that are kept beside the current ones: of earlier policy versions, of the reference policy, of a teacher.

Owns copies of the trained parameters (with LoRA: the adapters alone) in compute dtype, by name, and which of them a run
needs. For log-probs under them the parameters are swapped in place: no second model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from rollover.config import AlgorithmConfig, DistillConfig
from rollover.trainer.backend import TEACHER, Version

REFERENCE = "reference"


def of_version(version: int) -> str:
    """The name of the weights of a policy version."""
    return f"version-{version}"


class KeptWeights:
    """`parameters`: name -> the trained parameter, as the module computes with it.

    `shards_of`: they are float32 parts of weights that are computed with in this dtype, gathered anew in every pass.
    What gathers them knows their memory, so that others cannot take their place: kept ones are copied into it.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], shards_of: torch.dtype | None = None) -> None:
        self._parameters, self._shards_of = parameters, shards_of
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def keep(self, name: str) -> None:
        """Copy the current weights under `name`."""
        self._kept[name] = {
            key: p.detach().to(self._shards_of or p.dtype, copy=True) for key, p in self._parameters.items()
        }

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all others."""
        self._kept = {name: tensors for name, tensors in self._kept.items() if name in names}

    @contextmanager
    def under(self, name: str) -> Iterator[None]:
        """Inside, the module computes with the weights kept as `name`, whose gradients must not be asked for."""
        kept = self._kept.get(name)
        assert kept is not None, f"no weights are kept as {name}, only {', '.join(self._kept) or 'none'}"
        if self._shards_of is not None:
            current = {key: p.detach().clone() for key, p in self._parameters.items()}
            put = _copy_into
        else:
            current = {key: p.data for key, p in self._parameters.items()}
            put = _put_in_place
        try:
            for key, parameter in self._parameters.items():
                put(parameter, kept[key])
            yield
        finally:
            for key, parameter in self._parameters.items():
                put(parameter, current[key])

    def state(self) -> dict[str, torch.Tensor]:
        return {f"kept/{name}/{key}": t for name, tensors in self._kept.items() for key, t in tensors.items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces what is kept by what `state` gave; entries of other owners are left out."""
        self._kept = {}
        for full in tensors:
            owner, _, rest = full.partition("/")
            if owner == "kept":
                name, _, key = rest.partition("/")
                self._kept.setdefault(name, {})[key] = tensors[full].to(self._parameters[key].device).clone()


def _copy_into(parameter: torch.Tensor, weights: torch.Tensor) -> None:
    parameter.detach().copy_(weights)


def _put_in_place(parameter: torch.Tensor, weights: torch.Tensor) -> None:
    parameter.data = weights


class KeptVersions:
    """Those kept weights that [algorithm] and [distill] need: of version 0, of a teacher, and of the last versions.

    `max_staleness`: how old a version may be that proximal = "snapshot" asks for.
    """

    def __init__(
        self, weights: KeptWeights, algorithm: AlgorithmConfig, distill: DistillConfig, max_staleness: int
    ) -> None:
        self.weights, self.algorithm, self.distill, self.max_staleness = weights, algorithm, distill, max_staleness
        self._keeps_reference = algorithm.needs_reference or distill.teacher == "initial"

    def on_version(self, version: int) -> None:
        """The current weights are those of policy version `version` now: keep them where they will be asked for."""
        if self._keeps_reference and version == 0:
            self.weights.keep(REFERENCE)
        if self.distill.keeps_weights and version % self.distill.refresh_steps == 0:
            self.weights.keep(TEACHER)
        if self.algorithm.proximal == "snapshot":
            self.weights.keep(of_version(version))
            recent = range(version - self.max_staleness, version + 1)
            self.weights.keep_only({REFERENCE, TEACHER, *map(of_version, recent)})

    def under(self, version: Version | None, current: int) -> AbstractContextManager[None]:
        """Inside, the module computes with the weights of that policy version, or of the teacher where those are the
        policy's; `current` is the version of the weights as they are. ValueError if they are not kept."""
        if version is None or version == current or (version == TEACHER and self.distill.is_current):
            wanted = ()
        elif version == TEACHER:
            wanted = (REFERENCE,) if self.distill.teacher == "initial" else (TEACHER,)
        else:
            wanted = (REFERENCE, of_version(version)) if version == 0 else (of_version(version),)
        if not wanted:
            return nullcontext()
        for name in wanted:
            if name in self.weights:
                return self.weights.under(name)
        what = "there is no teacher" if version == TEACHER else f"the weights of policy version {version} are not kept"
        raise ValueError(
            f"{what}: algorithm.kl_coef > 0 keeps those of version 0, algorithm.proximal ="
            ' "snapshot" those of the last rollout.max_staleness + 1 versions, and distill.teacher those of a teacher'
        )

    def check(self, current: int) -> None:
        """After a restart: ValueError where the checkpoint was written without weights that are needed now."""
        needed: dict[str, str] = {}
        if self.algorithm.needs_reference:
            needed["algorithm.kl_coef > 0"] = REFERENCE
        if self.distill.teacher == "initial":
            needed['distill.teacher = "initial"'] = REFERENCE
        if self.distill.keeps_weights:
            needed['distill.teacher = "policy" and distill.refresh_steps > 1'] = TEACHER
        if self.algorithm.proximal == "snapshot":
            needed['algorithm.proximal = "snapshot"'] = of_version(current)
        for setting, name in needed.items():
            if name not in self.weights:
                raise ValueError(
                    f"--resume with {setting}: the checkpoint holds no such weights; start with it instead"
                )
