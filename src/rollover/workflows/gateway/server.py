"""The calls of agents that know their trajectory by its key, and the gateway by which they ask over HTTP.

Agents reach it directly, whatever proxy the user's shell names (HTTP_PROXY). Clients read that from the environment:
the user's own in this process, and those in child processes. So it is there that the gateway's host is named as one
without a proxy, while a gateway is served.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rollover.types import SamplingParams
from rollover.workflows.calls import MODEL, Call, Reply, UnknownKey, UnknownModel
from rollover.workflows.protocol import Workflow

if TYPE_CHECKING:
    from rollover.workflows.gateway.app import Gateway

Ask = Callable[[str, Call], Awaitable[Reply]]
"""Answers a call of a trajectory. The text: the role by which it is made; "": the trajectory's own."""
NAMES = ("NO_PROXY", "no_proxy")
_changed: dict[str, tuple[str | None, str]] = {}  # what each said before, and what it says since
_num_inside = 0  # several gateways may be served at once, and this process has one environment


class EpisodeServer:
    """Of one run, whose agents are those of `function`. Where they ask over HTTP, `start` serves them on `port`
    (workflow.port). `base_url`: the gateway's; "" where none is served. It is what the gateway asks (calls.Caller)."""

    def __init__(self, function: Workflow, tokenizer: Any, sampling: SamplingParams, port: int = 0) -> None:
        self.function, self.sampling, self.base_url = function, sampling, ""
        self._tokenizer, self._port = tokenizer, port
        self._of_key: dict[str, Ask] = {}
        self._unproxied = ExitStack()
        self._gateway: Gateway | None = None
        self._server: Any = None
        self._client: Any = None

    async def start(self) -> None:
        """ValueError where the port is taken."""
        if not self.function.over_http:
            return
        from rollover.http_server import LOOPBACK, HttpServer
        from rollover.workflows.gateway.app import Gateway

        self._gateway = Gateway(self)
        self._server = HttpServer(self.function.over(self._gateway.app), self._port, name="workflow.port")
        await self._server.start()
        self.base_url = f"{self._server.url}/v1"
        self._unproxied.enter_context(without_proxy(LOOPBACK))
        await self.function.start(self.base_url)
        if "client" in self.function.wanted:
            import openai

            # One pool of connections for all of them: a client a call would be a pool a call.
            self._client = openai.AsyncOpenAI(base_url=self.base_url, api_key="none", timeout=None)

    async def close(self) -> None:
        """End every agent and every connection."""
        with self._unproxied:
            await self.function.close()
            if self._client is not None:
                await self._client.close()
            if self._server is not None:
                await self._server.close()

    # The episodes' side

    def arguments(self, api_key: str) -> Mapping[str, Any]:
        """Those of the function that depend on nothing but the key."""
        wants_client = "client" in self.function.wanted
        return {"client": self._client and self._client.with_options(api_key=api_key)} if wants_client else {}

    def open(self, api_key: str, ask: Ask) -> None:
        """From now on calls with this key go to `ask`."""
        self._of_key[api_key] = ask

    def shut(self, api_keys: Iterable[str]) -> set[str]:
        """No more. Returns the ids of Rollouts with an answer that did not reach its client."""
        ids: set[str] = set()
        for api_key in api_keys:
            if self._of_key.pop(api_key, None) is not None and self._gateway is not None:
                ids |= {reply.reply_id.partition("/")[0] for reply in self._gateway.forget(api_key)}
        return ids

    # The gateway's side

    def models(self) -> Sequence[str]:
        return [MODEL]

    def find(self, key: str, model: str) -> None:
        if key not in self._of_key:
            raise UnknownKey("no open trajectory has this API key: its episode may have ended")
        name, slash, role = model.partition("/")
        if name != MODEL or (slash and not role):
            raise UnknownModel(f"the model {model!r} is not the run's: ask for {MODEL}, or {MODEL}/ROLE", "model")

    async def call(self, key: str, model: str, call: Call) -> Reply:
        self.find(key, model)
        return await self._of_key[key](model.partition("/")[2], call)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([token_id]) for token_id in token_ids]


@contextmanager
def without_proxy(host: str) -> Iterator[None]:
    """Inside, clients of this process, and of those that it starts, ask `host` directly. When the last one leaves, the
    variables say what they said before, but for one that somebody else has changed meanwhile."""
    global _num_inside
    _num_inside += 1
    for name in NAMES:
        before = os.environ.get(name)
        hosts = [known for known in (before or "").split(",") if known]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])
            _changed[name] = before, os.environ[name]
    try:
        yield
    finally:
        _num_inside -= 1
        if not _num_inside:
            _take_back()


def _take_back() -> None:
    for name, (before, ours) in _changed.items():
        if os.environ.get(name) != ours:
            continue
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _changed.clear()
