"""The remote engine: what every engine does, how servers join, and what a server may answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contract import engine_contract
from contract.engine_contract import logprobs_of, tokens_of
from fault_server import FaultServer
from heard import hear
from rollover.config import Config
from rollover.engine.protocol import EngineDied, ExtendRequest, StopCriteria
from rollover.engine.remote import client as remote_client
from rollover.engine.remote.client import ServerClient, ServerFailed
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.hosts import ProcessHost, UrlHost
from rollover.types import SamplingParams, Segment, StopReason

# The engine over HTTP passes the contract, and no fault of a server loses or doubles a token


PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
WEIGHTS = [("weight", torch.ones(3))]
NUM = 12  # tokens of a rollout
SUBJECT = engine_contract.Subject(
    make_engine=lambda: None,  # type: ignore[arg-type, return-value]
    prompts=PROMPTS,
    tensors=lambda: WEIGHTS,
    max_new_tokens=NUM,
)


def text_of(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def config(*servers: FaultServer, rollout: dict[str, Any] | None = None, **engine: Any) -> Config:
    values = {
        "engine": {"kind": "remote", "urls": [s.url for s in servers], "server_timeout_s": 60.0, "max_running": 4}
        | engine,
        "rollout": {"interrupt": "when_enough", "in_flight_groups": 16, "max_staleness": 1} | (rollout or {}),
        "watchdog": {"grace_s": 0.5},
        "run": {"name": "test"},
        "algorithm": {"loss": "reinforce"},
    }
    return Config.model_validate(values)


class Made:
    """Servers and engines of a test."""

    def __init__(self) -> None:
        self.servers: list[FaultServer] = []
        self.said: list[str] = hear([])

    def server(self, **options: Any) -> FaultServer:
        self.servers.append(FaultServer(**options))
        return self.servers[-1]

    def engine(self, *servers: FaultServer, **options: Any) -> RemoteEngine:
        most = max((server.vocab_size for server in servers), default=1)
        setup = RemoteSetup(config(*servers, **options), lambda: WEIGHTS, text_of, lambda: most)
        return RemoteEngine(setup)


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    for server in made.servers:
        server.close()


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[engine_contract.Subject], Awaitable[None]], made: Made) -> None:
    servers = [made.server(seeded=True), made.server(seeded=True)]
    subject = dataclasses.replace(
        SUBJECT, make_engine=lambda: made.engine(*servers), decode_text=text_of, resumes_exactly=False
    )

    async def run() -> None:
        await asyncio.wait_for(check(subject), 120)

    asyncio.run(run())


# Faults: what comes is what an undisturbed run gives


def request(i: int = 0, **changes: Any) -> ExtendRequest:
    return SUBJECT.request(i, **changes)


async def all_serve(engine: RemoteEngine) -> None:
    await engine.extend(request(rollout_id="99-0", max_new_tokens=1))
    while engine.stats()["engine/servers"] < len(engine.hosts):
        await asyncio.sleep(0.01)


def same(found: list[Segment], server: FaultServer, wanted: ExtendRequest, version: int = 0) -> None:
    """Tokens and log-probs are those of the undisturbed run, under that version."""
    context, tokens, logprobs = [*wanted.prompt.ids, *wanted.generated_ids], [], []
    for _ in range(wanted.max_new_tokens):
        tokens.append(server.token(context, 0, 0, 1.0))
        logprobs.append(server.logprob(context, f"/{version}"))
        context.append(tokens[-1])
    assert tokens_of(found) == tokens
    assert logprobs_of(found).tolist() == logprobs
    assert {segment.policy_version for segment in found} == {version}
    assert found[-1].stop_reason is StopReason.LENGTH


def run(made: Made, *servers: FaultServer, work: Callable[[RemoteEngine], Awaitable[None]], **options: Any) -> None:
    """Do `work` with an engine over these servers, with a limit."""

    async def limited() -> None:
        engine = made.engine(*servers, **options)
        try:
            await asyncio.wait_for(work(engine), 300)
        finally:
            await engine.close()

    asyncio.run(limited())


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("fault", ["drops", "errors", "nans", "garbled"])
def test_a_request_that_ends_at_any_token_goes_on_elsewhere(fault: str, num_servers: int, made: Made) -> None:
    """Once at every index, and after every single token."""
    servers = [made.server() for _ in range(num_servers)]

    async def work(engine: RemoteEngine) -> None:
        for at in range(NUM):
            for server in servers:
                setattr(server.faults, fault, [at, None])
            same(await engine.extend(request()), servers[0], request())
        lost = engine.stats()["engine/lost_requests"]
        assert lost >= NUM
        for server in servers:
            setattr(server.faults, fault, [1] * NUM)
        (segment,) = await engine.extend(request())
        same([segment], servers[0], request())
        assert engine.stats()["engine/lost_requests"] - lost >= NUM - 1
        assert engine.stats()["engine/ejections"] == 0

    run(made, *servers, work=work)
    ids = [i for server in servers for i in server.request_ids]
    assert len(ids) == len(set(ids))


def test_a_page_of_somebody_in_between_is_a_lost_request(made: Made) -> None:
    server = made.server()
    server.faults.gateway = 1

    async def work(engine: RemoteEngine) -> None:
        same(await engine.extend(request()), server, request())
        assert engine.stats()["engine/lost_requests"] == 1

    run(made, server, work=work)


def test_always_failing_server_fails_only_its_rollout(made: Made) -> None:
    server = made.server()
    server.faults.errors = [0] * 3

    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(RuntimeError, match="told to fail"):
            await engine.extend(request())
        same(await engine.extend(request()), server, request())

    run(made, server, work=work)


@pytest.mark.parametrize("abort", ["swallow", "repeat"])
def test_lost_abort_is_repeated_and_double_answer_counts_once(abort: str, made: Made) -> None:
    server = made.server(delay_s=0.01)
    server.faults.aborts = [abort] * 2

    async def work(engine: RemoteEngine) -> None:
        extend = asyncio.ensure_future(engine.extend(request(max_new_tokens=2000)))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        engine.interrupt(["0-0"])
        parts = await extend
        assert 3 <= len(tokens_of(parts)) < 2000
        left = dataclasses.replace(request(), generated_ids=tuple(tokens_of(parts)), max_new_tokens=3)
        parts += await engine.extend(left)
        same(parts, server, request(max_new_tokens=len(tokens_of(parts))))
        assert engine.stats()["engine/abandoned_requests"] == 0

    run(made, server, work=work)
    assert server.calls.count("abort") >= (3 if abort == "swallow" else 1)


def test_unabortable_request_is_dropped(made: Made) -> None:
    server = made.server(delay_s=0.005)
    server.faults.aborts, server.faults.deaf = ["swallow"] * 1000, True

    async def work(engine: RemoteEngine) -> None:
        extend = asyncio.ensure_future(engine.extend(request(max_new_tokens=500)))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        engine.interrupt()
        parts = await asyncio.wait_for(extend, 20)
        assert parts[-1].stop_reason is StopReason.PAUSED
        assert engine.stats()["engine/abandoned_requests"] == 1
        more = request(generated_ids=tuple(tokens_of(parts)), max_new_tokens=20)
        parts += await engine.extend(more)  # beside the old one, which runs on
        same(parts, server, request(max_new_tokens=len(tokens_of(parts))))

    run(made, server, work=work)


def test_a_server_that_freezes_is_given_up_in_time_and_comes_back(made: Made) -> None:
    frozen, other = made.server(delay_s=0.01), made.server(delay_s=0.01)
    wanted = [request(i, max_new_tokens=60) for i in range(2)]

    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        extends = [asyncio.ensure_future(engine.extend(each)) for each in wanted]
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extends[0])
        await engine_contract.wait_for_tokens(engine, "1-0", 3, extends[1])
        frozen.freeze()
        began = time.monotonic()
        for answer, each in zip(await asyncio.gather(*extends), wanted, strict=True):
            same(answer, other, each)
        assert time.monotonic() - began < 60
        assert engine.stats()["engine/ejections"] >= 1
        frozen.thaw()
        await all_serve(engine)

    run(made, frozen, other, work=work, server_timeout_s=3.0)
    assert any("is ejected" in line and "continue elsewhere" in line for line in made.said)


def test_a_server_that_was_started_again_gets_weights_before_work(made: Made) -> None:
    """Also where it is the only one: the rollout waits, as one in a queue."""
    server = made.server(delay_s=0.01)
    wanted = request(max_new_tokens=60)

    async def work(engine: RemoteEngine) -> None:
        await engine.load_weights(7, WEIGHTS)
        extend = asyncio.ensure_future(engine.extend(wanted))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        server.restart()
        queued = 0
        while not extend.done():
            queued += await engine.queued(["0-0", "7-7"]) == {"0-0"}
            await asyncio.sleep(0.005)
        same(extend.result(), server, wanted, version=7)
        assert queued and engine.stats()["engine/ejections"] == 1

    run(made, server, work=work)
    assert len(server.updates) == 2 and server.label.endswith("/7")


def test_tokens_of_a_server_that_restarted_unnoticed_are_dropped(made: Made) -> None:
    """It had its first weights again, and the request broke before the server said so."""
    server, wanted = made.server(), request(1)

    async def work(engine: RemoteEngine) -> None:
        await engine.load_weights(2, WEIGHTS)
        server.restart()
        server.faults.drops = [3]
        same(await engine.extend(wanted), server, wanted, version=2)

    run(made, server, work=work)


@pytest.mark.parametrize("lives", [False, True])
def test_server_left_in_an_update_gets_weights_first(lives: bool, made: Made) -> None:
    """A run that was killed between the beginning of an update and its end never finishes it, and the server refuses to
    begin another: that is finished for it. One that lives is waited for."""
    server = made.server()
    server.updating = True

    async def work(engine: RemoteEngine) -> None:
        await engine.load_weights(3, WEIGHTS)
        same(await engine.extend(request()), server, request(), version=3)

    if lives:
        threading.Timer(0.5, setattr, (server, "updating", False)).start()
    run(made, server, work=work)
    assert ("left open" in server.labels) != lives and server.label.endswith("/3")
    assert not server.updating and "could not join" not in "".join(made.said)


def test_tokens_of_other_weights_are_dropped(made: Made) -> None:
    """It was started again between two requests, and nobody had noticed: its own word tells."""
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        await engine.extend(request(1))
        server.label = "default"
        same(await engine.extend(request()), server, request())
        assert engine.stats()["engine/span_mismatches"] == 1 and engine.stats()["engine/ejections"] == 1

    run(made, server, work=work, server_timeout_s=1000.0)  # so that no probe sees it before


def test_refused_weights_are_retried_then_the_server_is_ejected(made: Made) -> None:
    once, often = made.server(), made.server()

    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        once.faults.updates, often.faults.updates = ["refuse"], ["refuse"] * 2
        await engine.load_weights(1, WEIGHTS)
        assert engine.oldest_version == 1 and engine.stats()["engine/refused_weights"] == 3
        assert engine.stats()["engine/servers"] == 1
        for answer in await asyncio.gather(*(engine.extend(request(i)) for i in range(3))):
            assert [s.policy_version for s in answer] == [1]
        await all_serve(engine)
        assert once.label == often.label and once.label.endswith("/1")

    run(made, once, often, work=work)


@pytest.mark.parametrize("shifted", [0, 2])
def test_versions_are_those_of_the_server_where_it_differs(shifted: int, made: Made) -> None:
    """And what it samples under each version has that version's log-probs."""
    server = made.server(delay_s=0.02)
    server.faults.shifted_spans = shifted
    wanted = request(max_new_tokens=60)

    async def work(engine: RemoteEngine) -> None:
        extend = asyncio.ensure_future(engine.extend(wanted))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        await engine.load_weights(1, WEIGHTS)
        old, new = await extend
        assert (old.policy_version, new.policy_version) == (0, 1)
        context = list(wanted.prompt.ids)
        for num, (token, logprob) in enumerate(zip(tokens_of([old, new]), logprobs_of([old, new]), strict=True)):
            version = 0 if num < len(old) - shifted else 1
            assert logprob == server.logprob(context, f"/{version}")
            context.append(token)
        assert engine.stats()["engine/span_mismatches"] == (1 if shifted else 0)

    run(made, server, work=work)


@pytest.mark.parametrize(
    "policy, clears, salted", [("recompute", True, False), ("keep", False, False), ("salt", False, True)]
)
def test_kv_of_old_weights_follows_kv_on_resume(policy: str, clears: bool, salted: bool, made: Made) -> None:
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        await engine.extend(request())
        await engine.load_weights(1, WEIGHTS)
        await engine.extend(request())

    run(made, server, work=work, rollout={"kv_on_resume": policy})
    assert server.calls == [f"pause clear_cache={str(clears).lower()} mode=keep"] * 2
    first, second = server.salts
    if salted:
        assert first is not None and second is not None and first.endswith("/0") and second.endswith("/1")
    else:
        assert first is second is None


def test_server_load_is_bounded_and_siblings_stay_together(made: Made) -> None:
    servers = [made.server(delay_s=0.003), made.server(delay_s=0.003)]
    wanted = [request(i, rollout_id=f"{i}-{j}") for i in range(3) for j in range(4)]

    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        for answer, each in zip(await asyncio.gather(*map(engine.extend, wanted)), wanted, strict=True):
            same(answer, servers[0], each)

    run(made, *servers, work=work)
    assert max(server.most_running for server in servers) <= 4
    for server in servers:
        groups = [i.partition("-")[0] for i in server.request_ids]
        assert any(len(list(alike)) == 4 for _, alike in itertools.groupby(groups))


def test_stop_rules_span_interruptions_and_surplus_is_counted(made: Made) -> None:
    server = made.server(chunk=5)

    async def work(engine: RemoteEngine) -> None:
        tokens = tokens_of(await engine.extend(request()))
        stop = text_of(tokens[3:5])
        whole_text = await engine.extend(request(stop=StopCriteria(strings=(stop,))))
        assert tokens_of(whole_text) == tokens[:5] and whole_text[-1].stop_reason is StopReason.STOP_STRING
        cut = request(generated_ids=tuple(tokens[:4]), max_new_tokens=8, stop=StopCriteria(strings=(stop,)))
        across = await engine.extend(cut)
        assert tokens_of(across) == tokens[4:5] and across[-1].stop_reason is StopReason.STOP_STRING
        assert engine.stats()["engine/surplus_tokens"] >= 4
        (paused,) = await engine.extend(request(pause_after=7))
        assert paused.token_ids.tolist() == tokens[:7] and paused.stop_reason is StopReason.PAUSED

    run(made, server, work=work)


def test_what_ends_by_itself_is_not_aborted(made: Made) -> None:
    """Though the end of its stream comes later than its last token."""
    server = made.server()
    server.faults.late_end_s = 0.2

    async def work(engine: RemoteEngine) -> None:
        same(await engine.extend(request()), server, request())

    run(made, server, work=work)
    assert "abort" not in server.calls


def test_stop_tokens_that_the_model_does_not_have_are_not_sent(made: Made) -> None:
    """A server may refuse them."""
    server = made.server()

    async def run() -> None:
        setup = RemoteSetup(config(server), lambda: WEIGHTS, text_of, vocab_size=lambda: 1000)
        engine = RemoteEngine(setup)
        await engine.extend(request(stop=StopCriteria(frozenset({999, 1000, 5000}))))
        await engine.close()

    asyncio.run(run())
    assert server.stops == [[999]]


def test_greedy_tokens_have_the_log_prob_0(made: Made) -> None:
    async def work(engine: RemoteEngine) -> None:
        (segment,) = await engine.extend(request(sampling=SamplingParams(temperature=0.0)))
        assert len(segment) == NUM and not segment.logprobs.any()

    run(made, made.server(), work=work)


def test_without_a_server_for_too_long_the_engine_has_ended(made: Made) -> None:
    server = made.server(delay_s=0.01)

    async def work(engine: RemoteEngine) -> None:
        extend = asyncio.ensure_future(engine.extend(request(max_new_tokens=2000)))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        server.close()
        with pytest.raises(EngineDied, match="none of the 1 servers .*engine.give_up_s"):
            await extend
        with pytest.raises(EngineDied):
            await engine.load_weights(1, WEIGHTS)
        with pytest.raises(EngineDied):
            await engine.extend(request())

    run(made, server, work=work, give_up_s=1.0)


def test_an_interruption_reaches_one_that_waits_for_a_server(made: Made) -> None:
    gone = made.server()
    gone.close()

    async def work(engine: RemoteEngine) -> None:
        extend = asyncio.ensure_future(engine.extend(request()))
        while await engine.queued(["0-0"]) != {"0-0"}:
            await asyncio.sleep(0.01)
        engine.interrupt()
        (nothing,) = await extend
        assert (len(nothing), nothing.stop_reason) == (0, StopReason.PAUSED)

    run(made, gone, work=work)


@pytest.mark.parametrize("policy", ["recompute", "keep", "salt"])
def test_weight_update_counts_reprefilled_or_stale_tokens(policy: str, made: Made) -> None:
    """Requests that run go on after new weights: all their tokens are prefilled again, or served from older ones."""
    server = made.server(delay_s=0.01)
    again, stale = "engine/reprefill_tokens", "kv/stale_prefix_tokens"

    async def work(engine: RemoteEngine) -> None:
        extends = [asyncio.ensure_future(engine.extend(request(i, max_new_tokens=80))) for i in range(2)]
        for i, extend in enumerate(extends):
            await engine_contract.wait_for_tokens(engine, request(i).rollout_id, 3, extend)
        before = engine.stats()
        assert before[again] == before[stale] == 0
        await engine.load_weights(1, WEIGHTS)
        after = engine.stats()
        answers = await asyncio.gather(*extends)
        assert all([s.policy_version for s in segments] == [0, 1] for segments in answers)
        # All but the last of the tokens that each had: it is decoded.
        had = sum(len(request(i).prompt) + len(segments[0]) - 1 for i, segments in enumerate(answers))
        assert (after[again], after[stale]) == ((had, 0) if policy == "recompute" else (0, had))
        assert engine.stats()[again] == after[again] and engine.stats()[stale] == after[stale]

    run(made, server, work=work, rollout={"kv_on_resume": policy})


def test_tokens_that_a_server_had_cached_are_told(made: Made) -> None:
    """Of a prompt: shared. Of a rollout that goes on: kept."""
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        server.cached_tokens = 2
        tokens = tokens_of(await engine.extend(request()))
        stats = engine.stats()
        assert (stats["kv/shared_prompt_tokens"], stats["kv/kept_tokens"]) == (2, 0)
        server.cached_tokens = 3
        await engine.extend(request(generated_ids=tuple(tokens[:4]), max_new_tokens=2))
        stats = engine.stats()
        assert (stats["kv/shared_prompt_tokens"], stats["kv/kept_tokens"]) == (2, 3)

    run(made, server, work=work)


# Sleep


def test_engine_asleep_places_nothing_and_wakes_with_new_weights(made: Made) -> None:
    """A rollout that was interrupted before is continued after it, with no token lost."""
    server = made.server(seeded=True, delay_s=0.01)
    engine = made.engine(server)

    async def run() -> None:
        await all_serve(engine)
        before = asyncio.ensure_future(engine.extend(request(max_new_tokens=200)))
        while not await engine.progress(["0-0"]) or not tokens_of((await engine.progress(["0-0"]))["0-0"]):
            await asyncio.sleep(0.01)
        engine.interrupt()
        first = await before
        await engine.sleep()
        assert server.asleep == {"weights", "kv_cache"}
        so_far = tuple(tokens_of(first))
        after = asyncio.ensure_future(engine.extend(request(generated_ids=so_far, max_new_tokens=3)))
        await asyncio.sleep(0.05)
        assert not after.done() and await engine.queued(["0-0"]) == {"0-0"}
        await engine.load_weights(1, WEIGHTS)
        (segment,) = await after
        assert segment.policy_version == 1 and len(segment.token_ids) == 3
        calls = [call for call in server.calls if "level" in call or "tags" in call]
        assert calls == ["sleep level=2", "wake_up tags=weights", "wake_up tags=kv_cache"]
        await engine.sleep()
        await engine.wake()  # no new weights: those that it had are loaded again
        await engine.wake()
        assert not server.asleep and server.label.endswith("/1") and len(server.updates) == 3
        assert tokens_of(await engine.extend(request(rollout_id="1-0", max_new_tokens=2)))
        assert engine.stats()["engine/ejections"] == 0
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_server_that_dies_asleep_is_not_missed_until_wake(made: Made) -> None:
    """give_up_s does not run meanwhile, and the server joins again afterwards, with the newest weights."""
    server = made.server()
    engine = made.engine(server, give_up_s=0.4, server_timeout_s=0.4)

    async def run() -> None:
        await all_serve(engine)
        await engine.sleep()
        server.close()
        while engine.stats()["engine/servers"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # more than give_up_s
        again = made.server(port=int(server.url.rpartition(":")[2]))
        await asyncio.sleep(0.3)
        assert engine.stats()["engine/servers"] == 0 and again.label == "default", "none joins meanwhile"
        await engine.load_weights(1, WEIGHTS)
        (segment,) = await engine.extend(request(max_new_tokens=2))
        assert segment.policy_version == 1 and again.label.endswith("/1")
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_server_that_cannot_sleep_is_ended(made: Made) -> None:
    """What keeps the trainer's GPU must not stay."""
    awake, good = made.server(), made.server()
    awake.faults.refuses["/sleep"] = 404
    engine = made.engine(awake, good)

    async def run() -> None:
        await all_serve(engine)
        await engine.sleep()
        assert engine.stats()["engine/servers"] == 1 and good.asleep and not awake.asleep
        assert any("did not fall asleep" in line for line in made.said)
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


# Servers that a run cannot use, or that are not there yet: it is said why, and no rollout is lost by it


@pytest.mark.parametrize(
    ("path", "status", "needed"),
    [
        ("/inference/v1/generate", 403, "--enable-scale-out"),
        ("/inference/v1/generate", 404, "--enable-scale-out"),
        ("/weight_info", 404, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_server_that_lacks_an_option_gets_no_rollout(path: str, status: int, needed: str, made: Made) -> None:
    lacks, server = made.server(), made.server()
    lacks.faults.refuses = {path: status}

    async def work(engine: RemoteEngine) -> None:
        for i in range(6):
            same(await engine.extend(request(i % 3, rollout_id=f"{i}-0")), server, request(i % 3))
        while not any(needed in line for line in made.said):
            await asyncio.sleep(0.01)
        assert engine.stats()["engine/servers"] == 1 and engine.stats()["engine/lost_requests"] == 0

    run(made, lacks, server, work=work)
    assert any(lacks.url in line and path in line for line in made.said) and not lacks.updates


def test_server_without_max_model_len_joins_beside_another(made: Made) -> None:
    server, silent = made.server(), made.server()
    silent.longest = None

    async def work(engine: RemoteEngine) -> None:
        assert await asyncio.to_thread(lambda: engine.max_tokens) == 2**20
        await engine.extend(request())
        while engine.stats()["engine/servers"] < 2:
            await asyncio.sleep(0.01)

    run(made, server, silent, work=work)


@pytest.mark.parametrize(
    ("of", "error", "why"),
    [
        ("silent", EngineDied, "max_model_len"),
        ("guarded", ValueError, "ROLLOVER_SERVER_TOKEN"),  # at once, though it may take its time
        ("gone", EngineDied, "no server of .engine. answered"),
    ],
)
def test_engine_without_a_usable_server_ends(of: str, error: type[Exception], why: str, made: Made) -> None:
    server = made.server()
    if of == "silent":
        server.longest = None
    elif of == "guarded":
        server.faults.refuses = {"/v1/models": 401}
    else:
        server.close()
    engine = made.engine(server, give_up_s=600.0 if of == "guarded" else 1.0)
    with pytest.raises(error, match=why):
        _ = engine.max_tokens
    asyncio.run(engine.close())
    if of == "gone":
        [line] = made.said
        assert server.url in line and "waited for" in line, "said once, before it is given up"


def test_an_engine_without_servers_ends_with_what_each_of_them_said(made: Made) -> None:
    refusing, lacking = made.server(), made.server()
    refusing.faults.updates = ["refuse"] * 100
    lacking.faults.refuses = {"/inference/v1/generate": 403}

    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(EngineDied) as died:
            await engine.extend(request())
        said = str(died.value)
        assert f"{refusing.url}: " in said and "refused: no" in said
        assert f"{lacking.url}: " in said and "--enable-scale-out" in said

    run(made, refusing, lacking, work=work, give_up_s=3.0)


def test_a_server_of_ours_that_ends_before_it_answers_is_started_again(made: Made, tmp_path: Path, monkeypatch) -> None:
    """Killed for want of memory, say, while the run loads its own model."""
    server = made.server()
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\necho start >> {tmp_path}/starts\n[ $(wc -l < {tmp_path}/starts) -gt 2 ] || kill -9 $$\n"
        f'echo \'{{"url": "{server.url}"}}\'\nexec sleep 600\n'
    )
    program.chmod(0o755)
    of = config(server, urls=[], num_servers=1)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(program))
        host = ProcessHost(of, 0, 60.0, tmp_path / "logs")
        engine = RemoteEngine(RemoteSetup(of, lambda: WEIGHTS, text_of, hosts=[host]))
        began = time.monotonic()
        assert engine.max_tokens == 2**20
        assert time.monotonic() - began < of.engine.give_up_s
    assert (tmp_path / "starts").read_text().count("start") == 3
    asyncio.run(engine.close())
    assert not host.pid


class Deaf(UrlHost):
    """Forgets that it was cancelled, once: as libraries do whose time-out is up at the same moment."""

    async def ready(self) -> ServerClient:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        await asyncio.sleep(3600)
        return await super().ready()


def test_an_engine_is_closed_also_where_a_cancellation_is_forgotten(made: Made) -> None:
    server = made.server()

    async def work() -> None:
        setup = RemoteSetup(config(server), lambda: WEIGHTS, text_of, hosts=[Deaf(server.url)])
        engine = RemoteEngine(setup)
        await engine.load_weights(0, WEIGHTS)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(engine.close(), 60)

    asyncio.run(work())


# Servers that answer what no server should: it costs no token, and the others go on


GENERATE = "/inference/v1/generate"
PAGE = b"<!DOCTYPE html><html><h1>It works!</h1></html>"
RUBBISH = [PAGE, b"[]", b'"x"', b"\xff\xfe", b'{"data": {"a": 1}}', b'{"data": ["x"]}', b"[" * 100_000]


@pytest.mark.parametrize("path", ["/weight_info", "/v1/models"])
def test_another_program_in_place_of_a_server_costs_no_token(path: str, made: Made) -> None:
    """While it joins, and while it serves."""
    server = made.server()
    odd = {body: made.server() for body in RUBBISH}

    def answer(with_rubbish: bool) -> None:
        for body, each in odd.items():
            each.faults.answers = {path: body} if with_rubbish else {}

    async def work(engine: RemoteEngine) -> None:
        answer(with_rubbish=True)
        same(await engine.extend(request()), server, request())
        answer(with_rubbish=False)
        await all_serve(engine)
        answer(with_rubbish=True)
        while path == "/weight_info" and engine.stats()["engine/servers"] > 1:
            await asyncio.sleep(0.01)
        await engine.load_weights(1, WEIGHTS)
        same(await engine.extend(request(1)), server, request(1), version=1)

    run(made, server, *odd.values(), work=work, server_timeout_s=2.0)


def chunk(*tokens: object, logprob: object = -1.0, **more: object) -> bytes:
    content = [{"logprob": logprob} for _ in tokens]
    choice = {"token_ids": tokens, "logprobs": {"content": content}, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


NO_TOKENS = [
    PAGE,
    b"data: " + PAGE + b"\n",
    b"data: \xff\xfe\n",
    b"data: " + b"[" * 100_000 + b"\n",
    b"data: [1]\ndata: null\n",
    b'data: {"choices": 5}\n',
    b'data: {"choices": [], "usage": []}\n',
    b'data: {"choices": [], "usage": [1]}\n',
    chunk(-1),
    chunk(10**6),
    chunk(2**40),
    chunk(None),
    chunk(True),
    chunk(1, logprob=True),
    chunk(1, logprob=3.0),
    chunk(1, logprob=0.01),
    chunk(1, logprob="x"),
    chunk(1, logprob=None),
    chunk(1.5),
    chunk(float("inf")),
    chunk(finish_reason="length", weight_versions=[7]),
    chunk(finish_reason="length", weight_versions=7),
]


def test_what_is_no_token_is_nobodys(made: Made) -> None:
    """Of two rollouts one is sent to each server: what the odd one says is asked of the other one again."""
    server, odd = made.server(), made.server()

    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        for i, body in enumerate(NO_TOKENS):
            odd.faults.answers = {GENERATE: body}
            wanted = [request(0, rollout_id=f"{2 * i + j}-0") for j in range(2)]
            for answer in await asyncio.gather(*map(engine.extend, wanted)):
                same(answer, server, wanted[0])
            assert engine.stats()["engine/lost_requests"] > i

    run(made, server, odd, work=work)


UNREADABLE = [
    ("application/json", b"[" * 200_000),
    ("application/json", b'{"error": ' * 100_000),
    ("text/plain; charset=base64", b"eA=="),  # a codec of Python's, and no text encoding
    ("text/plain; charset=no-such-charset", b"x"),
    ("application/json; charset=utf-16", b"{}"),
]


@pytest.mark.parametrize("path", [GENERATE, "/update_weights", "/weight_info"])
def test_an_error_that_cannot_be_read_is_a_failure_of_its_server(path: str, made: Made) -> None:
    """So that the server is probed, or given up: it is no failure of the engine."""
    server, odd = made.server(), made.server()

    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        few = UNREADABLE if path == GENERATE else UNREADABLE[1:3]  # each of the others is a back-off
        for i, failure in enumerate(few):
            odd.faults.failures = {path: failure}
            if path == "/update_weights":
                await engine.load_weights(i + 1, WEIGHTS)
            wanted = [request(0, rollout_id=f"{2 * i + j}-0") for j in range(2)]
            for answer in await asyncio.gather(*map(engine.extend, wanted)):
                same(answer, server, wanted[0], version=engine.oldest_version)
            if path == GENERATE:
                assert engine.stats()["engine/lost_requests"] > i
                continue
            while engine.stats()["engine/ejections"] <= i:
                await asyncio.sleep(0.01)
            odd.faults.failures = {}
            await all_serve(engine)

    run(made, server, odd, work=work, server_timeout_s=2.0)


def test_an_event_or_an_answer_without_end_is_not_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_client, "MOST_ANSWER_BYTES", 10_000)
    server = made.server()
    server.faults.answers = {path: b"x" * 10_001 for path in (GENERATE, "/weight_info")}

    async def ask() -> None:
        client = ServerClient(server.url)
        with pytest.raises(ServerFailed, match="event of more than 10,000 bytes"):
            _ = [data async for data in client.events(GENERATE, {})]
        with pytest.raises(ServerFailed, match="more than 10,000 bytes"):
            await client.get("/weight_info", limit_s=60)
        server.faults.answers[GENERATE] = b"\n".join([b": a comment " + b"x" * 5000] * 9 + [chunk(1)])
        assert [json.loads(data)["choices"][0]["token_ids"] async for data in client.events(GENERATE, {})] == [[1]]
        await client.close()

    asyncio.run(ask())


def test_a_proxy_of_the_environment_is_for_others(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines of which only a proxy reaches the world."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        assert engine.max_tokens == 2**20
        same(await engine.extend(request()), server, request())

    run(made, server, work=work, give_up_s=5.0)


class Unlucky(UrlHost):
    """The disk is full when it is to be started, at first."""

    tries = 0

    async def ready(self) -> ServerClient:
        self.tries += 1
        if self.tries < 3:
            raise OSError(28, "No space left on device")
        return await super().ready()


def test_a_server_that_cannot_be_started_now_is_tried_again(made: Made) -> None:
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        same(await engine.extend(request()), server, request())

    async def limited() -> None:
        setup = RemoteSetup(config(server), lambda: WEIGHTS, text_of, hosts=[Unlucky(server.url)])
        engine = RemoteEngine(setup)
        try:
            await asyncio.wait_for(work(engine), 300)
        finally:
            await engine.close()

    asyncio.run(limited())
    assert any("No space left on device" in line for line in made.said)


def test_a_server_that_another_run_uses_too_is_told_as_such(made: Made) -> None:
    server = made.server(delay_s=0.005)

    async def work(engine: RemoteEngine) -> None:
        await engine.load_weights(1, WEIGHTS)
        extend = asyncio.ensure_future(engine.extend(request(max_new_tokens=40)))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        server.label = "another/1"
        same(await extend, server, request(max_new_tokens=40), version=1)

    run(made, server, work=work)
    assert any("'another/1'" in line and "another run uses it, too" in line for line in made.said), made.said
