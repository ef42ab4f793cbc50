"""A host without an engine: each turn is what a function says to the text before it, token by token of a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from heard import hear
from rollover.types import Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task
from rollover.workflows.conversations import Chats
from rollover.workflows.episodes import Episodes
from rollover.workflows.gateway import Gateway
from rollover.workflows.protocol import Workflow, WorkflowFunction
from rollover.workflows.turns import EpisodeLimits
from unit.envs import templates

Policy = Callable[[str], str]


class ScriptedHost:
    """Runs one Episode of `workflow` on a task: a function, or one of another kind, for which the gateway is served.
    `policy`: the text before a turn -> what it says."""

    def __init__(
        self, workflow: Callable[..., Any] | Workflow, policy: Policy, template: str = templates.CHATML, **limits: Any
    ) -> None:
        self.tokenizer, self.policy = templates.tokenizer(template), policy
        settings: dict[str, Any] = {"max_new_tokens": 400, "max_prompt_tokens": 2000} | limits
        self.chats = Chats(self.tokenizer)
        plays: Workflow = workflow if hasattr(workflow, "spec") else WorkflowFunction(workflow, "mine")  # type: ignore
        self.gateway = Gateway(plays, self.tokenizer, SamplingParams())
        self.episodes = Episodes(plays, self.chats, EpisodeLimits(**settings), self.gateway)
        self.task = Task("t", "test", "", messages=({"role": "user", "content": "What is 2+2?"},))
        self.task_prompt = self.chats.for_tools(()).prompt(self.task.messages or ())
        self.rollouts: dict[str, Rollout] = {}
        self.rewards: dict[str, Reward] = {}
        self.restarts = 0
        self.delay_s = 0.0
        self.hold: asyncio.Event | None = None
        self.said: list[str] = hear([])

    def run(self) -> dict[str, Reward]:
        """The rewards, by id of the rollout."""
        asyncio.run(asyncio.wait_for(self.play(), 120 if self.episodes.workflow.over_http else 5))
        return self.rewards

    async def play(self) -> None:
        self.over = asyncio.Event()
        self.playing: set[asyncio.Task[None]] = set()
        try:
            if self.episodes.workflow.over_http:
                await self.episodes.start()
            self._begin()
            while not self.over.is_set():
                await asyncio.wait(self.episodes.pending)
                requests, ended = self.episodes.take_requests()
                for _, rollout in requests:
                    self._restart() if rollout is None else self._open(rollout)
                for _ in ended:
                    self._on_end()
            if self.playing:
                await asyncio.wait(self.playing)
            self.episodes.end([0])
        finally:
            await self.episodes.close()

    def _begin(self) -> None:
        self.rollouts.clear()
        first = Rollout(0, 0, self.task, prompt=self.task_prompt)
        self.episodes.begin(first)

    def _open(self, rollout: Rollout) -> None:
        assert rollout.rollout_id not in self.rollouts
        self.rollouts[rollout.rollout_id] = rollout
        task = asyncio.ensure_future(self._play(rollout))
        self.playing.add(task)
        task.add_done_callback(self.playing.discard)

    def _restart(self) -> None:
        self.restarts += 1
        for task in self.playing:
            task.cancel()
        self._begin()

    def _on_end(self) -> None:
        self.over.set()

    async def _play(self, rollout: Rollout) -> None:
        while True:
            await asyncio.sleep(self.delay_s)
            if self.hold is not None:
                await self.hold.wait()
            options = self.episodes.options(rollout)
            before = self.tokenizer.decode([*rollout.prompt.ids, *rollout.token_ids()])
            ids = [*self.tokenizer(self.policy(before))["input_ids"], self.chats.for_tools(()).end_of_turn]
            assert options.most_tokens is not None
            room = options.most_tokens - rollout.num_tokens
            reason = StopReason.EOS if len(ids) <= room else StopReason.LENGTH
            ids = ids[:room]
            rollout.add(
                Segment(np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32), 3, SamplingParams(), reason)
            )
            copy = replace(rollout, state=RolloutState.RUNNING, stop_reason=reason)
            written = await self.episodes.next(copy)
            if written is None or written.stop_reason is not StopReason.PAUSED:
                rollout.stop_reason = reason if written is None else written.stop_reason
                [self.rewards[rollout.rollout_id]] = await self.episodes.score([rollout])
                return
            assert not written.trainable and written.start == rollout.num_tokens
            rollout.add(written)
