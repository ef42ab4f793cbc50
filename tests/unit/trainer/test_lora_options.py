"""Which layers get adapters, rsLoRA, DoRA, and adapters to begin with: beside peft, which reads what is saved."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trainer
import torch
from safetensors.torch import load_file, save_file
from tiny_trainer import plain_logprobs, restored, sample
from transformers import AutoModelForCausalLM

import tiny
from rollover.config import Config, EngineConfig, LoraConfig, ModelConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.adapters import names
from rollover.models.load import LoadedModel
from rollover.trainer.backend import Stream
from rollover.trainer.batch import Batch
from rollover.trainer.lora import ADAPTER, add_lora, load_with_adapter, read_adapter
from rollover.trainer.trainer import Trainer
from rollover.types import Prompt, SamplingParams
from samples import random_samples
from virtual_time import at_once

SAMPLES = random_samples(1)
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}
DORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "dora": True, "target_modules": ["q_proj", "down_proj"]}


def trainer(
    lora: dict[str, Any], *, dtype: torch.dtype = torch.float32, base: Path | None = None, family: str = "llama"
) -> Trainer:
    torch.manual_seed(3)
    loaded = tiny.loaded(family, **(GPT2 if family == "gpt2" else {}))
    if base is not None:
        loaded = LoadedModel(loaded.model, loaded.tokenizer, str(base))
    return tiny_trainer.trainer(loaded=loaded, dtype=dtype, adam_eps=1e-8, lora=LoraConfig.model_validate(lora))


def trained(lora: dict[str, Any], **options: Any) -> Trainer:
    t = trainer(lora, **options)
    for _ in range(3):
        t.train_step(Batch(SAMPLES))
    return t


def adapted(lora: dict[str, Any]) -> set[str]:
    """Layers of the first block that have an adapter."""
    model = add_lora(tiny.model(tie_word_embeddings=False), LoraConfig.model_validate({"rank": 2, **lora}))
    found = {name.partition(".lora_A")[0] for name, p in model.named_parameters() if p.requires_grad}
    found = {name for name in found if ".lora_B" not in name}
    assert all(".layers." in name for name in found), "neither the embedding nor the output layer"
    return {name.rpartition(".")[2] for name in found if ".layers.0." in name}


def assert_same(ours: Stream, theirs: Stream, atol: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        np.testing.assert_allclose(values, theirs[key], atol=atol)


def test_all_linear_layers_but_the_output_layer_less_those_that_are_excluded() -> None:
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert adapted({"target_modules": ["all-linear"]}) == attention | mlp
    assert adapted({"target_modules": ["all-linear"], "exclude_modules": ["down_proj", "q_proj"]}) == (
        attention | mlp
    ) - {"down_proj", "q_proj"}
    assert adapted({"exclude_modules": ["model.layers.0.mlp.up_proj"]}) == (attention | mlp) - {"up_proj"}
    with pytest.raises(ValueError, match="model.lora.exclude_modules: the model has no layer 'typo'"):
        adapted({"exclude_modules": ["typo"]})
    with pytest.raises(ValueError, match='names layers beside "all-linear"'):
        Config.model_validate({"model": {"lora": {"rank": 2, "target_modules": ["all-linear", "q_proj"]}}})


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("llama", {"rslora": True}),
        ("gpt2", {"dora": True}),
        ("llama", {"rslora": True, "dora": True}),
    ],
    ids=str,
)
def test_saved_model_is_the_trained_policy_for_peft_and_merged(
    family: str, kinds: dict[str, bool], tmp_path: Path
) -> None:
    tiny.save(tmp_path / "base", family, **(GPT2 if family == "gpt2" else {}))
    targets = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "down_proj"]
    lora = {"rank": 4, "alpha": 5.3, "target_modules": targets, **kinds}
    t = trained(lora, base=tmp_path / "base", family=family)
    start = trainer(lora, base=tmp_path / "base", family=family).backend.compute_logprobs(SAMPLES)
    ours = t.backend.compute_logprobs(SAMPLES)
    assert max(float(np.abs(ours[k] - start[k]).max()) for k in ours) > 0.05
    t.backend.save_model(tmp_path / "saved")
    for folder in (tmp_path / "saved", tmp_path / "saved" / ADAPTER):
        assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.glob("*.safetensors"))
    options: dict[str, Any] = {"attn_implementation": "eager"}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options)
    from peft import PeftModel  # which takes seconds to import

    adapted = PeftModel.from_pretrained(base, tmp_path / "saved" / ADAPTER).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options).eval()
    for model in (adapted, merged):
        with torch.no_grad():
            assert_same({s.rollout_id: plain_logprobs(model, s).numpy() for s in SAMPLES}, ours)
    config = adapted.peft_config["default"]
    assert config.base_model_name_or_path == str(tmp_path / "base")
    assert (config.use_rslora, config.use_dora) == (kinds.get("rslora", False), kinds.get("dora", False))


def test_rslora_divides_by_the_root_of_the_rank_wherever_the_scale_is_said(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 6.0, "rslora": True, "target_modules": ["q_proj"]}
    t = trainer(lora)
    _, _, scale = names("model.layers.0.self_attn.q_proj")
    assert float(dict(at_once(t.backend.publish()))[scale]) == 6.0 / math.sqrt(4)
    t.backend.save_model(tmp_path)
    assert float(dict(read_adapter(tmp_path / ADAPTER, "it")[1])[scale]) == 3.0
    plain = trainer({**lora, "rslora": False})
    assert float(dict(at_once(plain.backend.publish()))[scale]) == 6.0 / 4


def engine_difference(t: Trainer, engine: EmbeddedEngine) -> float:
    """Largest difference between the log-probs that the engine says of its own tokens and the trainer's."""
    request = ExtendRequest("0", Prompt.of(range(3, 20)), (), 24, 0, SamplingParams(temperature=1.0))
    (segment,) = asyncio.run(engine.extend(request))
    made = sample("0", request.prompt.ids, segment.token_ids)
    return float(np.abs(t.backend.compute_logprobs([made])["0"] - segment.logprobs).max())


def test_with_dora_the_engine_is_given_whole_weights_and_samples_from_what_is_trained(tmp_path: Path) -> None:
    tiny.save(tmp_path / "base")
    t = trained(DORA, base=tmp_path / "base")
    model = tiny.model().requires_grad_(False)
    handed = dict(at_once(t.backend.publish()))
    assert handed.keys() == dict(model.named_parameters()).keys()
    engine = EmbeddedEngine(model, EngineConfig(kv_memory_gb=0.1))
    asyncio.run(engine.load_weights(1, handed.items()))
    assert engine_difference(t, engine) < 1e-4
    t.train_step(Batch(SAMPLES))
    assert engine_difference(t, engine) > 1e-3, "or this test could not see the difference"
    asyncio.run(engine.load_weights(2, at_once(t.backend.publish())))
    assert engine_difference(t, engine) < 1e-4
    t.backend.save_model(tmp_path / "saved")
    saved = ModelConfig(path=str(tmp_path / "saved"))
    loaded, adapter = load_with_adapter(saved, dtype=torch.float32, device=torch.device("cpu"))
    assert adapter == [], "what eval and sample answer with is merged, too"
    assert (
        engine_difference(t, EmbeddedEngine(loaded.model.requires_grad_(False), EngineConfig(kv_memory_gb=0.1))) < 1e-4
    )


def test_the_lengths_of_dora_are_trained_and_resumed() -> None:
    t = trained(DORA)
    tensors, meta = t.backend.save_state()
    lengths = [name for name in tensors if name.startswith("master/") and "lora_magnitude_vector" in name]
    assert len(lengths) == 4 and all(tensors[name].ndim == 1 for name in lengths)
    start = trainer(DORA).backend.save_state()[0]
    assert all(not torch.equal(tensors[name], start[name]) for name in lengths)
    resumed = restored(t, trainer(DORA))
    assert resumed.train_step(Batch(SAMPLES)) == t.train_step(Batch(SAMPLES))


# Adapters to begin with


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [({}, torch.bfloat16), ({"rslora": True}, torch.float32), ({"dora": True}, torch.bfloat16)],
    ids=str,
)
def test_training_begins_with_the_adapters_of_a_folder(
    dtype: torch.dtype, kind: dict[str, Any], tmp_path: Path
) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["all-linear"], "exclude_modules": ["k_proj"], **kind}
    t = trained(lora, dtype=dtype)
    t.backend.save_model(tmp_path)
    again = trainer({**lora, "path": str(tmp_path / ADAPTER)}, dtype=dtype)
    found, expected = tiny.local(again).optimizer.weights(), tiny.local(t).optimizer.weights()
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    assert_same(again.backend.compute_logprobs(SAMPLES), t.backend.compute_logprobs(SAMPLES), atol=0)
    before = again.backend.compute_logprobs(SAMPLES)
    again.train_step(Batch(SAMPLES))
    after = again.backend.compute_logprobs(SAMPLES)
    assert any(not np.array_equal(after[k], before[k]) for k in after)


def test_evaluation_of_a_configuration_is_of_the_adapters_that_training_would_begin_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["all-linear"]}
    tiny.save(tmp_path / "base")
    t = trained(lora, base=tmp_path / "base")
    t.backend.save_model(tmp_path / "saved")
    begins = {"path": str(tmp_path / "base"), "lora": {**lora, "path": str(tmp_path / "saved" / ADAPTER)}}
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    loaded, adapter = load_with_adapter(ModelConfig.model_validate(begins), **options)
    assert "its adapters are used over" in capsys.readouterr().err
    engine = EmbeddedEngine(loaded.model.requires_grad_(False), EngineConfig(kv_memory_gb=0.1))
    assert engine_difference(t, engine) > 1e-3
    asyncio.run(engine.load_weights(0, adapter))
    assert engine_difference(t, engine) < 1e-4
    gone = ModelConfig.model_validate({**begins, "lora": {**lora, "path": str(tmp_path / "gone")}})
    with pytest.raises(ValueError, match="model.lora.path = .*there is no adapter_config.json"):
        load_with_adapter(gone, **options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 8}, "model.lora.rank is 4, and it is 8 here. Set model.lora.rank = 4"),
        ({"alpha": 16.0}, "Set model.lora.alpha = 8.0"),
        ({"dora": True}, "Set model.lora.dora = false"),
        ({"rslora": True}, "Set model.lora.rslora = false"),
        ({"target_modules": ["q_proj"]}, "it has a model.layers.0.mlp.down_proj.lora_A.weight, and so is of other"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj"]}, "it has no model.layers.0.self_attn.v_proj"),
    ],
)
def test_what_does_not_fit_the_folder_is_said_with_what_to_set(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
    trainer(lora).backend.save_model(tmp_path)
    with pytest.raises(ValueError, match="model.lora.path") as refused:
        trainer({**lora, "path": str(tmp_path / ADAPTER), **change})
    assert said in str(refused.value)


def test_what_is_no_adapter_of_ours_is_refused(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"], "path": str(tmp_path / ADAPTER)}
    with pytest.raises(ValueError, match="there is no adapter_config.json. Give a folder that peft's save_pretrained"):
        trainer(lora)
    trainer({**lora, "path": ""}).backend.save_model(tmp_path)
    file = tmp_path / ADAPTER / "adapter_config.json"
    config = json.loads(file.read_text())
    for change, said in (
        ({"peft_type": "IA3"}, "it holds 'IA3', and .model.lora. is LoRA"),
        ({"rank_pattern": {"q_proj": 8}}, "its rank_pattern is"),
        ({"bias": "all"}, "it trained biases"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=said):
            trainer(lora)
    for content in (b"[]", b"\xff", b'{"r": "4"}'):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model.lora.path = .*adapter_config.json is damaged"):
            trainer(lora)
    file.write_text(json.dumps(config))
    weights = tmp_path / ADAPTER / "adapter_model.safetensors"
    whole = weights.read_bytes()
    tensors = load_file(weights)
    name = min(tensors)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=f"model.lora.path = .*{name} has a number that is not finite"):
        trainer(lora)
    weights.write_bytes(whole[:100])
    with pytest.raises(ValueError, match="model.lora.path = .*: it cannot be read: "):
        trainer(lora)
    weights.rename(tmp_path / ADAPTER / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"no adapter_model.safetensors.*is a pickle, and not read"):
        trainer(lora)


def test_dora_in_bfloat16_without_a_correction_is_refused() -> None:
    def config(dtype: str, **algorithm: Any) -> Config:
        return Config.model_validate({"model": {"dtype": dtype, "lora": DORA}, "algorithm": algorithm})

    with pytest.raises(ValueError, match="model.lora.dora: the engine is given whole weights .* rounded to bfloat16"):
        config("bfloat16", correction="none")
    config("float32", correction="none")
    config("bfloat16")
