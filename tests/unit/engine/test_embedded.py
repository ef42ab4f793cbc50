"""The embedded engine against the plain model: tokens, log-probs, every cut position, memory pressure, KV policies."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

import tiny
from rollover.config import EngineConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest, StopCriteria, repeats_itself
from rollover.types import Prompt, SamplingParams, Segment, StopReason, rollout_seed

PROMPTS = ["q:1+1\na:", "q:hello, how are you?\na:", "x", "q:" + "abc" * 20 + "\na:"]


def prompt_ids(text: str) -> tuple[int, ...]:
    return tuple(tiny.tokenizer()(text, add_special_tokens=False)["input_ids"])


def request(name: str, text: str, new: int, generated: tuple[int, ...] = (), **sampling: float) -> ExtendRequest:
    return ExtendRequest(
        rollout_id=name,
        prompt=Prompt(prompt_ids(text)),
        generated_ids=generated,
        max_new_tokens=new,
        seed=rollout_seed(0, text, 0, int(name.rsplit("-")[-1])),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def engine(model=None, kv_on_resume="recompute", **config) -> EmbeddedEngine:
    return EmbeddedEngine(
        model if model is not None else tiny.model(),
        EngineConfig(**config),
        kv_on_resume=kv_on_resume,
        tokenizer=tiny.tokenizer(),
    )


def run(target: EmbeddedEngine, requests: list[ExtendRequest]) -> list[list[Segment]]:
    async def go() -> list[list[Segment]]:
        return list(await asyncio.gather(*[target.extend(r) for r in requests]))

    return asyncio.run(go())


def reference_logprobs(model, prompt: tuple[int, ...], generated: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of `generated` by one plain forward pass of transformers' eager attention."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *generated.tolist()]])).logits[0].float() / temperature
    finally:
        model.set_attn_implementation("rollover")
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(generated, dtype=torch.long)[:, None])[:, 0].numpy()


async def has_generated(target: EmbeddedEngine, num: int, *names: str) -> None:
    """Return when each of these rollouts has so many tokens."""
    while min((sum(map(len, s)) for s in (await target.progress(names)).values()), default=0) < num:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("policy", "temperature"), [("recompute", 1.0), ("keep", 1.0), ("salt", 1.0), ("keep", 0.0)])
def test_interrupted_at_every_cut_equals_uninterrupted(policy: str, temperature: float) -> None:
    """DESIGN test 4: frozen weights, fp32 CPU. The neighbours are interrupted too, so the batch changes."""
    new = 20
    model = tiny.model()
    wanted = [
        request(f"{i}-{s}", text, new, temperature=temperature) for i, text in enumerate(PROMPTS) for s in range(2)
    ]
    whole = run(engine(model), wanted)
    for cut in range(0, new + 1):
        target = engine(model, kv_on_resume=policy)

        async def go(target=target, cut=cut) -> list[list[Segment]]:
            tasks = [asyncio.create_task(target.extend(r)) for r in wanted]
            await asyncio.sleep(0)
            while not all(t.done() for t in tasks) and (
                min(
                    (sum(map(len, p)) for p in (await target.progress([r.rollout_id for r in wanted])).values()),
                    default=cut,
                )
                < cut
            ):
                await asyncio.sleep(0)
            target.interrupt()
            first = [await t for t in tasks]
            out = []
            for r, parts in zip(wanted, first, strict=True):
                done = tuple(int(t) for p in parts for t in p.token_ids)
                if parts[-1].stop_reason is StopReason.PAUSED:
                    out.append((r, parts, done))
            if policy == "recompute":
                await target.load_weights(1, [])
            resumed = await asyncio.gather(
                *[
                    target.extend(ExtendRequest(r.rollout_id, r.prompt, done, new - len(done), r.seed, r.sampling))
                    for r, _, done in out
                ]
            )
            for (r, parts, _), more in zip(out, resumed, strict=True):
                parts.extend(more)
                assert r.rollout_id == wanted[wanted.index(r)].rollout_id
            return first

        parts = asyncio.run(go())
        for whole_one, cut_one in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(
                np.concatenate([s.token_ids for s in whole_one]), np.concatenate([s.token_ids for s in cut_one])
            )
            np.testing.assert_allclose(
                np.concatenate([s.logprobs for s in whole_one]),
                np.concatenate([s.logprobs for s in cut_one]),
                atol=2e-5,
            )


def test_siblings_differ_and_share_the_prompt() -> None:
    target = engine()
    text = PROMPTS[3]
    out = run(target, [request(f"0-{s}", text, 16) for s in range(8)])
    assert len({tuple(o[0].token_ids.tolist()) for o in out}) == 8
    assert target.stats()["engine/prefill_tokens"] == len(prompt_ids(text)) - 1
    assert target.stats()["kv/shared_prompt_tokens"] == 7 * (len(prompt_ids(text)) - 1)


@pytest.mark.parametrize("chunk", [3, 7, 64])
def test_chunked_prefill_shares_and_equals(chunk: int) -> None:
    requests = [request(f"{i}-{s}", text, 12) for i, text in enumerate(PROMPTS) for s in range(3)]
    target = engine(prefill_chunk_tokens=chunk)
    for a, b in zip(run(engine(), requests), run(target, requests), strict=True):
        np.testing.assert_array_equal(a[0].token_ids, b[0].token_ids)
    assert target.stats()["engine/prefill_tokens"] == sum(len(prompt_ids(t)) - 1 for t in PROMPTS)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_short_memory_preempts_and_changes_nothing(family: str) -> None:
    model = tiny.model(family)
    requests = [request(f"{i}-{s}", text, 150) for i, text in enumerate(PROMPTS) for s in range(3)]
    roomy = engine(model)
    token_bytes = roomy.kv_bytes_per_token
    tight = engine(model, kv_memory_gb=token_bytes * 1000 / 1e9)
    peak = 0
    step = tight.step

    def watched() -> None:
        nonlocal peak
        step()
        peak = max(peak, tight.stats()["kv/bytes"])

    tight.step = watched  # type: ignore[method-assign]
    for a, b in zip(run(roomy, requests), run(tight, requests), strict=True):
        np.testing.assert_array_equal(a[0].token_ids, b[0].token_ids)
        np.testing.assert_allclose(a[0].logprobs, b[0].logprobs, atol=2e-5)
    assert tight.stats()["engine/preemptions"] > 0 and tight.stats()["engine/reprefill_tokens"] > 0
    assert roomy.stats()["engine/preemptions"] == 0 and roomy.stats()["engine/reprefill_tokens"] == 0
    assert 0 < peak <= token_bytes * 1000


def test_who_waits_for_a_slot_or_for_its_prefill_is_queued() -> None:
    target = engine(max_running=2, prefill_chunk_tokens=16)
    long, names = PROMPTS[3], ["0-0", "1-0", "2-0"]

    async def go() -> list[tuple[set[str], set[str]]]:
        extends = asyncio.gather(
            *[target.extend(request(i, text, 12)) for i, text in zip(names, ["x", long, "x"], strict=True)]
        )
        seen = []
        while not extends.done():
            progress = await target.progress(names)
            seen.append((await target.queued(names), {i for i, s in progress.items() if sum(map(len, s))}))
            await asyncio.sleep(0)
        return seen

    seen = asyncio.run(go())
    assert all(not queued & moving for queued, moving in seen)
    assert ({"1-0", "2-0"}, {"0-0"}) in seen and ({"2-0"}, {"0-0", "1-0"}) in seen and seen[-1][0] == set()


def test_a_rollout_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="engine.kv_memory_gb holds 0"):
        run(engine(kv_memory_gb=1e-6), [request("0-0", "x", 500)])
    with pytest.raises(ValueError, match="Lower rollout.max_new_tokens"):
        run(engine(), [request("0-0", "x", 5000)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": Prompt((5, 6, 102))}, "rollout 0-0: token 2 of its prompt is 102, and the model's vocabulary has"),
        ({"prompt": Prompt((5, -1))}, "rollout 0-0: token 1 of its prompt is -1"),
        ({"generated_ids": (5, 10**9)}, "rollout 0-0: token 1 of its answer is 1000000000"),
        ({"prompt": Prompt()}, "rollout 0-0 has an empty prompt"),
        ({"max_new_tokens": 0}, "rollout 0-0 is extended by 0 tokens"),
    ],
)
def test_what_the_model_cannot_be_given_is_refused(changes: dict, message: str) -> None:
    target = engine()
    with pytest.raises(ValueError, match=message):
        run(target, [dataclasses.replace(request("0-0", "x", 4), **changes)])
    assert run(target, [request("0-0", "x", 4)]), "and the engine goes on"


def perturbed(model, scale: float = 0.5) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(n, p + scale * p.std() * torch.randn(p.shape, generator=generator)) for n, p in model.named_parameters()]


def test_weight_update_splits_segments_by_version() -> None:
    """Tokens before the update have the old weights' log-probs, those after it the new ones' (policy recompute)."""
    old = tiny.model()
    new = tiny.model()
    update = perturbed(new)
    with torch.no_grad():
        for (_, tensor), parameter in zip(update, new.parameters(), strict=True):
            parameter.copy_(tensor)
    target = engine(tiny.model())

    async def go() -> list[Segment]:
        task = asyncio.create_task(target.extend(request("0-0", PROMPTS[1], 30)))
        await has_generated(target, 11, "0-0")
        await target.load_weights(5, update)
        return await task

    first, second = asyncio.run(go())
    assert (first.policy_version, second.policy_version) == (0, 5)
    assert first.stop_reason is StopReason.PAUSED and second.stop_reason is StopReason.LENGTH
    assert len(first) == 11 and len(second) == 19
    prompt, ids = prompt_ids(PROMPTS[1]), np.concatenate([first.token_ids, second.token_ids])
    np.testing.assert_allclose(first.logprobs, reference_logprobs(old, prompt, ids)[:11], atol=2e-5)
    np.testing.assert_allclose(second.logprobs, reference_logprobs(new, prompt, ids)[11:], atol=2e-5)
    assert np.abs(reference_logprobs(old, prompt, ids)[11:] - second.logprobs).max() > 0.1


@pytest.mark.parametrize(("policy", "kept", "stale"), [("recompute", 0, 0), ("keep", 1, 1), ("salt", 1, 1)])
def test_kv_policies_after_an_update(policy: str, kept: int, stale: int) -> None:
    target = engine(kv_on_resume=policy)
    prompt = Prompt(prompt_ids(PROMPTS[3]))

    async def go() -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        task = asyncio.create_task(target.extend(request("0-0", PROMPTS[3], 30)))
        await has_generated(target, 8, "0-0")
        target.interrupt()
        (segment,) = await task
        await target.load_weights(1, [])
        before = target.stats()
        done = tuple(segment.token_ids.tolist())
        first = request("0-0", PROMPTS[3], 30)
        again = ExtendRequest("0-0", prompt, done, 30 - len(done), first.seed, first.sampling)
        running = asyncio.create_task(target.extend(again))
        for _ in range(3):
            await asyncio.sleep(0)
        sibling = await target.extend(request("0-1", PROMPTS[3], 4))
        assert sibling[0].policy_version == 1
        await running
        return before, target.stats(), {"done": len(done)}

    before, after, info = asyncio.run(go())
    cached = len(prompt) - 1 + info["done"]
    assert after["kv/kept_tokens"] == kept * cached
    assert before["kv/stale_prefix_tokens"] == stale * cached
    shared_stale = after["kv/stale_prefix_tokens"] - before["kv/stale_prefix_tokens"]
    # keep lets a new sibling see the old version's prompt; salt and recompute do not.
    assert shared_stale == (len(prompt) - 1 if policy == "keep" else 0)
    assert after["engine/reprefill_tokens"] == (cached if policy == "recompute" else 0)


@pytest.mark.parametrize("how", ["new weights", "eviction"])
def test_environment_tokens_after_lost_kv_are_no_reprefill(how: str) -> None:
    """The turn's tokens are computed again, and those that were appended to it are not."""
    memory = engine().kv_bytes_per_token * 1000 / 1e9
    target = engine(kv_memory_gb=memory)
    first = dataclasses.replace(request("0-0", PROMPTS[1], 8), may_continue=True)
    appended = prompt_ids(PROMPTS[3])

    async def go() -> tuple[int, dict[str, float]]:
        turn = tuple(int(t) for s in await target.extend(first) for t in s.token_ids)
        first_part = dataclasses.replace(first, stop=StopCriteria(frozenset({turn[4]})))
        target.release(["0-0"])
        turn = tuple(int(t) for s in await target.extend(first_part) for t in s.token_ids)
        assert target.stats()["kv/bytes"] > 0, "it is kept"
        if how == "new weights":
            await target.load_weights(1, [])
        else:
            await asyncio.gather(*(target.extend(request(f"{i}-0", PROMPTS[3], 150)) for i in range(1, 9)))
        before = target.stats()
        so_far = (*turn, *appended)
        again = dataclasses.replace(first, generated_ids=so_far, max_new_tokens=4, text_start=len(so_far))
        await target.extend(again)
        return len(turn), {key: value - before[key] for key, value in target.stats().items()}

    num_turn, growth = asyncio.run(go())
    # The last token of a turn is none that was computed: it would have been the next step's input.
    assert growth["engine/reprefill_tokens"] == len(first.prompt) + num_turn - 1
    assert growth["engine/prefill_tokens"] == len(appended) and growth["kv/kept_tokens"] == 0


def test_release_forgets_kept_kv() -> None:
    target = engine(kv_on_resume="keep")

    async def go() -> None:
        task = asyncio.create_task(target.extend(request("0-0", PROMPTS[3], 30)))
        await has_generated(target, 3, "0-0")
        target.interrupt(["0-0"])
        await task
        assert target.stats()["kv/bytes"] > 0
        target.release(["0-0", "unknown"])
        assert target.stats()["kv/bytes"] == 0
        await target.close()

    asyncio.run(go())


def test_a_token_budget_keeps_the_kv() -> None:
    target = engine(kv_on_resume="keep")

    async def go() -> None:
        first = request("0-0", PROMPTS[1], 30)
        (segment,) = await target.extend(dataclasses.replace(first, pause_after=4))
        assert segment.stop_reason is StopReason.PAUSED and len(segment) == 4
        before = target.stats()
        rest = request("0-0", PROMPTS[1], 26, tuple(segment.token_ids.tolist()))
        await target.extend(rest)
        after = target.stats()
        assert after["engine/prefill_tokens"] == before["engine/prefill_tokens"]
        assert after["engine/reprefill_tokens"] == 0 and after["kv/kept_tokens"] > 0
        await target.close()

    asyncio.run(go())


def test_greedy_circles_are_stopped() -> None:
    """A tiny model's greedy answers go round in circles."""
    target = engine()

    async def go(window: int) -> list[Segment]:
        requests = [request(f"{i}-0", text, 200, temperature=0.0) for i, text in enumerate(PROMPTS)]
        requests = [dataclasses.replace(r, stop=StopCriteria(repetition_tokens=window)) for r in requests]
        return [(await target.extend(r))[-1] for r in requests]

    endless, stopped = asyncio.run(go(0)), asyncio.run(go(32))
    assert any(s.stop_reason is StopReason.REPETITION for s in stopped)
    for a, b in zip(endless, stopped, strict=True):
        assert a.token_ids[: len(b)].tolist() == b.token_ids.tolist()
        if b.stop_reason is StopReason.REPETITION:
            tokens = b.token_ids.tolist()
            assert len(b) % 16 == 0 and repeats_itself(tokens[-32:])
            assert not any(repeats_itself(tokens[n - 32 : n]) for n in range(32, len(b), 16))


def test_on_token_gets_each_token_and_the_stop_reason() -> None:
    target, heard = engine(), []
    asked = request("0-0", PROMPTS[0], 6)

    async def go() -> list[Segment]:
        extend = asyncio.ensure_future(target.extend(asked, lambda *told: heard.append(told)))
        while len(heard) < 3:
            assert not extend.done()
            await asyncio.sleep(0)
        return await extend

    (segment,) = asyncio.run(go())
    assert [token for token, _, _ in heard] == segment.token_ids.tolist()
    np.testing.assert_array_equal(np.float32([logprob for _, logprob, _ in heard]), segment.logprobs)
    assert [reason for _, _, reason in heard] == [None] * 5 + [StopReason.LENGTH]


@pytest.mark.parametrize(("salts", "shared"), [(("a", "a"), 1), (("a", "b"), 0), (("", ""), 1)])
def test_prompts_are_shared_within_a_salt_alone(salts: tuple[str, str], shared: int) -> None:
    target = engine()

    async def go() -> list[list[Segment]]:
        asked = [request(f"0-{i}", PROMPTS[1], 4) for i in range(2)]
        return await asyncio.gather(*(target.extend(r, None, salt) for r, salt in zip(asked, salts, strict=True)))

    answers = asyncio.run(go())
    assert all(len(segments[0]) == 4 for segments in answers)
    assert target.stats()["kv/shared_prompt_tokens"] == shared * (len(prompt_ids(PROMPTS[1])) - 1)


def test_without_steps_requests_wait_and_interrupts_return() -> None:
    target = engine()

    async def go() -> None:
        target.may_step.clear()
        extends = [asyncio.ensure_future(target.extend(request(f"0-{i}", PROMPTS[0], 4))) for i in range(2)]
        await asyncio.sleep(0.05)
        assert target.stats()["engine/decode_steps"] == 0
        target.interrupt(["0-0"])
        assert len((await extends[0])[0]) == 0 and not extends[1].done()
        target.may_step.set()
        assert len((await extends[1])[0]) == 4
        target.may_step.clear()
        last = asyncio.ensure_future(target.extend(request("0-2", PROMPTS[0], 4)))
        await asyncio.sleep(0)
        await target.close()
        assert (await last)[0].stop_reason is StopReason.PAUSED

    asyncio.run(go())


def test_only_the_whole_model_s_weights_are_loadable() -> None:
    target, shapes = engine(), {name: tuple(p.shape) for name, p in tiny.model().named_parameters()}
    name = "model.embed_tokens.weight"
    assert target.load_error(shapes) == ""
    assert target.load_error(shapes | {"lm_head.weight": shapes[name]}) == "", "the tied head under its own name"
    assert "lacks 1 weights" in target.load_error({n: s for n, s in shapes.items() if n != name})
    assert "unknown weights, the first is other" in target.load_error(shapes | {"other": (1,)})
    assert f"has {name} in the shape [3, 2]" in target.load_error(shapes | {name: (3, 2)})
