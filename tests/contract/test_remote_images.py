"""Prompts with images over `rollover serve --engine embedded`, with a tiny Idefics3; and engines that take none."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")
pytest.importorskip("PIL")

import tiny
from contract.engine_contract import logprobs_of, tokens_of
from contract.server_client import Client
from rollover.config import Config
from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.vllm import content_parts
from rollover.engine.server import app
from rollover.engine.server.app import make_app
from rollover.http_server import HttpServer
from rollover.models.load import LoadedModel, load_model
from rollover.models.threads import Team
from rollover.models.vision import Vision, placeholder_ids
from rollover.trainer.passes import Passes
from rollover.types import Prompt, Sample, SamplingParams
from vision import served

NEAR, FAR = 1e-4, 1e-2  # nats, of float32 log-probs


def config(folder: Path, **engine: Any) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
        "engine": engine,
        "rollout": {"interrupt": "when_enough", "in_flight_groups": 16, "max_staleness": 1},
        "run": {"threads": 1},
        "algorithm": {"loss": "reinforce"},
    }
    return Config.model_validate(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.write(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(config(folder).model)


def beside_server(folder: Path, work: Callable[[str, RemoteEngine], Awaitable[None]]) -> None:
    """Run `work` with the URL of a server and an engine over it."""

    async def main() -> None:
        service = app.make_service(config(folder, kv_memory_gb=0.05, max_running=12))
        server = HttpServer(make_app(service))
        await server.start()
        loaded = load_model(config(folder).model)
        engine = RemoteEngine(
            RemoteSetup(
                config(folder, kind="remote", urls=[server.url], max_running=12),
                lambda: list(loaded.model.named_parameters()),
                loaded.tokenizer.decode,
                placeholders=lambda: placeholder_ids(loaded.model.config),
            )
        )
        try:
            await work(server.url, engine)
        finally:
            await engine.close()
            service.abort_all()
            await server.close()
            await service.engine.close()

    asyncio.run(main())


def asked(name: str, prompt: Prompt, **fields: Any) -> ExtendRequest:
    return replace(ExtendRequest(name, prompt, (), 12, 7, SamplingParams()), **fields)


def sample_of(request: ExtendRequest, tokens: list[int]) -> Sample:
    num, zeros = len(tokens), np.zeros(len(tokens), np.float32)
    return Sample(
        request.rollout_id,
        0,
        np.array(request.prompt.ids, np.int32),
        np.array(tokens, np.int32),
        np.ones(num, bool),
        {"behavior_logprobs": zeros, "versions": zeros.astype(np.int32), "advantages": zeros},
        temperature=1.0,
        media=request.prompt.media,
    )


def test_logprobs_and_resumption_are_those_of_the_trainer(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    assert loaded.processor is not None
    passes = Passes(loaded.model, Team(), 10_000, vision=Vision(loaded.model, loaded.processor, keeps=True))
    never = set(placeholder_ids(loaded.model.config))
    first, second = served.picture(tmp_path, 1), served.picture(tmp_path, 2)
    prompts = [served.prompt(loaded, *parts) for parts in ((first, "and", second), ("x", first), ("x", second))]
    assert prompts[1].ids == prompts[2].ids

    async def work(url: str, engine: RemoteEngine) -> None:
        begun = [asked(f"{g}-{k}", p, pause_after=5, seed=k) for g, p in enumerate(prompts) for k in range(4)]
        before = await asyncio.gather(*map(engine.extend, begun))
        later = [
            replace(r, generated_ids=tuple(tokens_of(s)), max_new_tokens=7, pause_after=0)
            for r, s in zip(begun, before, strict=True)
        ]
        after = await asyncio.gather(*map(engine.extend, later))
        assert engine.stats()["engine/lost_requests"] == 0
        for request, *parts in zip(begun, before, after, strict=True):
            tokens = [token for part in parts for token in tokens_of(part)]
            given = np.array([logprob for part in parts for logprob in logprobs_of(part)])
            assert len(tokens) == 12 and not never.intersection(tokens)

            def difference(to: Prompt, of: ExtendRequest = request, tokens: list[int] = tokens, given: Any = given):
                ours = passes.logprobs([sample_of(replace(of, prompt=to), tokens)])[of.rollout_id]
                return np.abs(ours - given).max()

            assert difference(request.prompt) < NEAR
            if request.prompt is not prompts[0]:
                other = prompts[1] if request.prompt is prompts[2] else prompts[2]
                assert difference(other) > FAR, "that it is another image is to be seen"

    beside_server(folder, work)


def test_images_of_later_turns_are_shown(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    assert loaded.processor is not None
    passes = Passes(loaded.model, Team(), 10_000, vision=Vision(loaded.model, loaded.processor, keeps=True))
    first, second = served.picture(tmp_path, 5), served.picture(tmp_path, 6)

    async def work(url: str, engine: RemoteEngine) -> None:
        request = asked("0-0", served.prompt(loaded, "x", first))
        for shown in ((second,), ("and", first, second)):
            turn = tokens_of(await engine.extend(request))
            request = served.answered(loaded, request, turn, *shown)
            answer = await engine.extend(request)
            ours = passes.logprobs([sample_of(served.as_prompt(request), tokens_of(answer))])["0-0"]
            assert np.abs(ours - np.array(logprobs_of(answer))).max() < NEAR

    beside_server(folder, work)


def test_a_server_takes_bytes_alone_and_checks_them(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    path = served.picture(tmp_path, 3)
    prompt = served.prompt(loaded, path, "what?")
    (part,) = content_parts(prompt.media)
    (other,) = content_parts(served.prompt(loaded, served.picture(tmp_path, 4)).media)
    assert str(tmp_path) not in str(part)
    no_image = "data:image/png;base64," + base64.b64encode(b"none").decode()
    wrong = [
        ({"url": path}, "content_parts[0].url"),
        ({"url": f"file://{path}"}, "content_parts[0].url"),
        ({"url": "http://127.0.0.1:1/x.png"}, "content_parts[0].url"),
        ({"url": no_image}, "content_parts"),
        ({"url": other["url"]}, "content_parts"),
        ({"digest": other["digest"]}, "content_parts"),
        ({"offset": part["offset"] + 1}, "token_ids"),
        ({"count": 3}, "content_parts"),
        ({"source": path}, "content_parts[0].source"),
        ({"type": "video_url"}, "content_parts[0].type"),
    ]

    async def work(url: str, engine: RemoteEngine) -> None:
        body = {"token_ids": prompt.ids, "sampling_params": {"max_tokens": 2}, "return_token_ids": True}
        async with Client(url) as client:
            for changes, param in wrong:
                status, answer = await client.post("/inference/v1/generate", body | {"content_parts": [part | changes]})
                assert (status, answer["error"]["param"]) == (400, param), (changes, answer)
            status, answer = await client.post("/inference/v1/generate", body | {"content_parts": [part]})
        assert status == 200 and answer["prompt_token_ids"] == list(prompt.ids)
        assert answer["mm_placeholders"] == {"image": [{"offset": part["offset"], "length": part["count"]}]}

    beside_server(folder, work)


def test_a_model_of_text_refuses_images_for_good(loaded: LoadedModel, tmp_path: Path) -> None:
    prompt = served.prompt(loaded, served.picture(tmp_path, 5))
    prompt = replace(prompt, ids=tuple(token % 90 for token in prompt.ids))

    async def work(url: str, engine: RemoteEngine) -> None:
        with pytest.raises(EngineDied, match="takes none: content_parts: this model takes text alone"):
            await engine.extend(asked("r", prompt))
        assert engine.stats()["engine/lost_requests"] == 0

    beside_server(tiny.save(tmp_path / "model"), work)
