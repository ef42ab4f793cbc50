"""Tiny random models and a character tokenizer, built in memory: what the tests train and generate with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rollover.models.attention import IMPLEMENTATION
from rollover.models.load import LoadedModel
from rollover.recipes.toy_model import character_tokenizer
from rollover.trainer.local_backend import LocalBackend
from rollover.trainer.trainer import Trainer

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")

_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, plus <pad> (0) and <eos> (1)."""
    return character_tokenizer(_TEMPLATE)


def model(family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal LM with random weights: 2 layers (gemma: 4), hidden 64, 4 heads over 2 key/value heads, 102 tokens."""
    values: dict[str, Any] = dict(
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4 if family.startswith("gemma") else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    if family.startswith("gemma"):
        values.update(sliding_window=8, query_pre_attn_scalar=16)
    values.update(changes)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **values)
    out = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    # Freshly initialised models are nearly uniform: sharper ones make wrong attention visible.
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(4.0)
    return out.eval()


def loaded(family: str = "llama", **changes: Any) -> LoadedModel:
    return LoadedModel(model(family, **changes), tokenizer(), f"tiny-{family}")


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A model folder as from_pretrained wants it."""
    model(family, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_routed(folder: Path) -> Path:
    """A model folder of experts (glm4_moe), whose files hold a tensor beside its weights: the bias of its router."""
    out = model(
        "glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    bias = out.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    out.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def compiled_kernels() -> Any:
    """The compiled kernels; skips the test where there is no compiler."""
    import pytest

    from rollover.models import kernels

    try:
        return kernels.load()
    except kernels.KernelsUnavailable as error:
        pytest.skip(str(error))


def local(trainer: Trainer) -> LocalBackend:
    """The backend of a trainer that is a local one, with model, optimizer and what else it owns."""
    assert isinstance(trainer.backend, LocalBackend)
    return trainer.backend
