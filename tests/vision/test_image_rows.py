"""Engine, trainer and transformers agree on rows with images: log-probs, gradients, interrupted generation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rollover.config import EngineConfig, LoraConfig, ModelConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.load import LoadedModel, load_model
from rollover.models.threads import Team
from rollover.models.vision import Vision, placeholder_ids, tower_modules
from rollover.tasks.prompts import encode_prompt
from rollover.trainer.lora import adapter_weights, add_lora
from rollover.trainer.passes import Passes, set_training
from rollover.types import Prompt, Sample, SamplingParams, Segment, Task
from vision import families

TOLERANCE = 1e-5
NEW = 12


@dataclass(frozen=True)
class Case:
    """A tiny model, and prompts: two images, one of these alone, text alone."""

    family: str
    folder: Path
    prompts: tuple[Prompt, ...]
    sources: tuple[tuple[Path, ...], ...]

    def load(self, **options: Any) -> LoadedModel:
        return load_model(ModelConfig(path=str(self.folder), **options))


@pytest.fixture(scope="module", params=families.FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def make(family: str, folder: Path) -> Case:
    families.write(family, folder)
    wide, square = folder / "wide.png", folder / "square.png"
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(wide)
    Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(square)
    contents: list[list[Path | str]] = [[wide, "what? ", square, " end"], ["first ", wide, "!"], ["only text"]]
    loaded = load_model(ModelConfig(path=str(folder)))
    return Case(
        family,
        folder,
        tuple(prompt(loaded, content) for content in contents),
        tuple(tuple(part for part in content if isinstance(part, Path)) for content in contents),
    )


def prompt(loaded: LoadedModel, content: Sequence[Path | str]) -> Prompt:
    parts = [
        {"type": "image", "image": str(part)} if isinstance(part, Path) else {"type": "text", "text": part}
        for part in content
    ]
    task = Task("t", "s", "r", messages=({"role": "user", "content": parts},))
    return encode_prompt(task, loaded.tokenizer, loaded.processor)


def vision(loaded: LoadedModel) -> Vision:
    found = Vision.from_model(loaded.model, loaded.processor)
    assert found is not None
    return found


def sample(rollout_id: str, group: int, prompt: Prompt, tokens: np.ndarray) -> Sample:
    num = len(tokens)
    zeros = np.zeros(num, np.float32)
    return Sample(
        rollout_id,
        group,
        np.array(prompt.ids, np.int32),
        tokens.astype(np.int32),
        np.ones(num, bool),
        {"behavior_logprobs": zeros, "versions": np.zeros(num, np.int32), "advantages": zeros},
        temperature=1.0,
        media=prompt.media,
    )


def answers(case: Case, loaded: LoadedModel) -> list[Sample]:
    """Two to each prompt, of different lengths: a row of two groups with images, which share one, and one of text."""
    random = np.random.default_rng(1)
    allowed = np.setdiff1d(np.arange(loaded.vocab_size), placeholder_ids(loaded.model.config))
    return [
        sample(f"{group}-{sibling}", group, prompt, random.choice(allowed, 2 + 9 * sibling + 3 * group))
        for group, prompt in enumerate(case.prompts)
        for sibling in range(2)
    ]


def reference_logprobs(case: Case, model: Any, loaded: LoadedModel, s: Sample) -> torch.Tensor:
    """Of transformers' own model, one sequence at a time, with all of its images."""
    ids = torch.from_numpy(np.concatenate((s.prompt_ids, s.token_ids)).astype(np.int64))[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if s.media:
        pixels = [loaded.processor.pixels(image) for image in s.media]
        if case.family in ("smolvlm", "idefics3"):  # [1, tiles of all images, ...]
            inputs |= {name: padded([p[name] for p in pixels]) for name in pixels[0]}
        elif case.family == "mistral3":
            sizes = torch.cat([p["image_sizes"] for p in pixels])
            inputs |= {"pixel_values": padded_sizes([p["pixel_values"] for p in pixels]), "image_sizes": sizes}
        else:
            inputs |= {name: torch.cat([p[name] for p in pixels]) for name in pixels[0]}
        kinds = torch.zeros_like(ids)
        for image in s.media:
            kinds[0, image.offset : image.offset + image.count] = 1
        inputs |= {"gemma3": {"token_type_ids": kinds}, "qwen2_5_vl": {"mm_token_type_ids": kinds}}.get(
            case.family.replace("qwen3_vl", "qwen2_5_vl"), {}
        )
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None  # which it remembers of the call before
    logits = model(**inputs).logits[0, len(s.prompt_ids) - 1 : -1].clone()
    logits[:, list(placeholder_ids(model.config))] = -1e9
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(s.prompt_ids) :, None])[:, 0]


def padded(tiles: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tiles, 1)


def padded_sizes(images: list[torch.Tensor]) -> torch.Tensor:
    """Images of several sizes in one batch, with zeros right and below."""
    height, width = (max(image.shape[axis] for image in images) for axis in (-2, -1))
    return torch.cat([torch.nn.functional.pad(i, (0, width - i.shape[-1], 0, height - i.shape[-2])) for i in images])


def reference(case: Case) -> Any:
    return AutoModelForImageTextToText.from_pretrained(case.folder, attn_implementation="eager").eval()


@torch.no_grad()
def test_log_probs_of_a_row_are_those_of_transformers(case: Case) -> None:
    loaded, plain = case.load(), reference(case)
    samples = answers(case, loaded)
    got = Passes(loaded.model, Team(), 10_000, vision=vision(loaded)).logprobs(samples)
    for s in samples:
        expected = reference_logprobs(case, plain, loaded, s)
        np.testing.assert_allclose(got[s.rollout_id], expected, atol=TOLERANCE, rtol=0)
    first, last = samples[0].media[0], samples[0].media[-1]
    if (first.count, first.grid) == (last.count, last.grid):  # the same tokens, with the images exchanged
        exchanged = (replace(last, offset=first.offset), replace(first, offset=last.offset))
        other = sample("x", 0, Prompt(case.prompts[0].ids, exchanged), samples[0].token_ids)
        changed = Passes(loaded.model, Team(), 10_000, vision=vision(loaded)).logprobs([other])["x"]
        assert np.abs(changed - got["0-0"]).max() > 1e-4


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_gradients_are_those_of_transformers(case: Case, tower: str) -> None:
    loaded, plain = case.load(vision=tower), reference(case)
    samples = answers(case, loaded)
    torch.stack([reference_logprobs(case, plain, loaded, s).sum() for s in samples]).sum().backward()
    passes = Passes(loaded.model, Team(), 10_000, vision=vision(loaded))
    passes.forward(passes.pack(samples))[0].sum().backward()
    expected, compared = dict(plain.named_parameters()), 0
    for name, parameter in loaded.model.named_parameters():
        if not parameter.requires_grad:
            assert tower == "frozen" and parameter.grad is None
            continue
        gradient, other = (torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, expected[name]))
        scale = max(float(other.abs().max()), 1e-2)  # a bias of keys has none but by rounding
        assert float((gradient - other).abs().max()) < 1e-4 * scale, name
        compared += int(other.any())
    frozen = [p for p in loaded.model.parameters() if not p.requires_grad]
    assert compared > 10 and bool(frozen) == (tower == "frozen")


def test_adapters_are_on_the_language_model(case: Case) -> None:
    for tower in ("frozen", "trained"):
        model = add_lora(case.load(vision=tower).model, LoraConfig(rank=2, target_modules=["all-linear"]))
        plain = model.get_base_model()
        of_text = {id(p) for p in plain.get_decoder().parameters()}
        adapters = [p for p in model.parameters() if p.requires_grad]
        assert adapters and all(id(p) in of_text for p in adapters) == (tower == "frozen")


def engine(case: Case, **options: Any) -> EmbeddedEngine:
    loaded = case.load()
    config = EngineConfig(kv_memory_gb=0.05, **options)
    return EmbeddedEngine(loaded.model.requires_grad_(False), config, processor=loaded.processor)


def ask(name: str, prompt: Prompt) -> ExtendRequest:
    return ExtendRequest(name, prompt, (), NEW, seed=hash(prompt.ids) % 2**31, sampling=SamplingParams())


def tokens(segments: list[Segment]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([s.token_ids for s in segments]), np.concatenate([s.logprobs for s in segments])


def test_a_model_of_text_refuses_an_image(case: Case) -> None:
    loaded = case.load()
    with pytest.raises(ValueError, match="takes text alone"):
        Passes(loaded.model, Team(), 10_000).logprobs(answers(case, loaded)[:1])


def test_dropout_of_a_tower_is_off(tmp_path: Path) -> None:
    folder = families.write("gemma3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(ModelConfig(path=str(folder), vision="trained")).model
    set_training(model, True)
    assert model.get_decoder().training and not any(module.training for _, module in tower_modules(model))
    assert any("attn" in name for name, _ in tower_modules(model))


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_the_engine_has_adapters_of_the_tower(tmp_path: Path, family: str) -> None:
    """Of a model that the fast decoder computes, and of another one."""
    case = make(family, tmp_path)
    loaded = case.load(vision="trained")
    adapted = add_lora(loaded.model, LoraConfig(rank=2, alpha=8, target_modules=["all-linear"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    under_test = engine(case)

    async def generate() -> list[Segment]:
        await under_test.load_weights(1, adapter_weights(adapted.get_base_model()))
        out = await under_test.extend(ask("0", case.prompts[0]))
        await under_test.close()
        return out

    ids, logprobs = tokens(asyncio.run(generate()))
    of_trainer = Vision.from_model(adapted.get_base_model(), loaded.processor)
    passes = Passes(adapted.get_base_model(), Team(), 10_000, vision=of_trainer)
    got = passes.logprobs([sample("0", 0, case.prompts[0], ids)])["0"]
    np.testing.assert_allclose(got, logprobs, atol=TOLERANCE, rtol=0)
    assert of_trainer is not None and not of_trainer.keeps


def test_texts_between_the_crops_of_an_image_are_causal(tmp_path: Path) -> None:
    folder = families.write("gemma3", tmp_path)
    Image.new("RGB", (60, 20), "red").save(tmp_path / "long.png")
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 3,
             "pan_and_scan_min_ratio_to_activate": 1.2}  # fmt: skip
    loaded = load_model(ModelConfig(path=str(folder), processor_kwargs=crops))
    found = vision(loaded).place_images(prompt(loaded, [tmp_path / "long.png", "what?"]))
    assert len(found.bidirectional) > 1 and all(end - start == 4 for start, end in found.bidirectional)


def test_prompts_share_keys_and_values_where_their_images_are_equal(tmp_path: Path) -> None:
    """Two images of one size have equal token ids."""
    case = make("qwen2_5_vl", tmp_path)
    Image.new("RGB", (32, 24), "red").save(tmp_path / "other.png")
    loaded = case.load()
    one, other = (prompt(loaded, [tmp_path / name, "what?"]) for name in ("wide.png", "other.png"))
    assert one.ids == other.ids and one != other
    under_test = engine(case)

    async def generate() -> None:
        await asyncio.gather(*(under_test.extend(ask(str(i), p)) for i, p in enumerate((one, other, one))))
        await under_test.close()

    asyncio.run(generate())
    assert under_test.stats()["kv/shared_prompt_tokens"] == len(one) - 1, "one of three"
