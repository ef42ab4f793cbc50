"""Checks that every server must pass which engine/remote talks to: `rollover serve --engine embedded` and vLLM alike.

    SUBJECT = server_contract.Subject(url, model, folder, ...)
    for check in server_contract.CHECKS:
        asyncio.run(server_contract.run(check, SUBJECT))

`check_before_the_first_update` wants a server that has had none. Every other one begins with the model's own weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from contract.server_client import LIMIT_S, Answer, Client, ErrorEvent

# Differences of log-probs in float32: under the same weights, new ones after other computations, other weights.
EQUAL, NEAR, FAR = 1e-5, 1e-4, 1e-2


@dataclass(frozen=True)
class Subject:
    """A server at `url` with `model` (a Hugging Face causal LM in float32) and its weights.

    `folder`: the server sees files in it. `max_model_len`: as /v1/models tells. `long_prompt`: tokens after which a
    prefix is shared (vLLM: of whole blocks). `eos`: the model's.
    """

    url: str
    model: Any
    folder: Path
    max_model_len: int
    eos: int
    long_prompt: int = 8
    token: str = ""

    def prompt(self, num: int = 5, seed: int = 0) -> list[int]:
        """Token ids of letters."""
        return np.random.default_rng(seed).integers(10, 90, num).tolist()

    def logprobs(
        self, prompt: list[int], tokens: list[int], factor: float = 1.0, temperature: float = 1.0
    ) -> np.ndarray:
        """Of `tokens` after `prompt`, by the model with its weights times `factor`."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)
            logits = self.model(torch.tensor([prompt + tokens])).logits[0]
            for name, parameter in self.model.named_parameters():
                parameter.copy_(before[name])
        of_all = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, -1)
        return of_all.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()

    def weights(self, factor: float = 1.0, **changes: Any) -> dict[str, torch.Tensor]:
        """All of the model's, times `factor`. `changes`: by name, in place of what there is; None: left out."""
        made = {n: (p.detach() * factor).contiguous() for n, p in self.model.named_parameters()}
        return {n: t for n, t in {**made, **changes}.items() if t is not None}

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        """The `update_info` of a file with these."""
        path = self.folder / f"{name}.safetensors"
        save_file(tensors, path)
        return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def asked(prompt: list[int], request_id: str = "r.1", **sampling: Any) -> dict[str, Any]:
    """The body of a request, as engine/remote makes it."""
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": 0, "ignore_eos": True} | sampling
    return {"request_id": request_id, "token_ids": prompt, "sampling_params": params}


async def update(client: Client, info: dict[str, str], label: str, *, clear_cache: bool = True) -> None:
    """New weights, as engine/remote hands them over; it does not resume."""
    await client.ok(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}")
    await client.ok("/start_weight_update")
    await client.ok("/update_weights", {"update_info": info})
    await client.ok("/finish_weight_update", {"weight_version": label})


async def run(check: Callable[[Client, Subject], Awaitable[None]], subject: Subject) -> None:
    """One check, from the model's own weights on."""
    async with Client(subject.url, subject.token) as client:
        if check is not check_before_the_first_update:
            await client.ok("/abort_requests", {})
            await update(client, subject.write("own", subject.weights()), "own/0")
            await client.ok("/resume")
        await asyncio.wait_for(check(client, subject), 3 * LIMIT_S)


async def refused(client: Client, body: dict[str, Any]) -> str:
    """The reason: as status 400 before the stream, or as an event with that code in it."""
    try:
        await client.generate(body)
    except ErrorEvent as error:
        assert error.code == 400, error
        return str(error)
    raise AssertionError("it was not refused")


@contextlib.asynccontextmanager
async def running(client: Client, body: dict[str, Any], num: int = 3) -> AsyncIterator[AsyncIterator[Answer]]:
    """A request that has got so many tokens."""
    async with client.stream(body) as events:
        async for answer in events:
            if len(answer.tokens) >= num:
                break
        yield events


async def rest(events: AsyncIterator[Answer]) -> Answer:
    """The whole answer, when it has ended."""
    *_, answer = [Answer()] + [grown async for grown in events]
    assert answer.done
    return answer


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """AssertionError if it does not come true."""
    deadline = time.monotonic() + LIMIT_S
    while not await condition():
        assert time.monotonic() < deadline, "it has not come true"
        await asyncio.sleep(0.02)


async def check_before_the_first_update(client: Client, subject: Subject) -> None:
    assert await client.get("/weight_info") == (200, {"weight_version": "default"})
    answer = await client.generate(asked(subject.prompt()))
    assert answer.spans == [("default", 0, 12)]


async def check_tokens_carry_the_model_s_logprobs(client: Client, subject: Subject) -> None:
    prompts = [subject.prompt(4 + i, i) for i in range(4)]
    temperatures = (1.0, 1.0, 0.7, 1.3)
    bodies = [asked(p, f"r.{i}", temperature=temperatures[i]) for i, p in enumerate(prompts)]
    answers = await asyncio.gather(*(client.generate(body) for body in bodies))
    for prompt, temperature, answer in zip(prompts, temperatures, answers, strict=True):
        assert (len(answer.tokens), answer.finish_reason, answer.stop_reason) == (12, "length", None)
        assert answer.spans == [("own/0", 0, 12)]
        expected = subject.logprobs(prompt, answer.tokens, temperature=temperature)
        np.testing.assert_allclose(answer.logprobs, expected, atol=EQUAL)


async def check_tokens_come_as_they_are_sampled(client: Client, subject: Subject) -> None:
    answer = await client.generate(asked(subject.prompt(), max_tokens=30))
    assert len(answer.chunks) >= 10, "they come one by one, or a few at a time"


async def check_one_answer_equals_the_stream(client: Client, subject: Subject) -> None:
    body = asked(subject.prompt())
    streamed, (status, whole) = await client.generate(body), await client.post("/inference/v1/generate", body)
    answer = Answer()
    answer.add(whole["choices"][0])
    assert status == 200 and (answer.tokens, answer.spans) == (streamed.tokens, streamed.spans)


async def check_usage_comes_where_it_is_asked_for(client: Client, subject: Subject) -> None:
    options = {"stream_options": {"include_usage": True}}
    answer = await client.generate(asked(subject.prompt(6)) | options)
    assert answer.usage is not None
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (6, 12)
    assert (await client.generate(asked(subject.prompt(6)))).usage is None


async def check_logprobs_come_where_they_are_asked_for(client: Client, subject: Subject) -> None:
    answer = await client.generate(asked(subject.prompt(), logprobs=None))
    assert len(answer.tokens) == 12 and not answer.logprobs


async def check_the_seed_decides_the_draw(client: Client, subject: Subject) -> None:
    seeds = [7, 7, 8, 2**63 - 1, 2**63 - 1]
    bodies = [asked(subject.prompt(), f"r.{i}", seed=seed) for i, seed in enumerate(seeds)]
    tokens = [a.tokens for a in await asyncio.gather(*(client.generate(body) for body in bodies))]
    assert tokens[0] == tokens[1] != tokens[2] and tokens[3] == tokens[4] != tokens[0]


async def check_greedy_needs_no_seed(client: Client, subject: Subject) -> None:
    body = asked(subject.prompt(), temperature=0.0, seed=None)
    first, second = await client.generate(body), await client.generate(body)
    assert first.tokens == second.tokens


async def check_truncation_acts(client: Client, subject: Subject) -> None:
    greedy = await client.generate(asked(subject.prompt(), temperature=0.0))
    distributions: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    for truncated in distributions:
        answer = await client.generate(asked(subject.prompt(), **truncated))
        assert answer.tokens == greedy.tokens
        np.testing.assert_allclose(answer.logprobs, 0.0, atol=NEAR)  # of the distribution that was sampled from


async def check_a_stop_token_ends_it(client: Client, subject: Subject) -> None:
    whole = await client.generate(asked(subject.prompt()))
    stop = whole.tokens[4]
    answer = await client.generate(asked(subject.prompt(), stop_token_ids=[stop]))
    num = whole.tokens.index(stop) + 1
    assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (whole.tokens[:num], "stop", stop)
    np.testing.assert_allclose(answer.logprobs, whole.logprobs[:num], atol=NEAR)


async def check_eos_ends_it_unless_it_is_ignored(client: Client, subject: Subject) -> None:
    prompt = subject.prompt()
    for seed in range(100):
        ignored = await client.generate(asked(prompt, seed=seed, max_tokens=300))
        if subject.eos in ignored.tokens:
            break
    assert ignored.finish_reason == "length" and len(ignored.tokens) == 300
    answer = await client.generate(asked(prompt, seed=seed, max_tokens=300, ignore_eos=False))
    num = ignored.tokens.index(subject.eos) + 1
    assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (ignored.tokens[:num], "stop", None)


async def check_without_max_tokens_it_ends_where_no_more_fit(client: Client, subject: Subject) -> None:
    body = asked(subject.prompt(subject.max_model_len - 40))
    del body["sampling_params"]["max_tokens"]
    too_many = asked(subject.prompt(subject.max_model_len - 40), max_tokens=1000)
    for answer in (await client.generate(body), await client.generate(too_many)):
        assert (len(answer.tokens), answer.finish_reason) == (40, "length")


async def check_a_prompt_that_is_too_long_is_refused(client: Client, subject: Subject) -> None:
    assert str(subject.max_model_len) in await refused(client, asked(subject.prompt(subject.max_model_len + 1)))


async def check_tokens_that_are_none_are_refused(client: Client, subject: Subject) -> None:
    await refused(client, asked([5, 10**6]))


async def check_wrong_bodies_are_refused_by_the_field(client: Client, subject: Subject) -> None:
    good = asked(subject.prompt())
    wrong = {
        "token_ids": [good | {"token_ids": v} for v in ([], "text", [-1], [[1]], None)],
        "sampling_params": [{k: v for k, v in good.items() if k != "sampling_params"}, good | {"sampling_params": 3}],
        "cache_salt": [good | {"cache_salt": ""}],
        "temperature": [asked([5], temperature=-1.0)],
        "max_tokens": [asked([5], max_tokens=0)],
        "min_tokens": [asked([5], max_tokens=3, min_tokens=7)],
        "top_p": [asked([5], top_p=2.0)],
        "min_p": [asked([5], min_p=-0.5)],
    }
    for name, bodies in wrong.items():
        for body in bodies:
            status, answer = await client.post("/inference/v1/generate", body)
            assert status == 400 and name in str(answer["error"]), (name, status, answer)
    status, answer = await client.post("/inference/v1/generate", data=b"{")
    assert status == 400 and "JSON" in str(answer)
    assert (await client.post("/pause?mode=sleep"))[0] == 400
    assert (await client.post("/update_weights", {"nothing": 1}))[0] == 400


async def check_another_model_s_name_is_not_found(client: Client, subject: Subject) -> None:
    status, answer = await client.post("/inference/v1/generate", asked([5]) | {"model": "no such model"})
    assert status == 404 and "no such model" in str(answer)


async def check_an_id_that_comes_twice_runs_twice(client: Client, subject: Subject) -> None:
    """Identity is the client's business: neither replaces, or is taken for, the other."""
    bodies = [asked(subject.prompt(), "r.1", seed=seed, max_tokens=40) for seed in (1, 2)]
    together = await asyncio.gather(*(client.generate(body) for body in bodies))
    alone = [await client.generate(body) for body in bodies]
    assert [a.tokens for a in together] == [a.tokens for a in alone] and alone[0].tokens != alone[1].tokens


async def check_only_the_full_id_aborts(client: Client, subject: Subject) -> None:
    num = subject.max_model_len - 10
    body = asked(subject.prompt(), "a.1", max_tokens=num)
    async with running(client, body) as events:
        await client.ok("/abort_requests", {"request_ids": ["a.1", "generate-tokens-a", "b.2"]})
        whole = await rest(events)
    assert (whole.finish_reason, len(whole.tokens)) == ("length", num)
    async with running(client, body) as events:
        await client.ok("/abort_requests", {"request_ids": ["generate-tokens-a.1"]})
        answer = await rest(events)
    assert answer.finish_reason == "abort" and 3 <= len(answer.tokens) < num
    assert answer.tokens == whole.tokens[: len(answer.tokens)] and len(answer.logprobs) == len(answer.tokens)
    assert answer.spans == [("own/0", 0, len(answer.tokens))]


async def check_what_was_aborted_goes_on_from_its_tokens(client: Client, subject: Subject) -> None:
    """Greedily: the one way to continue. The log-probs are those of the whole."""
    whole = await client.generate(asked(subject.prompt(), temperature=0.0, max_tokens=60))
    async with running(client, asked(subject.prompt(), "a.1", temperature=0.0, max_tokens=60)) as events:
        await client.ok("/abort_requests", {"request_ids": ["generate-tokens-a.1"]})
        cut = await rest(events)
    left = 60 - len(cut.tokens)
    if left:
        more = await client.generate(asked(subject.prompt() + cut.tokens, "a.2", temperature=0.0, max_tokens=left))
        assert cut.tokens + more.tokens == whole.tokens


async def check_a_client_that_goes_away_frees_its_place(client: Client, subject: Subject) -> None:
    num = subject.max_model_len - 10
    before = await client.count("vllm:generation_tokens_total")
    async with running(client, asked(subject.prompt(), max_tokens=num)):
        pass

    async def idle() -> bool:
        return await client.count("vllm:num_requests_running", "vllm:num_requests_waiting") == 0

    await until(idle)
    assert await client.count("vllm:generation_tokens_total") - before < num


async def check_nothing_is_sampled_while_it_is_paused(client: Client, subject: Subject) -> None:
    """What runs goes on afterwards, and what was asked meanwhile begins: with the tokens that it would have had."""
    long, late = asked(subject.prompt(), "a.1", max_tokens=200), asked(subject.prompt(), "b.1", seed=3)
    undisturbed = [(await client.generate(body)).tokens for body in (long, late)]
    async with running(client, long) as events:
        await client.ok("/pause?mode=keep&clear_cache=false")
        assert await client.get("/is_paused") == (200, {"is_paused": True})
        meanwhile = asyncio.ensure_future(client.generate(late))
        before = await client.count("vllm:generation_tokens_total")
        await asyncio.sleep(0.2)
        assert await client.count("vllm:generation_tokens_total") == before and not meanwhile.done()
        await client.ok("/resume")
        assert await client.get("/is_paused") == (200, {"is_paused": False})
        assert [(await rest(events)).tokens, (await meanwhile).tokens] == undisturbed


async def check_pausing_may_abort_or_wait(client: Client, subject: Subject) -> None:
    body = asked(subject.prompt(), max_tokens=150)
    for mode, reason in (("abort", "abort"), ("wait", "length")):
        async with running(client, body) as events:
            await client.ok(f"/pause?mode={mode}")
            assert (await rest(events)).finish_reason == reason
            late = asyncio.ensure_future(client.generate(asked(subject.prompt())))
            await asyncio.sleep(0.1)
            assert not late.done()
            await client.ok("/resume")
            assert len((await late).tokens) == 12


async def check_an_abort_reaches_what_is_paused(client: Client, subject: Subject) -> None:
    async with running(client, asked(subject.prompt(), "a.1", max_tokens=200)) as events:
        await client.ok("/pause?mode=keep")
        await client.ok("/abort_requests", {"request_ids": ["generate-tokens-a.1"]})
        await client.ok("/resume")
        assert (await rest(events)).finish_reason == "abort"


async def check_an_update_in_flight_is_exact(client: Client, subject: Subject) -> None:
    """Tokens before it are the old weights', those after it the new ones', and the spans say which is which."""
    prompts = [subject.prompt(4 + i, i) for i in range(3)]
    new = subject.write("new", subject.weights(1.3))
    async with contextlib.AsyncExitStack() as stack:
        bodies = [asked(prompt, f"r.{i}", max_tokens=200) for i, prompt in enumerate(prompts)]
        streams = [await stack.enter_async_context(running(client, body)) for body in bodies]
        await update(client, new, "run-1/1")
        assert await client.get("/weight_info") == (200, {"weight_version": "run-1/1"})
        await client.ok("/resume")
        for prompt, answer in zip(prompts, await asyncio.gather(*map(rest, streams)), strict=True):
            cut = answer.spans[0][2]
            assert answer.spans == [("own/0", 0, cut), ("run-1/1", cut, 200)] and 3 <= cut < 200
            old, later = (subject.logprobs(prompt, answer.tokens, factor) for factor in (1.0, 1.3))
            np.testing.assert_allclose(answer.logprobs[:cut], old[:cut], atol=NEAR)
            np.testing.assert_allclose(answer.logprobs[cut:], later[cut:], atol=NEAR)
            assert np.abs(old - later).max() > FAR


async def check_without_clearing_the_cache_old_keys_stay(client: Client, subject: Subject) -> None:
    """Until it is reset; and nothing is reset under what runs without the word for it. A salt of one's own shares
    nothing with what was there before."""
    prompt = subject.prompt(2 * subject.long_prompt)
    salted = {"cache_salt": "before"}
    async with running(client, asked(prompt, max_tokens=400) | salted) as events:
        await update(client, subject.write("new", subject.weights(1.3)), "run-1/1", clear_cache=False)
        late = [asyncio.ensure_future(client.generate(asked(prompt, "b.1") | s)) for s in (salted, {"cache_salt": "x"})]
        await client.ok("/resume")
        same, other = [await answer for answer in late]
        assert await client.ok("/reset_prefix_cache") == {"success": False}
        assert await client.ok("/reset_prefix_cache?reset_running_requests=true") == {"success": True}
        whole = await rest(events)
    expected = [subject.logprobs(prompt, answer.tokens, 1.3) for answer in (same, other)]
    assert np.abs(same.logprobs - expected[0]).max() > FAR, "it shares the keys of the old weights"
    np.testing.assert_allclose(other.logprobs, expected[1], atol=NEAR)
    last = subject.logprobs(prompt, whole.tokens, 1.3)
    np.testing.assert_allclose(whole.logprobs[-20:], last[-20:], atol=NEAR)
    again = await client.generate(asked(prompt) | salted)
    np.testing.assert_allclose(again.logprobs, subject.logprobs(prompt, again.tokens, 1.3), atol=NEAR)


async def check_an_update_that_is_refused_changes_nothing(client: Client, subject: Subject) -> None:
    name, tensor = next(iter(subject.weights().items()))
    good = subject.write("good", subject.weights(1.3))
    (subject.folder / "text.safetensors").write_bytes(b"no weights")
    text = str(subject.folder / "text.safetensors")
    refusals = [
        good | {"sha256": "0" * 64},
        good | {"path": str(subject.folder / "none.safetensors")},
        good | {"path": str(subject.folder)},
        good | {"path": "/dev/zero"},
        {"path": text, "sha256": hashlib.sha256(b"no weights").hexdigest()},
        subject.write("partial", subject.weights(1.3, **{name: None})),
        subject.write("wrong", subject.weights(1.3, **{name: tensor[:-1].contiguous()})),
    ]
    prompt, before = subject.prompt(), await client.generate(asked(subject.prompt()))
    for info in refusals:
        await client.ok("/pause?mode=keep")
        await client.ok("/start_weight_update")
        status, answer = await client.post("/update_weights", {"update_info": info})
        assert status == 500 and "refused: " in str(answer), answer
        await client.ok("/resume")
        again = await client.generate(asked(prompt))
        assert again.tokens == before.tokens and again.spans == [("own/0", 0, 12)]
        np.testing.assert_allclose(again.logprobs, before.logprobs, atol=NEAR)
    await update(client, good, "run-1/2")
    await client.ok("/resume")
    after = await client.generate(asked(prompt))
    assert after.spans == [("run-1/2", 0, 12)]
    np.testing.assert_allclose(after.logprobs, subject.logprobs(prompt, after.tokens, 1.3), atol=NEAR)


async def check_a_file_is_read_ahead(client: Client, subject: Subject) -> None:
    info = subject.write("ahead", subject.weights(1.1))

    said: list[str] = []

    async def settled(sha256: str) -> bool:
        """A refusal is told once: whoever asks again wants it looked at again."""
        body = {"method": "rollover_verify", "args": [info["path"], sha256]}
        said.append((await client.ok("/collective_rpc", body))["results"][0])
        return said[-1] != "verifying"

    for sha256, expected in ((info["sha256"], "verified"), ("0" * 64, "refused: ")):
        await until(lambda sha256=sha256: settled(sha256))
        assert said[-1].startswith(expected)
    assert (await client.post("/collective_rpc", {"method": "no_such_method", "args": []}))[0] >= 400


async def check_the_label_alone_can_be_set(client: Client, subject: Subject) -> None:
    await client.ok("/update_weight_version", {"new_version": "run-2/5"})
    assert await client.get("/weight_info") == (200, {"weight_version": "run-2/5"})
    assert (await client.generate(asked(subject.prompt()))).spans == [("run-2/5", 0, 12)]


async def check_twenty_updates_end_where_they_began(client: Client, subject: Subject) -> None:
    files = [subject.write(f"turn{i}", subject.weights(factor)) for i, factor in enumerate((1.3, 1.0))]
    prompt = subject.prompt()
    before = await client.generate(asked(prompt))
    for i in range(20):
        await update(client, files[i % 2], f"run-1/{i}")
        await client.ok("/resume")
    after = await client.generate(asked(prompt))
    assert after.tokens == before.tokens and after.spans == [("run-1/19", 0, 12)]
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=NEAR)


async def check_what_it_says_of_itself(client: Client, subject: Subject) -> None:
    status, models = await client.get("/v1/models")
    assert status == 200 and models["data"][0]["max_model_len"] == subject.max_model_len
    for path in ("/health", "/load", "/version", "/metrics"):
        assert (await client.get(path))[0] == 200, path
    assert (await client.get("/version"))[1]["version"]
    assert await client.get("/get_world_size") == (200, {"world_size": 1})
    assert (await client.get("/no_such_path"))[0] == 404


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
