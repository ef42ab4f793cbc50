"""Models loaded beside the policy: a teacher ([distill]), a reference (algorithm.reference_path), a critic.

All read the policy's token ids, so they must have its vocabulary. A reference's weights take the place of the policy's
in its own modules (kept_weights.py): it must have the same architecture, and no second model stays. Owns no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rollover.config import Config, ModelConfig
from rollover.config.critic import POLICY
from rollover.functions import shortened
from rollover.models.devices import dtype_of
from rollover.models.load import LoadedModel, load_model, load_outline
from rollover.models.norms import compile_norms


def load_teacher(config: Config, policy: LoadedModel) -> LoadedModel:
    """Load the model of distill.model_path on the policy's device in compute dtype, for passes without a gradient.

    ValueError if it cannot be loaded, or if its token ids mean other tokens than the policy's.
    """
    device = next(policy.model.parameters()).device
    loaded = load_scoring_model(config, "distill.teacher", config.distill.model_path, policy, device)
    loaded.model.requires_grad_(False)
    compile_norms(loaded.model, dtype_of(config))
    return loaded


def load_teacher_outline(config: Config, policy: LoadedModel) -> LoadedModel:
    """Load tokenizer and shapes of the teacher, without its weights. Errors as in `load_teacher`."""
    return load_auxiliary("distill.teacher", config.distill.model_path, policy, config, load_outline)


def load_teacher_in_float32(config: Config, policy: LoadedModel, *, with_weights: bool) -> LoadedModel:
    """Load the teacher for spreading over ranks: without weights, its shapes. Errors as in `load_teacher`."""
    load = load_model if with_weights else partial(load_outline, filled_later=True)
    return load_auxiliary("distill.teacher", config.distill.model_path, policy, config, load)


def load_scoring_model(
    config: Config, key: str, path: str, policy: LoadedModel, device: torch.device | None = None
) -> LoadedModel:
    """Load the model of the option `key`, which scores the policy's tokens, in compute dtype."""
    return load_auxiliary(key, path, policy, config, lambda cfg: load_model(cfg, dtype=dtype_of(config), device=device))


def load_auxiliary(
    key: str,
    path: str,
    policy: LoadedModel,
    config: Config,
    load: Callable[[ModelConfig], LoadedModel],
    use: str = "It scores",
) -> LoadedModel:
    """Load the model at `path`, which the option `key` names, with `load`. `use`: in messages, what it does with ids.

    ValueError if it cannot be loaded, or if its token ids mean other tokens than the policy's.
    """
    try:
        loaded = load(config.model.model_copy(update={"path": path, "revision": ""}))
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", key)) from error
    if why := vocabulary_difference(policy.tokenizer, loaded.tokenizer):
        raise ValueError(
            f"{key} = {path!r} has another vocabulary than the policy, {policy.path!r}: {why}. {use} the ids"
            " that the policy sampled: choose a model of the policy's family, with the same tokenizer"
        )
    return loaded


def vocabulary_difference(policy: Any, teacher: Any) -> str:
    """Describe where two tokenizers give a token different ids; "" if their maps are equal.

    Padding of an embedding beyond the tokenizer's ids has no token, and is not compared.
    """
    of_policy, of_teacher = policy.get_vocab(), teacher.get_vocab()
    if of_policy == of_teacher:
        return ""
    for token, number in sorted(of_policy.items(), key=lambda item: item[1]):
        if of_teacher.get(token) != number:
            other = of_teacher.get(token)
            there = "there is none of that name" if other is None else f"it is {other} there"
            return f"{shortened(token)} is token {number} of the policy, and {there}"
    return f"it has {len(of_teacher) - len(of_policy)} tokens that the policy has not"


_KEY = "algorithm.reference_path"
# Settings of a model's configuration that do not change how its weights are used.
_IRRELEVANT_SETTINGS = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "max_position_embeddings",
    "use_cache", "output_router_logits", "initializer_range", "_attn_implementation",
}  # fmt: skip


def load_reference(config: Config, policy: LoadedModel) -> dict[str, torch.Tensor] | None:
    """Return name -> weight in compute dtype, on the policy's device; None without such a reference.

    With adapters the reference is the policy's model without them, and nothing is loaded. ValueError if the model
    cannot be loaded, or has another architecture or vocabulary than the policy.
    """
    path = config.algorithm.reference_path
    if not path or not config.algorithm.needs_reference or config.model.lora.rank:
        return None
    loaded = load_scoring_model(config, _KEY, path, policy)
    if why := _architecture_difference(policy.model, loaded.model):
        raise ValueError(
            f"{_KEY} = {path!r} has another architecture than the policy, {policy.path!r}: {why}. Its weights take the"
            " place of the policy's: choose a model of the same architecture and size"
        )
    if why := _tower_difference(policy.model, loaded.model):
        raise ValueError(
            f"{_KEY} = {path!r} has another vision tower than the policy, {policy.path!r}: {why}. The policy's is"
            ' frozen, and gives both their images: set model.vision = "trained", or choose a model with the same tower'
        )
    device = next(policy.model.parameters()).device
    return {name: weight.detach().to(device) for name, weight in loaded.model.named_parameters()}


def _tower_difference(policy: Any, other: Any) -> str:
    """Describe a differing weight of a frozen tower; "" without one."""
    weights = dict(other.named_parameters())
    for name, weight in policy.named_parameters():
        if not weight.requires_grad and not torch.equal(weight.to(weights[name].dtype).cpu(), weights[name].cpu()):
            return f"{name} differs"
    return ""


def _architecture_difference(policy: Any, other: Any) -> str:
    """Describe a difference in architecture; "" if the weights are interchangeable."""
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
        matters = key not in _IRRELEVANT_SETTINGS and not key.endswith(("_token_id", "_dropout"))
        if matters and settings.get(key) != others.get(key):
            return f"{key} is {others.get(key)!r}, and the policy's {settings.get(key)!r}"
    return ""


def load_critic(config: Config, policy: LoadedModel) -> LoadedModel:
    """Load the model of critic.model on the policy's device, in float32, to be trained.

    ValueError if it cannot be loaded, or if its token ids mean other tokens than the policy's.
    """
    path, device = config.critic.model, next(policy.model.parameters()).device

    def load(model: ModelConfig) -> LoadedModel:
        return load_model(config.model if path == POLICY else model, device=device)

    return load_auxiliary("critic.model", path, policy, config, load, "A critic reads")
