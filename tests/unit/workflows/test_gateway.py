"""The gateway, asked by the real `openai` client: answers, refusals by name, keep-alive, retries that join."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rollover.http_server import HttpServer
from rollover.types import SamplingParams, StopReason
from rollover.workflows.conversations import BudgetUsedUp, Call, Reply, ToolCall
from rollover.workflows.gateway import Gateway
from rollover.workflows.protocol import WorkflowFunction

openai = pytest.importorskip("openai")

USER: Any = [{"role": "user", "content": "What is 2+2?"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class FakePolicy:
    """Answers calls after `seconds`, or raises `error`. `calls`: (role, call) of those that came."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error, self.calls = seconds, error, list[tuple[str, Call]]()

    async def answer(self, role: str, call: Call) -> Reply:
        self.calls.append((role, call))
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        tools = (ToolCall("call-0", "add", '{"a": 1}'),) if call.tools else ()
        return Reply(
            f"0-0/{len(self.calls)}",
            "" if tools else "four",
            tools,
            StopReason.LENGTH if call.max_tokens == 2 else StopReason.EOS,
            (5, 6, 7),
            np.array([8, 9], dtype=np.int32),
            np.array([-0.5, -1.5], dtype=np.float32),
            np.array([3, 3], dtype=np.int32),
        )

    def gateway(self, keep_alive_s: float = 0.1) -> Gateway:
        """A gateway whose key key-1 reaches this policy."""
        gateway = Gateway(WORKFLOW, FakeTokenizer(), SamplingParams(temperature=1.0), keep_alive_s=keep_alive_s)
        gateway.open("key-1", self.answer)
        return gateway


class FakeTokenizer:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in token_ids)


async def workflow(client: Any) -> None: ...


WORKFLOW = WorkflowFunction(workflow, "mine")


def served(
    body: Callable[[Any], Awaitable[None]], policy: FakePolicy, keep_alive_s: float = 0.1, **options: Any
) -> Gateway:
    """Run `body(client)` beside the policy's gateway."""
    gateway = policy.gateway(keep_alive_s)

    async def main() -> None:
        server = HttpServer(gateway.app)
        await server.start()
        settings = {"api_key": "key-1", "timeout": 20.0, "max_retries": 0} | options
        try:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", **settings) as client:
                await body(client)
        finally:
            await server.close()

    asyncio.run(main())
    return gateway


def test_a_chat_completion_has_text_usage_and_exact_tokens():
    async def body(client: Any) -> None:
        done = await client.chat.completions.create(
            model="policy", messages=USER, logprobs=True, max_tokens=2, stop="]]", extra_body={"return_token_ids": True}
        )
        assert done.choices[0].message.content == "four"
        assert done.choices[0].finish_reason == "length"
        assert [(t.token, t.logprob) for t in done.choices[0].logprobs.content] == [("<8>", -0.5), ("<9>", -1.5)]
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 2)
        extra = done.choices[0].model_dump()
        assert extra["token_ids"] == [8, 9] and extra["prompt_token_ids"] == [5, 6, 7]

    policy = FakePolicy()
    gateway = served(body, policy)
    assert policy.calls == [("", Call(messages=tuple(USER), max_tokens=2, stop=("]]",)))]
    assert gateway.num_in_flight == 0


def test_tools_and_choices():
    async def body(client: Any) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        done = await client.chat.completions.create(model="policy/judge", messages=USER, tools=[TOOL], n=2)
        assert [c.index for c in done.choices] == [0, 1]
        call = done.choices[0].message.tool_calls[0]
        assert (call.id, call.function.name, call.function.arguments) == ("call-0", "add", '{"a": 1}')
        assert done.choices[0].finish_reason == "tool_calls"

    policy = FakePolicy()
    served(body, policy)
    assert [role for role, _ in policy.calls] == ["judge", "judge"]


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_stream_gives_the_same(tools: list[Any]):
    async def body(client: Any) -> None:
        stream = await client.chat.completions.create(
            model="policy",
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
            tools=tools or openai.NOT_GIVEN,
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == ("" if tools else "four")
        assert [c.function.name for d in deltas for c in d.tool_calls or []] == ["add"] * len(tools)
        assert chunks[-2].choices[0].finish_reason == ("tool_calls" if tools else "stop")
        assert chunks[-1].usage.completion_tokens == 2

    served(body, FakePolicy(0.3), keep_alive_s=0.05)


def test_completions_take_texts_and_token_ids():
    async def body(client: Any) -> None:
        done = await client.completions.create(model="policy", prompt=[1, 2, 3], logprobs=1)
        assert done.choices[0].text == "four"
        assert done.choices[0].logprobs.tokens == ["<8>", "<9>"]
        stream = await client.completions.create(model="policy", prompt="a text", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "four"

    policy = FakePolicy()
    served(body, policy)
    assert [call.prompt for _, call in policy.calls] == [(1, 2, 3), "a text"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
            "messages[0].content",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(asked: dict[str, Any], param: str):
    async def body(client: Any) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "policy", "messages": USER} | asked)
        assert refused.value.param == param

    policy = FakePolicy()
    served(body, policy)
    assert not policy.calls


def test_what_asks_for_nothing_else_than_the_run_does_is_taken():
    async def body(client: Any) -> None:
        await client.chat.completions.create(
            model="policy", messages=USER, temperature=1.0, top_p=1, presence_penalty=0, user="me", tool_choice="auto",
            response_format={"type": "text"}, store=False, parallel_tool_calls=True,
        )  # fmt: skip

    policy = FakePolicy()
    served(body, policy)
    assert len(policy.calls) == 1


def test_wrong_key_foreign_model_and_a_budget_used_up():
    async def body(client: Any) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").chat.completions.create(model="policy", messages=USER)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4o", messages=USER)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=USER)
        assert refused.value.code == "context_length_exceeded"

    served(body, FakePolicy(error=BudgetUsedUp("the rollout has no token left")))


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_pause_is_one_turn(stream: bool):
    """The read time-out of the client is shorter than the pause."""

    async def body(client: Any) -> None:
        done = await client.chat.completions.create(model="policy", messages=USER, stream=stream)
        text = (
            "".join([c.choices[0].delta.content or "" async for c in done])
            if stream
            else done.choices[0].message.content
        )
        assert text == "four"

    policy = FakePolicy(2.0)
    served(body, policy, keep_alive_s=0.1, timeout=0.8, max_retries=2)
    assert len(policy.calls) == 1


def test_a_clients_retry_joins_its_call():
    """No sign of life in time: the client closes its connection and asks again, and there is one turn."""

    async def body(client: Any) -> None:
        done = await client.chat.completions.create(model="policy", messages=USER)
        assert done.choices[0].message.content == "four"

    policy = FakePolicy(1.5)
    gateway = served(body, policy, keep_alive_s=60, timeout=0.7, max_retries=3)
    assert len(policy.calls) == 1 and gateway.num_in_flight == 0


def test_an_equal_call_that_is_no_retry_is_another_turn():
    async def body(client: Any) -> None:
        ask = client.chat.completions.create
        await asyncio.gather(ask(model="policy", messages=USER), ask(model="policy", messages=USER))
        await ask(model="policy", messages=USER)

    policy = FakePolicy(0.1)
    served(body, policy)
    assert len(policy.calls) == 3


def test_an_error_after_the_headers_reaches_the_client():
    async def body(client: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            await client.with_options(max_retries=2).chat.completions.create(model="policy", messages=USER)
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="policy", messages=USER, stream=True):
                pass

    policy = FakePolicy(0.4, BudgetUsedUp("the rollout has no token left"))
    served(body, policy, keep_alive_s=0.1)
    assert len(policy.calls) == 2


def test_a_call_that_fails_for_another_reason_says_why():
    async def body(client: Any) -> None:
        with pytest.raises(openai.InternalServerError, match="KeyError: 'no such page'"):
            await client.chat.completions.create(model="policy", messages=USER)

    served(body, FakePolicy(error=KeyError("no such page")))


def test_a_call_given_up_is_forgotten_with_its_key():
    async def body(client: Any) -> None:
        await client.chat.completions.create(model="policy", messages=USER)

    policy = FakePolicy(60)
    gateway = policy.gateway(60)

    async def main() -> None:
        server = HttpServer(gateway.app)
        await server.start()
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key-1", timeout=30, max_retries=0) as client:
            asked = asyncio.ensure_future(body(client))
            while not gateway.num_in_flight:
                await asyncio.sleep(0.02)
            asked.cancel()
            await asyncio.wait([asked])
        assert gateway.num_in_flight == 1
        gateway.revoke(["key-2"])
        assert gateway.num_in_flight == 1
        assert gateway.revoke(["key-1"]) == set()
        assert gateway.num_in_flight == 0
        await server.close()

    asyncio.run(main())


def test_only_this_machine_is_served_and_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"workflow\.port"):
            HttpServer(None, taken.getsockname()[1], name="workflow.port")

    async def body(client: Any) -> None:
        assert client.base_url.host == "127.0.0.1"
        with pytest.raises(openai.BadRequestError):
            await client.post("/chat/completions", body=json.loads("[1]"), cast_to=object)

    served(body, FakePolicy())
