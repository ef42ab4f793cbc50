"""Rollouts with images by vLLM: its log-probs are the trainer's, and an image is never taken for another one."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.engine_contract import logprobs_of, tokens_of
from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.models.load import LoadedModel, as_in_files
from rollover.models.threads import Team
from rollover.models.vision import Vision, placeholder_ids
from rollover.trainer.passes import Passes
from rollover.types import Prompt, Sample, SamplingParams, Segment
from vision import served
from vllm_server.engines import config
from vllm_server.serving import VllmServer

pytestmark = pytest.mark.vllm

NEAR = 1e-4  # nats, of float32 log-probs
FAR = 1e-2
NEW_TOKENS = 24


@dataclass
class Subject:
    """A server of a tiny Idefics3, and the trainer's side of it."""

    url: str
    folder: Path
    loaded: LoadedModel
    passes: Passes

    def prompt(self, *parts: str) -> Prompt:
        return served.prompt(self.loaded, *parts)

    def engine(self, *, keeps: bool = False) -> RemoteEngine:
        """`keeps`: the server keeps what it has computed when the weights change, those of the tower among them."""
        model, of = self.loaded.model, config(self.folder, urls=[self.url])
        if keeps:
            rollout, vision = of.rollout.model_copy(update={"kv_on_resume": "keep"}), {"vision": "trained"}
            of = of.model_copy(update={"rollout": rollout, "model": of.model.model_copy(update=vision)})
        return RemoteEngine(
            RemoteSetup(
                of,
                lambda: list(model.named_parameters()),
                self.loaded.tokenizer.decode,
                vocab_size=lambda: self.loaded.vocab_size,
                placeholders=lambda: placeholder_ids(model.config),
                names=lambda tensors: as_in_files(model, tensors),
            )
        )

    def difference(self, request: ExtendRequest, segments: Sequence[Segment]) -> float:
        """The largest |log-prob of the engine - log-prob of the trainer| of the sampled tokens, in nats."""
        tokens = np.array([*request.generated_ids, *tokens_of(segments)], np.int32)
        num, new = len(tokens), len(tokens) - len(request.generated_ids)
        sample = Sample(
            request.rollout_id,
            0,
            np.array(request.prompt.ids, np.int32),
            tokens,
            np.ones(num, bool),
            {
                "behavior_logprobs": np.zeros(num, np.float32),
                "versions": np.zeros(num, np.int32),
                "advantages": np.zeros(num, np.float32),
            },
            temperature=1.0,
            media=request.prompt.media,
        )
        ours = self.passes.logprobs([sample])[request.rollout_id]
        return float(np.abs(ours[-new:] - np.array(logprobs_of(segments))).max())

    def change(self) -> list[tuple[str, torch.Tensor]]:
        """Move all weights, those of the tower too; returns them."""
        model = self.loaded.model
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * parameter.std().nan_to_num(0.0)
                parameter.add_(0.1 * noise)
        assert self.passes.vision is not None
        self.passes.vision.forget()
        return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.fixture(scope="module")
def vision_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = served.write(tmp_path_factory.mktemp("idefics3"))
    running = VllmServer(folder, tmp_path_factory.mktemp("server"), "secret", served.PROCESSOR_KWARGS)
    yield running
    running.close()


@pytest.fixture
def subject(vision_server: VllmServer, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", vision_server.token)
    loaded = served.load(vision_server.model)
    assert loaded.processor is not None
    passes = Passes(loaded.model, Team(), 10_000, vision=Vision(loaded.model, loaded.processor, keeps=True))
    return Subject(vision_server.url, vision_server.model, loaded, passes)


def asked(name: str, prompt: Prompt, **fields: Any) -> ExtendRequest:
    seed = zlib.crc32(name.encode())
    defaults = {"generated_ids": (), "max_new_tokens": NEW_TOKENS, "seed": seed, "sampling": SamplingParams()}
    return ExtendRequest(name, prompt, **{**defaults, **fields})


def run(engine: RemoteEngine, work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            await work()
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_logprobs_with_images_are_those_of_the_trainer(subject: Subject, tmp_path: Path) -> None:
    first, second = served.picture(tmp_path, 1), served.picture(tmp_path, 2)
    make = subject.prompt
    prompts = [make(first, "what? ", second, "!"), make("x", first), make("x", second), make("text alone")]
    assert prompts[1].ids == prompts[2].ids, "images of one size have equal ids"
    never = set(placeholder_ids(subject.loaded.model.config))
    engine = subject.engine()

    async def generate(version: int) -> None:
        requests = [asked(f"{version}-{g}-{k}", p) for g, p in enumerate(prompts) for k in range(3)]
        answers = await asyncio.gather(*map(engine.extend, requests))
        assert {s.policy_version for segments in answers for s in segments} == {version}
        assert not never & {token for segments in answers for token in tokens_of(segments)}
        differences = [subject.difference(*pair) for pair in zip(requests, answers, strict=True)]
        print(f"version {version}: at most {max(differences):.1e} nats over {len(requests) * NEW_TOKENS} tokens")
        assert max(differences) < NEAR
        swapped = replace(requests[3], prompt=prompts[2])
        assert subject.difference(swapped, answers[3]) > FAR, "that it is another image is to be seen"

    async def work() -> None:
        await generate(0)
        await engine.load_weights(1, subject.change())
        await generate(1)

    run(engine, work)


def test_images_of_later_turns_are_shown(subject: Subject, tmp_path: Path) -> None:
    first, second = served.picture(tmp_path, 5), served.picture(tmp_path, 6)
    engine = subject.engine()

    async def work() -> None:
        request = asked("later", subject.prompt("x", first))
        turn = tokens_of(await engine.extend(request))
        request = served.answered(subject.loaded, request, turn, "and", second, first)
        answer = await engine.extend(request)
        assert subject.difference(served.as_prompt(request), answer) < NEAR

    run(engine, work)


def test_an_interrupted_rollout_resumes_with_its_images(subject: Subject, tmp_path: Path) -> None:
    request = asked("r", subject.prompt(served.picture(tmp_path, 3), "what?"), pause_after=7)
    engine = subject.engine()

    async def work() -> None:
        before = await engine.extend(request)
        tokens = tokens_of(before)
        assert len(tokens) == 7
        later = replace(request, generated_ids=tuple(tokens), max_new_tokens=NEW_TOKENS - 7, pause_after=0)
        after = await engine.extend(later)
        assert len(tokens_of(after)) == NEW_TOKENS - 7
        assert subject.difference(request, before) < NEAR and subject.difference(later, after) < NEAR

    run(engine, work)


def test_the_prefix_cache_takes_no_image_for_another(subject: Subject, tmp_path: Path) -> None:
    text = "a long text, so that the image is in a block of the cache " * 5
    first, second = (subject.prompt(served.picture(tmp_path, seed), text) for seed in (4, 5))
    engine = subject.engine()

    async def work() -> None:
        for name, prompt, shared in (("a", first, False), ("b", second, False), ("c", first, True)):
            before = engine.stats()["kv/shared_prompt_tokens"]
            request = asked(name, prompt)
            assert subject.difference(request, await engine.extend(request)) < NEAR
            assert (engine.stats()["kv/shared_prompt_tokens"] > before) == shared

    run(engine, work)


def test_new_weights_of_the_tower_count_where_caches_are_kept(subject: Subject, tmp_path: Path) -> None:
    prompt = subject.prompt(served.picture(tmp_path, 6), "what?")
    engine = subject.engine(keeps=True)

    async def work() -> None:
        first, second = asked("a", prompt), asked("b", prompt)
        assert subject.difference(first, await engine.extend(first)) < NEAR
        await engine.load_weights(1, subject.change())
        assert subject.difference(second, await engine.extend(second)) < NEAR

    run(engine, work)


def test_another_expansion_is_an_error_that_names_the_image(subject: Subject, tmp_path: Path) -> None:
    path = served.picture(tmp_path, 7)
    prompt = subject.prompt(path, "what?")
    (image,) = prompt.media
    at = image.offset + 1  # within a run of placeholders
    more = Prompt((*prompt.ids[:at], prompt.ids[at], *prompt.ids[at:]), (replace(image, count=image.count + 1),))
    fewer = Prompt(prompt.ids[:at] + prompt.ids[at + 1 :], (replace(image, count=image.count - 1),))
    engine = subject.engine()

    async def work() -> None:
        for name, wrong in (("more", more), ("fewer", fewer)):
            with pytest.raises(ValueError, match=f"image {path}: the server"):
                await engine.extend(asked(name, wrong))
        Path(path).write_bytes(Path(served.picture(tmp_path, 8)).read_bytes())
        fresh = replace(image, digest="0" * 64)  # what was encoded before is kept under the other digest
        with pytest.raises(ValueError, match=f"image {path} has changed"):
            await engine.extend(asked("changed", replace(prompt, media=(fresh,))))

    run(engine, work)


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_no_client_makes_it_open_files_or_urls(
    subject: Subject, vision_server: VllmServer, tmp_path: Path, scheme: str
) -> None:
    path = served.picture(tmp_path, 10)
    prompt, url = subject.prompt(path, "what?"), {"file": f"file://{path}", "http": "http://127.0.0.1:9/x"}
    parts = [{"type": "image_url", "url": url[scheme]}]
    body = {"token_ids": prompt.ids, "content_parts": parts, "sampling_params": {"max_tokens": 1}}
    with vision_server.ask("POST", "/inference/v1/generate", body) as answer:
        said = answer.read().decode()
        assert answer.status in (400, 422, 500)
    assert "allowed" in said, said


def test_a_model_of_text_refuses_images_for_good(
    server: VllmServer, subject: Subject, tmp_path: Path, old: Any, model_folder: Path
) -> None:
    prompt = subject.prompt(served.picture(tmp_path, 9), "what?")
    ids = tuple(token % 90 for token in prompt.ids)
    engine = RemoteEngine(
        RemoteSetup(config(model_folder, urls=[server.url]), lambda: list(old.named_parameters()), str)
    )

    async def work() -> None:
        with pytest.raises(EngineDied, match="takes none: .* is not a multimodal model"):
            await engine.extend(asked("r", replace(prompt, ids=ids)))
        assert engine.stats()["engine/lost_requests"] == 0

    run(engine, work)
