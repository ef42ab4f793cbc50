"""The episodes of a run, and the server for those of its agents that ask over HTTP."""

from __future__ import annotations

from typing import Any

from rollover.config import Config
from rollover.types import SamplingParams
from rollover.workflows.conversations import Chats
from rollover.workflows.episodes import Episodes
from rollover.workflows.function import KEY, WorkflowFunction
from rollover.workflows.player import Limits
from rollover.workflows.verifiers.workflow import VerifiersWorkflow


def build_episodes(config: Config, tokenizer: Any, vocab_size: int, max_tokens: int) -> Episodes:
    """`max_tokens`: the longest rollout, prompt included, that the engine takes. ValueError where workflow.function,
    the chat template or what it needs does not fit."""
    workflow, rollout = config.workflow, config.rollout
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
    function = (
        VerifiersWorkflow(workflow, sampling) if workflow.verifiers else WorkflowFunction.named(workflow.function)
    )
    chats = Chats(tokenizer, vocab_size=vocab_size)
    chats.of(()).require("user")
    limits = Limits(
        max_new_tokens=rollout.max_new_tokens,
        max_prompt_tokens=max_tokens - rollout.max_new_tokens,
        max_turns=workflow.max_turns,
        timeout_s=workflow.timeout_s,
        on_timeout=workflow.on_timeout,
        timeout_score=workflow.timeout_score,
        retries=workflow.retries,
        precomputed=lambda role: workflow.advantage_of(role, config.algorithm.advantage) == "precomputed",
    )
    episodes = Episodes(function, chats, limits, sampling)
    if function.over_http:
        _require_extra()
    return episodes


class EpisodeServer:
    """Serves the calls of `episodes` on workflow.port, where their function asks over HTTP; else it does nothing."""

    def __init__(self, episodes: Episodes, port: int) -> None:
        self.episodes, self._port = episodes, port
        self._server: Any = None
        self._client: Any = None

    async def start(self) -> None:
        """ValueError where the port is taken."""
        episodes = self.episodes
        if not episodes.function.over_http:
            return
        from rollover.workflows.gateway.app import Gateway
        from rollover.workflows.gateway.server import GatewayServer

        gateway, function = Gateway(episodes.calls), episodes.function
        played = function if isinstance(function, VerifiersWorkflow) else None
        self._server = GatewayServer(gateway.app if played is None else played.over(gateway.app), self._port)
        await self._server.start()
        episodes.base_url, episodes.calls.undelivered = self._server.base_url, gateway.forget
        if played is not None:
            await played.start(self._server.base_url)
        if "client" in episodes.function.wanted:
            import openai

            # One pool of connections for all of them: a client a call would be a pool a call.
            self._client = openai.AsyncOpenAI(base_url=episodes.base_url, api_key="none", timeout=None)
            episodes.make_client = lambda api_key: self._client.with_options(api_key=api_key)

    async def close(self) -> None:
        """End every connection."""
        if isinstance(self.episodes.function, VerifiersWorkflow):
            await self.episodes.function.close()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.close()


def _require_extra() -> None:
    try:
        import openai  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{KEY} has a parameter of {', '.join(('client', 'base_url', 'api_key'))}, for which {error.name} is"
            " missing: pip install 'rollover[agents]', or ask by episode.trajectory().chat(messages)"
        ) from error
