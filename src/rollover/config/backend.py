"""[backend], and the rules about it."""

import json
from collections.abc import Callable
from typing import Any

from rollover.config.logits import LogitsConfig
from rollover.config.table import Inert, Refused, Rule, Table, option, value_of
from rollover.config.train import LoraConfig
from rollover.live_objects import is_live
from rollover.registry import PLUGINS

# The function of a `BackendSetup` that makes each, loaded when it is called: the names alone load nothing heavy.
BACKENDS = {
    "local": "rollover.trainer.local_backend:make_local",
    "tinker": PLUGINS["backends"]["tinker"],
    "ranks": "rollover.trainer.ranks.backend:make_ranks",
}
_TINKER = ("backend.type", "tinker")
_RANKS = ("backend.type", "ranks")


class BackendConfig(Table):
    """[backend]: the component that holds and trains the weights (docs/backends.md)."""

    type: str = option(
        "local",
        "local: this process. ranks: several processes that shard weights, gradients and optimizer (FSDP2). tinker:"
        " a Tinker-compatible service that trains adapters and samples; its key comes from TINKER_API_KEY. Or a"
        " custom function (module:function or path.py:function) that makes a backend.",
        entry_points="backends",
    )
    num_ranks: int = option(2, "Number of ranks; with CUDA each uses its own GPU.", ge=1, only_if=_RANKS)
    rank_timeout_s: float = option(
        600.0,
        "Time after which a rank that the others wait for counts as failed. Must exceed the longest micro-batch.",
        gt=0,
        only_if=_RANKS,
    )
    base_model: str = option(
        "",
        "Name of the model at the service; empty = model.path, which must have the same tokenizer and configuration.",
        only_if=_TINKER,
    )
    url: str = option("", "Address of the service; empty = TINKER_BASE_URL, or the SDK's default.", only_if=_TINKER)
    chunk_tokens: int = option(
        256,
        "Maximum number of tokens sampled per call of the service. An interruption loses at most this many.",
        ge=1,
        only_if=_TINKER,
    )
    timeout_s: float = option(600.0, "Time limit of a call of the service.", gt=0, only_if=_TINKER)


def is_tinker(config: Any) -> bool:
    return config.backend.type == "tinker"


def is_ranks(config: Any) -> bool:
    return config.backend.type == "ranks"


def needs_weights_here(config: Any) -> bool:
    """Whether the loop's process needs the weights of model.path: to train them, or for an engine in it."""
    return not (is_tinker(config) or is_ranks(config) and config.engine.kind in ("process", "remote"))


_LOGITS = LogitsConfig.model_fields
# What the service cannot do: the option, the values that it can have, and why it has no others.
TINKER_REFUSES: dict[str, tuple[tuple[Any, ...], str]] = {
    "algorithm.entropy_coef": ((0.0,), "the service tells log-probs of given tokens, of which no entropy can be made"),
    "algorithm.top_entropy_share": (
        (1.0,),
        "the service tells log-probs of given tokens, of which no entropy can be made",
    ),
    "algorithm.proximal": (
        ("auto", "step_start", "behavior", "current", "interpolated"),
        "log-probs under earlier weights are not to be had from it",
    ),
    "algorithm.reference_path": (("",), "the reference is the base model there"),
    "algorithm.reference_refresh_steps": ((0,), "the reference is the base model there"),
    "model.lora.alpha": ((32.0,), "the service has a scale of its own"),
    "model.lora.dropout": ((0.0,), "the service has none"),
    "model.lora.target_modules": (
        (LoraConfig().target_modules,),
        "the service adapts all linear layers of attention and MLP",
    ),
    "model.lora.exclude_modules": (([],), "the service adapts all linear layers of attention and MLP"),
    "model.lora.rslora": ((False,), "the service has a scale of its own"),
    "model.lora.dora": ((False,), "the service has none"),
    "model.lora.path": (("",), "the service begins with adapters of its own"),
    "rollout.temperature": ((1.0,), "the service's log-probs are those at temperature 1"),
    "rollout.top_p": ((1.0,), "the service's log-probs are not those of the truncated distribution"),
    "rollout.top_k": ((0,), "the service's log-probs are not those of the truncated distribution"),
    "rollout.min_p": ((0.0,), "the service does not know it"),
    "train.optimizer": (("adamw",), "the service has AdamW"),
    **{f"rollout.logits.{name}": ((field.default,), "the service does not know it") for name, field in _LOGITS.items()},
    "engine.kind": (("embedded",), "the service samples"),
}
# What only this machine's engine and trainer read.
TINKER_IGNORES = (
    "model.dtype", "model.device", "model.vision", "engine.kv_memory_gb", "engine.threads",
    "engine.prefill_chunk_tokens", "engine.device", "engine.vllm_python", "engine.vllm_args",
    "train.micro_batch_tokens", "train.gradient_checkpointing", "train.profile_steps", "track.peak_tflops",
)  # fmt: skip
# The same of ranks: why an option must have its default, and what to set it to.
RANKS_REFUSES: dict[str, str] = {
    "model.lora.rank": "adapters are not spread. Set it to 0: the weights themselves are trained, or train them by"
    ' backend.type = "local"',
    "algorithm.advantage": "they have no value head. Use an estimator without one, such as grpo",
    "train.optimizer": "its moments lie in blocks of 256 numbers, which the part of a rank does not consist of. Use"
    ' "adamw", whose moments are spread, or "muon"',
    "model.device": 'on "mps" processes cannot train together. Set it to "cpu" or "cuda"',
    "model.vision": "a rank without an image in its samples would not join in the gradient of the tower. Set it to"
    ' "frozen", or train the tower by backend.type = "local"',
    "algorithm.loss": "an object of this program is not in the processes of the ranks. Name a function of a file"
    " (path.py:function)",
}
_REFUSED_WITH_RANKS: dict[str, Callable[[Any], bool]] = {
    "model.lora.rank": lambda c: c.model.lora.rank > 0,
    "algorithm.advantage": lambda c: c.algorithm.needs_critic,
    "train.optimizer": lambda c: c.train.optimizer == "adamw_8bit",
    "model.device": lambda c: c.model.device.startswith("mps"),
    "model.vision": lambda c: c.model.vision == "trained",
    "algorithm.loss": lambda c: is_live(c.algorithm.loss),
}


def _refused_with_ranks(key: str) -> Refused:
    return Refused(
        (key, "backend.type"),
        lambda c: is_ranks(c) and _REFUSED_WITH_RANKS[key](c),
        lambda c: f'{key} = {json.dumps(value_of(c, key))} with backend.type = "ranks": {RANKS_REFUSES[key]}',
    )


def _refused(key: str) -> Refused:
    allowed, why = TINKER_REFUSES[key]
    return Refused(
        (key, "backend.type"),
        lambda c: is_tinker(c) and value_of(c, key) not in allowed,
        lambda c: (
            f'{key} = {json.dumps(value_of(c, key))} with backend.type = "tinker": {why}. Set it to'
            f" {' or '.join(map(json.dumps, allowed))}, or train on this machine"
        ),
    )


RULES: tuple[Rule, ...] = (
    *map(_refused, TINKER_REFUSES),
    *map(_refused_with_ranks, RANKS_REFUSES),
    Inert(TINKER_IGNORES, ("backend.type",), is_tinker, 'with backend.type = "tinker": the service trains and samples'),
    Refused(
        ("model.lora.rank", "backend.type"),
        lambda c: is_tinker(c) and not c.model.lora.rank,
        'backend.type = "tinker" trains adapters: set model.lora.rank to the rank of the adapters',
    ),
    Refused(
        ("algorithm.advantage", "backend.type"),
        lambda c: is_tinker(c) and c.algorithm.advantage_traits.statistics,
        lambda c: (
            f'algorithm.advantage = "{c.algorithm.advantage}" with backend.type = "tinker": the service tells log-probs'
            " of given tokens, and nothing else of their distributions. Use another estimator, such as grpo"
        ),
    ),
    Refused(
        ("algorithm.advantage", "backend.type"),
        lambda c: is_tinker(c) and c.algorithm.needs_critic,
        lambda c: (
            f'algorithm.advantage = "{c.algorithm.advantage}" with backend.type = "tinker": the service has no value'
            " head. Use an estimator without one, such as grpo"
        ),
    ),
)
