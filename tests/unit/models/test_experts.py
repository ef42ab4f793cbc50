"""Mixtures of experts: routers in float32, adapters beside experts, and names of weights as files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from rollover.config import LoraConfig, ModelConfig
from rollover.models.attention import PackedAttention, hidden_states
from rollover.models.load import as_in_files, cast_parameters, load_model
from rollover.trainer.lora import adapter_weights, add_lora, merged_weights
from rollover.trainer.ranks.sharded import layers_of

SHARED = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1
)
SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": SHARED,
    "dots1": SHARED,
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
}
FAMILIES = pytest.mark.parametrize("family", SIZES)


def loaded(family: str, folder: Path) -> Any:
    path = tiny.save(folder, family, **SIZES[family])
    return load_model(ModelConfig(path=str(path), device="cpu")).model


@pytest.mark.parametrize("family", ["glm4_moe", "dots1"])
def test_routers_that_ask_for_float32_get_it(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    cast_parameters(model, torch.bfloat16)
    (router,) = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = original(x, weight, bias)
        if weight.shape == router.weight.shape and torch.equal(weight.float(), router.weight.float()):
            seen.append((out.detach(), original(x.detach().double(), weight.detach().double())))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        with torch.no_grad():
            hidden_states(model, torch.arange(5, 25), torch.arange(20), PackedAttention([20]))
    ((logits, exact),) = seen
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() < 1e-4 * exact.abs().max()


@FAMILIES
@pytest.mark.parametrize("targets", [None, ["all-linear"], ["q_proj", "v_proj"]])
def test_adapters_are_beside_experts_and_can_be_merged(family: str, targets: list[str] | None) -> None:
    plain = tiny.model(family, **SIZES[family])
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    options = {} if targets is None else {"target_modules": targets}
    model = add_lora(plain, LoraConfig.model_validate({"rank": 2, **options}))
    handed = dict(adapter_weights(model.get_base_model()))
    layers = {name.rpartition(".lora_")[0] for name in handed}
    assert layers and all(".self_attn." in layer for layer in layers) and all("base_layer" not in n for n in handed)
    merged = {name: tuple(t.shape) for name, t in merged_weights(model.get_base_model())}
    assert merged == shapes


def test_adapters_of_experts_alone_are_refused() -> None:
    with pytest.raises(ValueError, match=r'"gate_proj".*layers of experts or routers.*"q_proj", "k_proj"'):
        model = tiny.model("qwen3_moe", **SIZES["qwen3_moe"])
        add_lora(model, LoraConfig(rank=2, target_modules=["gate_proj", "up_proj"]))


@FAMILIES
def test_names_and_pieces_are_those_of_files(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    named = dict(as_in_files(model, ((n, p.detach()) for n, p in model.named_parameters())))
    assert any(".experts.0." in name for name in named)
    assert named.keys() == saved.keys() - {name for name in saved if "e_score_correction_bias" in name}
    for name, tensor in named.items():
        torch.testing.assert_close(tensor, saved[name])


def test_the_decoder_is_found_beside_a_tower_of_equal_depth() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
            self.model = tiny.model("llama")
            self.config = self.model.config

        def get_decoder(self) -> Any:
            return self.model.get_decoder()

    both = Both()
    assert layers_of(both) == list(both.model.model.layers)
