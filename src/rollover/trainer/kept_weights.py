"""Copies of weights beside the current ones: of earlier policy versions, of the reference policy, of a teacher.

Owns copies of the trained parameters (with LoRA: the adapters alone) in compute dtype, by name, and which of them a run
needs. Passes under them swap the parameters in place: no second model. A reference into which the policy is mixed is
kept in float32: bfloat16 would round a small share of it away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from rollover.config import Config
from rollover.trainer.backend import REFERENCE, TEACHER, Version


def version_name(version: int) -> str:
    """Return the name of the weights of a policy version."""
    return f"version-{version}"


class KeptWeights:
    """Copies of `parameters` (name -> trained parameter, as the module computes with it), by name.

    `shards_of`: the parameters are float32 shards of weights of this dtype, gathered in every pass. FSDP knows their
    memory, so kept weights are copied into it instead of swapped.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], shards_of: torch.dtype | None = None) -> None:
        self._parameters, self._shards_of = parameters, shards_of
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def keep(self, name: str, dtype: torch.dtype | None = None) -> None:
        """Copy the current weights under `name`, in compute dtype, or in `dtype`."""
        self._kept[name] = {
            key: p.detach().to(self._shards_of or p.dtype, copy=True).to(dtype or self._shards_of or p.dtype)
            for key, p in self._parameters.items()
        }

    def put(self, name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """Keep these weights under `name`, in `dtype` or as they are; they have the parameters' layout."""
        self._kept[name] = {key: tensors[key].detach().to(dtype or tensors[key].dtype) for key in self._parameters}

    def mix(self, name: str, share: float) -> None:
        """Set `name` to share * current + (1 - share) * kept, in float32 (TR-DPO, arXiv 2404.09656)."""
        self._kept[name] = {
            key: torch.add(
                self._kept[name][key].float() * (1 - share),
                p.detach().to(self._shards_of or p.dtype).float(),
                alpha=share,
            )
            for key, p in self._parameters.items()
        }

    def keep_only(self, names: Collection[str]) -> None:
        """Discard all other weights."""
        self._kept = {name: tensors for name, tensors in self._kept.items() if name in names}

    @contextmanager
    def under(self, name: str) -> Iterator[None]:
        """Let the module compute with the weights kept as `name`, without gradients."""
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
        """Replace the kept weights by a `state`; entries of other owners are ignored."""
        self._kept = {}
        for full in tensors:
            owner, _, rest = full.partition("/")
            if owner == "kept":
                name, _, key = rest.partition("/")
                self._kept.setdefault(name, {})[key] = tensors[full].to(self._parameters[key].device).clone()


def _copy_into(parameter: torch.Tensor, weights: torch.Tensor) -> None:
    parameter.detach().copy_(weights)


def _put_in_place(parameter: torch.Tensor, weights: torch.Tensor) -> None:
    parameter.data = weights.to(parameter.dtype)


class KeptVersions:
    """The kept weights that [algorithm] and [distill] need: reference, teacher and the last versions.

    `without_adapters`: context in which the model
    computes without them, as the reference of algorithm.reference_path; None if that is another model, or unset.
    """

    def __init__(
        self,
        weights: KeptWeights,
        config: Config,
        without_adapters: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.weights, self.config, self.algorithm, self.distill = weights, config, config.algorithm, config.distill
        self._without_adapters = without_adapters
        of_algorithm = self.algorithm.needs_reference and without_adapters is None
        self._keeps_reference = of_algorithm or self.distill.teacher == "initial"

    def begin(self, reference: Mapping[str, torch.Tensor] | None = None) -> None:
        """Keep the initial weights. `reference`: the reference policy's, if those are others."""
        is_mixed = self.algorithm.reference_refresh_steps > 0 and self.algorithm.reference_mixup < 1
        dtype = torch.float32 if is_mixed else None
        if reference is not None:
            self.weights.put(REFERENCE, reference, dtype)
        elif self._keeps_reference:
            self.weights.keep(REFERENCE, dtype)
        self.on_version(0)

    def on_version(self, version: int) -> None:
        """Keep the current weights, of policy version `version`, if they will be needed."""
        steps = self.algorithm.reference_refresh_steps if self.algorithm.needs_reference else 0
        if steps and version and version % steps == 0:
            share = self.algorithm.reference_mixup
            self.weights.keep(REFERENCE) if share == 1 else self.weights.mix(REFERENCE, share)
        if self.distill.keeps_weights and version % self.distill.refresh_steps == 0:
            self.weights.keep(TEACHER)
        if self.algorithm.proximal == "snapshot":
            self.weights.keep(version_name(version))
            recent = range(version - self.config.staleness_bound_with_replay, version + 1)
            self.weights.keep_only({REFERENCE, TEACHER, *map(version_name, recent)})

    def under(self, version: Version | None, current: int) -> AbstractContextManager[None]:
        """Let the module compute with the weights of a version, or of a teacher that is an earlier policy.

        `current`: version of the current weights. ValueError if the weights are not kept.
        """
        if version == REFERENCE and not self.algorithm.own_reference:
            version = 0
        if version is None or version == current or (version == TEACHER and self.distill.is_current):
            wanted = ()
        elif version == TEACHER:
            wanted = (REFERENCE,) if self.distill.teacher == "initial" else (TEACHER,)
        elif version == REFERENCE:
            if self._without_adapters is not None:
                return self._without_adapters()
            wanted = (REFERENCE,)
        else:
            is_initial = version == 0 and not self.algorithm.own_reference
            wanted = (REFERENCE, version_name(version)) if is_initial else (version_name(version),)
        if not wanted:
            return nullcontext()
        for name in wanted:
            if name in self.weights:
                return self.weights.under(name)
        what = f"the weights of policy version {version} are not kept"
        if isinstance(version, str):
            what = f"there is no {version}"
        raise ValueError(
            f"{what}: algorithm.kl_coef > 0 keeps those of version 0, algorithm.proximal ="
            ' "snapshot" those of the last rollout.max_staleness + 1 versions, and distill.teacher those of a teacher'
        )

    def check(self, current: int) -> None:
        """Raise ValueError if the loaded checkpoint lacks weights that are needed now."""
        needed: dict[str, str] = {}
        if self.algorithm.needs_reference and self._without_adapters is None:
            needed["algorithm.kl_coef > 0"] = REFERENCE
        if self.distill.teacher == "initial":
            needed['distill.teacher = "initial"'] = REFERENCE
        if self.distill.keeps_weights:
            needed['distill.teacher = "policy" and distill.refresh_steps > 1'] = TEACHER
        if self.algorithm.proximal == "snapshot":
            needed['algorithm.proximal = "snapshot"'] = version_name(current)
        for setting, name in needed.items():
            if name not in self.weights:
                raise ValueError(
                    f"--resume with {setting}: the checkpoint holds no such weights; start with it instead"
                )
