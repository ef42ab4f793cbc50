"""Model FLOPs against a count by hand and against torch's own counter; and the peak that they are divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny
from rollover.config import EngineConfig, LoraConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.models import flops
from rollover.models.flops import ModelFlops, known_peak, measured_peak, peak_flops, visible_pairs
from rollover.trainer.lora import add_lora

CPU = torch.device("cpu")


def counted(model: Any, num: int, *, backward: bool) -> int:
    """By torch: one plain sequence, whose attention multiplies every query with every key."""
    model.set_attn_implementation("eager")
    ids = torch.arange(num)[None] % 90 + 2
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    model.set_attn_implementation("rollover")
    return counter.get_total_flops()


def test_a_count_by_hand() -> None:
    """2 layers of hidden 64, 4 heads over 2 of 16, inner 96, 102 tokens in the vocabulary."""
    flops = ModelFlops.from_model(tiny.model())
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    assert flops.linear == flops.linear_trained == 2 * layer
    assert flops.head == flops.head_trained == 102 * 64
    assert flops.widths == {None: 2 * 4 * 16}
    # A prompt of 3 with answers of 2 and 1: queries see 1, 2, 3, then 4, 5, and 4 keys.
    row = ([3, 2, 1], [None, 0, 0])
    forward = 2 * (2 * layer * 6 + 102 * 64 * 4) + 4 * (2 * 64) * (1 + 2 + 3 + 4 + 5 + 4)
    assert flops.forward(*row, 4) == forward
    assert flops.backward(*row, 4) == 2 * forward
    assert flops.continued([(3, 5), (3, 4)], 3) == 2 * (2 * layer * 3 + 102 * 64 * 3) + 4 * 128 * (4 + 5 + 4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_linear_layers_and_scores_are_those_that_torch_counts(family: str, tied: bool) -> None:
    """Forward, and both gradients of the backward pass; torch's attention multiplies hidden pairs, too."""
    model = tiny.model(family, tie_word_embeddings=tied)
    num, flops = 7, ModelFlops.from_model(model)
    hidden_pairs = sum(
        width * (num * num - visible_pairs([num], None, window)) for window, width in flops.widths.items()
    )
    assert counted(model, num, backward=False) == flops.forward([num], None, num) + 4 * hidden_pairs
    everything = flops.forward([num], None, num) + flops.backward([num], None, num)
    assert counted(model, num, backward=True) == everything + 3 * 4 * hidden_pairs


def test_frozen_weights_get_no_gradient() -> None:
    """LoRA's backward pass: torch leaves out what lies before the first adapter, which is counted here."""
    num = 7
    model = add_lora(tiny.model(), LoraConfig(rank=4, target_modules=["q_proj", "down_proj"])).get_base_model()
    flops = ModelFlops.from_model(model)
    adapters = 2 * (4 * 64 + 4 * 64 + 4 * 96 + 4 * 64)
    assert flops.linear_trained == adapters and flops.head_trained == 0
    assert flops.linear == ModelFlops.from_model(tiny.model()).linear + adapters
    hidden_pairs = flops.widths[None] * (num * num - visible_pairs([num], None, None))
    everything = flops.forward([num], None, num) + flops.backward([num], None, num) + 3 * 4 * hidden_pairs
    # Inputs of the first layer's projections and of its A, and its keys and values.
    first = 2 * num * (64 * 64 + 2 * 64 * 32 + 4 * 64) + 2 * 2 * num * num * 64
    assert counted(model, num, backward=True) == everything - first


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_pairs_are_those_of_the_mask(window: int | None) -> None:
    lengths, prefixes = [5, 3, 9, 1, 2], [None, 0, 0, None, 3]
    pairs = 0
    for length, prefix in zip(lengths, prefixes, strict=True):
        before = 0 if prefix is None else lengths[prefix]
        pairs += sum(min(before + i + 1, window or 10**6) for i in range(length))
    assert visible_pairs(lengths, prefixes, window) == pairs


def test_experts_count_as_often_as_they_are_asked() -> None:
    options = dict(num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, norm_topk_prob=True)
    few, many = (ModelFlops.from_model(tiny.model("qwen3_moe", num_experts=num, **options)).linear for num in (4, 8))
    # Of a layer's experts 2 are asked, whatever their number; the router grows with it.
    assert many - few == 2 * 4 * 64
    assert few == 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 4 * 64 + 2 * 3 * 64 * 32)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_engine_counts_what_it_computes(family: str) -> None:
    """Prefill of the prompts but for their last tokens, then a token a step; a shared prompt is computed once."""
    from benchmarks import workload

    model = tiny.model(family)
    flops = ModelFlops.from_model(model)
    engine = EmbeddedEngine(model, EngineConfig(kv_memory_gb=0.1))
    prompt = workload.prompt(102, 20, 0)
    workload.generate(engine, [prompt, prompt], 5)
    steps = [(19 + i, 20 + i) for i in range(5)]
    expected = flops.continued([(0, 19)], 0) + 2 * flops.continued(steps, 5)
    assert engine.stats()["engine/flops"] == pytest.approx(expected, rel=1e-12)


def test_peaks_of_known_names() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA H200": 989.4,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA L40S": 362.05,
        "NVIDIA L4": 121.0,
        "NVIDIA GeForce RTX 4090": 165.2,
    }
    for name, tflops in names.items():
        assert known_peak(name, torch.bfloat16) == tflops * 1e12
        assert known_peak(name, torch.float32) is None, "the table is of bfloat16"
    assert known_peak("NVIDIA A10G", torch.bfloat16) is None, "another card than the A10"
    assert known_peak("", torch.bfloat16) is None


def test_a_peak_is_given_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And measuring leaves the run's random numbers alone."""
    state = torch.get_rng_state()
    measured = measured_peak(torch.float64, CPU)  # which no run of this process has asked for
    assert 1e8 < measured < 1e14 and measured_peak(torch.float64, CPU) == measured, "it is measured once"
    assert torch.equal(torch.get_rng_state(), state)
    assert peak_flops(CPU, torch.float32, 1.5) == 1.5e12
    monkeypatch.setattr(flops, "measured_peak", lambda dtype, device: 7.0)
    assert peak_flops(CPU, torch.bfloat16) == 7.0
