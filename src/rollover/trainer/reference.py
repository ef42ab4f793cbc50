"""The weights of a reference policy that is another model than the one a run begins with (algorithm.reference_path).

    load_reference: the model's files ──▶ its weights, by the names of the policy's parameters ──▶ kept_weights.py

The policy's own modules compute with them: no second model stays, and so it must be of the same architecture.
"""

from __future__ import annotations

from typing import Any

import torch

from rollover.config import Config
from rollover.models.load import LoadedModel
from rollover.trainer.teacher import load_beside

_KEY = "algorithm.reference_path"
# Of a model's configuration, what says nothing about how its weights are computed with.
_OF_NO_WEIGHT = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "max_position_embeddings",
    "use_cache", "output_router_logits", "initializer_range", "_attn_implementation",
}  # fmt: skip


def load_reference(config: Config, policy: LoadedModel) -> dict[str, torch.Tensor] | None:
    """Name -> weight in compute dtype, on the policy's device; None where the run has no such reference.

    With adapters it is the policy's model without them, and nothing is loaded. ValueError where the model cannot be
    loaded, or is not of the policy's architecture and vocabulary.
    """
    path = config.algorithm.reference_path
    if not path or not config.algorithm.needs_reference or config.model.lora.rank:
        return None
    loaded = load_beside(config, _KEY, path, policy)
    if why := _other_architecture(policy.model, loaded.model):
        raise ValueError(
            f"{_KEY} = {path!r} is not built as the policy, {policy.path!r}: {why}. Its weights are put in the place of"
            " the policy's: choose a model of the same architecture and size"
        )
    if why := _other_tower(policy.model, loaded.model):
        raise ValueError(
            f"{_KEY} = {path!r} has another vision tower than the policy, {policy.path!r}: {why}. The policy's is"
            ' frozen, and gives both their images: set model.vision = "trained", or choose a model with the same tower'
        )
    device = next(policy.model.parameters()).device
    return {name: weight.detach().to(device) for name, weight in loaded.model.named_parameters()}


def _other_tower(policy: Any, other: Any) -> str:
    """A weight of a frozen tower that differs, in words; "" if none does, or there is none."""
    weights = dict(other.named_parameters())
    for name, weight in policy.named_parameters():
        if not weight.requires_grad and not torch.equal(weight.to(weights[name].dtype).cpu(), weights[name].cpu()):
            return f"{name} differs"
    return ""


def _other_architecture(policy: Any, other: Any) -> str:
    """What one of the models has and the other has not, in words; "" if weights can take each other's place."""
    of_policy, of_other = ({name: tuple(p.shape) for name, p in model.named_parameters()} for model in (policy, other))
    for name in sorted(of_policy.keys() ^ of_other.keys()):
        return f"only {'the policy' if name in of_policy else 'the reference'} has the weight {name}"
    for name, shape in of_policy.items():
        if of_other[name] != shape:
            return f"{name} is {list(of_other[name])}, and the policy's {list(shape)}"
    stored = other.state_dict()
    for name, value in policy.named_buffers():
        if name in stored and not torch.equal(value.cpu(), stored[name].to(value.dtype).cpu()):
            return f"{name}, which no step trains, differs"
    settings, others = (model.config.get_text_config().to_dict() for model in (policy, other))
    for key in sorted(settings.keys() | others.keys()):
        matters = key not in _OF_NO_WEIGHT and not key.endswith(("_token_id", "_dropout"))
        if matters and settings.get(key) != others.get(key):
            return f"{key} is {others.get(key)!r}, and the policy's {settings.get(key)!r}"
    return ""
