"""The embedded engine behind the endpoints passes the servers' contract. In this process, over a real connection."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import tiny
from contract import server_contract
from contract.server_client import Client, ErrorEvent
from contract.server_contract import asked
from rollover.config import Config
from rollover.engine.server import app as server_app
from rollover.engine.server.app import make_app, make_service
from rollover.engine.server.requests import GenerateBody
from rollover.engine.server.service import Service
from rollover.engine.server.texts import TextEndpoints
from rollover.http_server import HttpServer
from rollover.openai_wire import checked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), head_dim=32)


def config(folder: Path, dtype: str) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": dtype, "device": "cpu"},
        "engine": {"kv_memory_gb": 0.05, "max_running": 8},
        "run": {"threads": 1},
    }
    return Config.model_validate(values)


def served(folder: Path, body, token: str = "", dtype: str = "float32", *, texts: bool = False) -> Any:
    """What `body(url, service)` gives, beside a server, which has the endpoints of texts, too, where it is to."""

    async def main() -> Any:
        service = make_service(config(folder, dtype))
        app = make_app(service, TextEndpoints(service, service.tokenizer)) if texts else make_app(service)
        server = HttpServer(app, token=token)
        await server.start()
        try:
            return await body(server.url, service)
        finally:
            service.abort_all()
            await server.close()
            await service.engine.close()

    return asyncio.run(main())


def subject(folder: Path, url: str, files: Path) -> server_contract.Subject:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return server_contract.Subject(url, model, files, max_model_len=1024, eos=1)


@pytest.mark.parametrize("check", server_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check, folder: Path, tmp_path: Path) -> None:
    async def body(url: str, service: Service) -> None:
        await server_contract.run(check, subject(folder, url, tmp_path))

    served(folder, body)


def test_every_path_wants_the_token_where_there_is_one(folder: Path) -> None:
    async def body(url: str, service: Service) -> None:
        for token in ("", "wrong", "secre", "secrets"):
            async with Client(url, token) as client:
                for path in ("/health", "/v1/models", "/weight_info", "/no_such_path"):
                    status, answer = await client.get(path)
                    assert status == 401 and "ROLLOVER_SERVER_TOKEN" in answer["error"]["message"]
                for path in ("/inference/v1/generate", "/pause", "/update_weights", "/abort_requests"):
                    assert (await client.post(path, asked([5])))[0] == 401
        assert not service.is_paused and not service.streams
        async with Client(url, "secret") as client:
            assert len((await client.generate(asked([5, 6]))).tokens) == 12

    served(folder, body, token="secret")


def test_what_is_not_honoured_is_refused_by_name(folder: Path) -> None:
    changes = {"n": 2, "presence_penalty": 0.5, "bad_words": ["a"], "logprobs": 5, "temprature": 1.0}

    async def body(url: str, service: Service) -> None:
        async with Client(url) as client:
            for name, value in changes.items():
                status, answer = await client.post("/inference/v1/generate", asked([5], **{name: value}))
                assert status == 400 and answer["error"]["param"] == f"sampling_params.{name}"

    served(folder, body)


def test_a_text_that_is_no_unicode_is_refused_wherever_it_stands(folder: Path) -> None:
    """The answer would repeat an id, and every later answer the label of the weights."""

    async def body(url: str, service: Service) -> None:
        async with Client(url) as client:
            for path, of in (
                ("/inference/v1/generate", asked([5]) | {"request_id": "\ud800"}),
                ("/update_weight_version", {"new_version": "\ud800"}),
                ("/finish_weight_update", {"weight_version": "\ud800"}),
            ):
                status, answer = await client.post(path, of)
                assert status == 400 and "no Unicode" in answer["error"]["message"], path
            assert len((await client.generate(asked([5, 6]))).tokens) == 12

    served(folder, body)


def test_a_stop_string_ends_it_and_is_named(folder: Path) -> None:
    async def body(url: str, service: Service) -> None:
        async with Client(url) as client:
            whole = await client.generate(asked([5, 6, 7]))

            def decode(tokens: list[int]) -> str:
                return str(tiny.tokenizer().decode(tokens))

            stop = decode(whole.tokens[3:5])
            answer = await client.generate(asked([5, 6, 7], stop=["no such text", stop]))
            assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
            num = next(num for num in range(13) if stop in decode(whole.tokens[:num]))
            assert answer.tokens == whole.tokens[:num]

    served(folder, body)


def test_an_engine_that_fails_ends_the_stream_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(url: str, service: Service) -> None:
        async with Client(url) as client:
            async with server_contract.running(client, asked([5], max_tokens=500)) as events:
                monkeypatch.setattr(service.engine, "step", lambda: 1 / 0)
                with pytest.raises(ErrorEvent, match="ZeroDivisionError") as failed:
                    await server_contract.rest(events)
            assert failed.value.code == 500 and not service.streams
            monkeypatch.undo()
            assert len((await client.generate(asked([5]))).tokens) == 12, "it goes on for others"

    served(folder, body)


def test_a_log_prob_that_is_none_is_vllm_s_number_for_it(folder: Path) -> None:
    async def body(url: str, service: Service) -> None:
        async with Client(url) as client:
            async with server_contract.running(client, asked([5], max_tokens=5)) as events:
                (stream,) = service.streams.values()
                stream.on_token(5, float("nan"), None)
                assert -9999.0 in (await server_contract.rest(events)).logprobs

    served(folder, body)


def test_weights_that_are_loaded_in_part_end_the_server(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Nothing may be sampled with half a model: it does not go on as if the update had been refused."""
    ended: list[str] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    async def body(url: str, service: Service) -> None:
        async def breaks_off(*args: object) -> None:
            raise RuntimeError("no memory")

        monkeypatch.setattr(service.engine, "load_weights", breaks_off)
        here = subject(folder, url, tmp_path)
        async with Client(url) as client:
            await client.ok("/start_weight_update")
            info = here.write("new", here.weights(1.1))
            assert (await client.post("/update_weights", {"update_info": info}))[0] == 500

    served(folder, body)
    assert ended == [1]


def test_an_update_begins_with_its_start(folder: Path, tmp_path: Path) -> None:
    async def body(url: str, service: Service) -> None:
        here = subject(folder, url, tmp_path)
        async with Client(url) as client:
            info = {"update_info": here.write("new", here.weights(1.1))}
            assert (await client.post("/update_weights", info))[0] == 500
            await client.ok("/start_weight_update")
            await client.ok("/update_weights", info)

    served(folder, body)


def test_update_invalid_path_is_refused_without_details(folder: Path, tmp_path: Path) -> None:
    """Neither a hang, nor whether something is there, nor the digest of what is; and the next update works."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text("of the owner")
    paths = ["/dev/zero", "/dev/stdin", "/proc/self/mem", str(tmp_path), str(tmp_path / "pipe")]
    paths += [str(tmp_path / "secret"), str(tmp_path / "none"), "/etc/passwd", "a\0b", ""]

    async def body(url: str, service: Service) -> None:
        here = subject(folder, url, tmp_path)
        async with Client(url) as client:
            said = set()
            for path in paths[:-1]:
                await client.ok("/start_weight_update")
                info = {"path": path, "sha256": "0" * 64}
                status, answer = await asyncio.wait_for(client.post("/update_weights", {"update_info": info}), 30)
                assert status == 500
                said.add(answer["error"]["message"].replace(path, "PATH"))
            for path in paths:
                check, found = {"method": "rollover_verify", "args": [path, "0" * 64]}, ["verifying"]
                assert (await client.ok("/collective_rpc", check))["results"] == found, "at first of any path"
                while found == ["verifying"]:
                    found = (await client.ok("/collective_rpc", check))["results"]
                said.add(found[0].replace(path, "PATH") if path else "refused: PATH" + found[0][9:])
            (message,) = said
            assert message.startswith("refused: PATH is not there for this server, or not the weights file")
            await server_contract.update(client, here.write("new", here.weights(1.3)), "run-1/1")

    served(folder, body)


def test_a_body_without_end_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a path reads one, also where it may be empty."""
    monkeypatch.setattr(server_app, "MOST_BODY_BYTES", 1000)

    async def body(url: str, service: Service) -> None:
        async with Client(url) as client:
            for path in ("/inference/v1/generate", "/finish_weight_update", "/abort_requests", "/collective_rpc"):
                status, answer = await client.post(path, data=b" " * 1001)
                assert status == 400 and "1,001 bytes: at most 1,000 are read" in answer["error"]["message"], path
            assert (await client.post("/finish_weight_update", data=b""))[0] == 200

    served(folder, body)


def test_weights_of_another_dtype_are_rounded_to_the_engine_s(folder: Path, tmp_path: Path) -> None:
    """A float32 trainer's file, as packed layers take it."""

    async def body(url: str, service: Service) -> None:
        here, prompt = subject(folder, url, tmp_path), [5, 6, 7]
        async with Client(url) as client:
            await server_contract.update(client, here.write("new", here.weights(1.3)), "run-1/1")
            await client.ok("/resume")
            answer = await client.generate(asked(prompt))
            expected = here.logprobs(prompt, answer.tokens, factor=1.3)
            far = abs(here.logprobs(prompt, answer.tokens) - expected).max()
            assert abs(answer.logprobs - expected).max() < 0.25 < far

    served(folder, body, dtype="bfloat16")


@pytest.mark.parametrize("reads", [True, False])
def test_pause_waits_for_sent_tokens_not_for_slow_clients(folder: Path, reads: bool) -> None:
    async def body(url: str, service: Service) -> None:
        stream = await service.generate(checked(GenerateBody, asked([5], max_tokens=900)))

        async def read_slowly() -> None:
            async for _ in stream.chunks():
                await asyncio.sleep(0.05)

        reading = asyncio.ensure_future(read_slowly()) if reads else None
        while stream.num_tokens < 5:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(service.pause("keep", clear_cache=False), 100)
        assert service.is_paused and stream.delivered == reads
        service.abort_all()
        if reading is not None:
            await reading

    served(folder, body)


def test_server_asleep_frees_memory_and_wakes_with_new_weights(folder: Path, tmp_path: Path) -> None:
    """What is asked meanwhile waits; weights have no room before their memory is back."""

    async def body(url: str, service: Service) -> None:
        of = subject(folder, url, tmp_path)
        async with Client(url) as client:
            cut = asyncio.ensure_future(client.generate(asked(of.prompt(), "r.1", max_tokens=900)))
            while not service.streams:
                await asyncio.sleep(0.01)
            await client.ok("/sleep?level=2")
            assert (await cut).finish_reason == "abort"
            assert await client.get("/is_sleeping") == (200, {"is_sleeping": True})
            assert (await client.get("/weight_info"))[0] == 200 and await client.get("/is_paused") == (
                200,
                {"is_paused": True},
            )
            assert service.engine.stats()["kv/bytes"] == 0
            await client.ok("/resume")
            waiting = asyncio.ensure_future(client.generate(asked(of.prompt(), "r.2")))
            info = of.write("double", of.weights(1.1))
            await client.ok("/start_weight_update")
            status, said = await client.post("/update_weights", {"update_info": info})
            assert status == 500 and "wake_up?tags=weights" in said["error"]["message"]
            await client.ok("/wake_up?tags=weights")
            await server_contract.update(client, info, "run/1")
            await client.ok("/resume")
            assert not waiting.done() and await client.get("/is_sleeping") == (200, {"is_sleeping": True})
            await client.ok("/wake_up?tags=kv_cache")
            answer = await waiting
            assert answer.spans == [("run/1", 0, len(answer.tokens))]
            wanted = of.logprobs(of.prompt(), answer.tokens, 1.1)
            assert abs(wanted - answer.logprobs).max() < server_contract.NEAR

    served(folder, body)


def test_server_asleep_at_level_1_keeps_its_weights(folder: Path, tmp_path: Path) -> None:
    async def body(url: str, service: Service) -> None:
        of = subject(folder, url, tmp_path)
        async with Client(url) as client:
            await client.ok("/sleep")
            await client.ok("/sleep?level=1")
            await client.ok("/wake_up")
            answer = await client.generate(asked(of.prompt()))
            assert abs(of.logprobs(of.prompt(), answer.tokens) - answer.logprobs).max() < server_contract.EQUAL

    served(folder, body)


def test_server_at_level_2_samples_nothing_before_new_weights(folder: Path, tmp_path: Path) -> None:
    async def body(url: str, service: Service) -> None:
        of = subject(folder, url, tmp_path)
        async with Client(url) as client:
            await client.ok("/sleep?level=2")
            await client.ok("/wake_up")
            waiting = asyncio.ensure_future(client.generate(asked(of.prompt())))
            await client.ok("/resume")
            assert not waiting.done() and await client.get("/is_paused") == (200, {"is_paused": True})
            await server_contract.update(client, of.write("same", of.weights()), "run/1")
            await client.ok("/resume")
            assert (await waiting).finish_reason == "length"

    served(folder, body)
