"""workflow.verifiers: an episode is one of a verifiers environment, and each of its traces is a trajectory.

    verifiers' Env ──▶ a harness for each seat ──call──▶ its interception server ──X-Session-ID──▶ our gateway
         └── traces with rewards and metrics, at the end ──▶ the trajectories that their calls were turns of

Owns the environment while it is served, and which trace is which trajectory. What is sampled, and which Rollout a call
continues, is the gateway's business as for any agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rollover.config.workflow import WorkflowConfig
from rollover.functions import explained
from rollover.plugins.verifiers.package import ARGS, KEY, load_environment, package, seats
from rollover.plugins.verifiers.sessions import Sessions
from rollover.plugins.verifiers.source import task_again
from rollover.types import Reward, SamplingParams
from rollover.workflows.episode import Episode, EpisodeTrajectory
from rollover.workflows.protocol import Answer, Lane, Waiting

MODEL = "policy"
_NO_VARIABLE = "ROLLOVER_HAS_NO_API_KEY"  # verifiers reads a key from the environment: ours goes by the trace
_ENDS_S = 10.0  # in which episodes that were cancelled put away what they have started


class EpisodeFailed(RuntimeError):
    """An episode of verifiers that is no valid result. The text says why, in verifiers' words."""


@dataclass(eq=False)
class _Played:
    """One Episode as it is played: its trajectories by the ids of their traces."""

    episode: Episode
    sessions: Sessions
    roles: Mapping[str, str]  # of seats that ask the policy
    trajectories: dict[str, EpisodeTrajectory] = field(default_factory=dict)

    def on_trace(self, trace: Any) -> None:
        """A seat begins to play, and has not asked for anything yet."""
        role = self.roles.get(trace.agent.name)
        if role is not None:
            trajectory = self.trajectories[trace.id] = self.episode.trajectory(role)
            self.sessions.add(trace.id, trajectory.api_key)

    def on_discard(self, trace: Any) -> None:
        """verifiers plays the seat again."""
        if trace.id in self.trajectories:
            self.trajectories[trace.id].reward = Reward(None, error="verifiers has played it again")

    def score(self, trace: Any) -> None:
        if trace.id in self.trajectories:
            self.trajectories[trace.id].reward = reward_of(trace)


class VerifiersWorkflow:
    """Of [workflow]. `sampling`: the run's. ValueError, with the fix, for an environment that cannot be played."""

    wanted, over_http = ("task", "episode"), True

    def __init__(self, workflow: WorkflowConfig, sampling: SamplingParams) -> None:
        self.spec, self._taskset, self._untrained = (
            f"{KEY} = {workflow.verifiers!r}",
            workflow.verifiers,
            workflow.untrained,
        )
        self._vf = package()
        self.env = load_environment(workflow.verifiers, workflow.verifiers_args)
        found = seats(self._vf, self.env.config)
        asking = [name for name, seat in found.items() if seat.client is None]
        # A seat that plays alone is the policy of a plain run.
        self._roles = {name: MODEL if len(found) == 1 else name for name in asking}
        for name in asking:
            self._check_sampling(name, found[name], sampling)
        self._sessions = Sessions()
        self._context: Any = None
        self._playing: set[asyncio.Task[Any]] = set()
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def over(self, app: Any) -> Any:
        """The gateway's ASGI application, for the calls of verifiers."""
        return self._sessions.over(app)

    async def start(self, base_url: str) -> None:
        """Serve what the environment needs while it is played, the servers of its tools among it. `base_url`: the
        gateway's. ValueError where that cannot be."""
        vf = self._vf
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=_NO_VARIABLE)
        self._context = vf.ModelContext(model=MODEL, client=client, sampling=vf.Sampling())
        try:
            await self._check_trainable()
            ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.ensure_future(self._serve(ready))
            await ready
        except ValueError:
            raise
        except Exception as error:  # boundary: the user's environment
            raise ValueError(f"{self.spec} cannot be served: {explained(error)}") from error

    async def close(self) -> None:
        """End its servers, after the episodes that were cancelled have ended theirs."""
        if self._playing:
            await asyncio.wait(self._playing, timeout=_ENDS_S)
        self._stop.set()
        if self._serving is not None:
            await asyncio.wait([self._serving])

    async def __call__(
        self, values: Mapping[str, Any], waiting: Waiting = nullcontext, lane: Lane = Lane.TRAINING, /
    ) -> Answer:
        """Play one Episode: every trajectory gets the reward of its trace. EpisodeFailed where it is no valid one."""
        task = asyncio.current_task()
        assert task is not None
        self._playing.add(task)
        played = _Played(values["episode"], self._sessions, self._roles)
        try:
            done = await self.env.run_episode(
                task_again(self._taskset, values["task"]),
                self._context,
                on_trace=played.on_trace,
                on_discard=played.on_discard,
            )
        finally:
            self._playing.discard(task)
            self._sessions.forget(played.trajectories)
        if not self.env.complete(done):
            raise EpisodeFailed(_why(done))
        for trace in done.traces:
            played.score(trace)
        return None

    # Private

    def _check_sampling(self, name: str, seat: Any, sampling: SamplingParams) -> None:
        """Sampling is the run's: another one would be refused at each call."""
        for key, value in seat.sampling.model_dump(exclude_none=True).items() if seat.sampling else ():
            if key != "max_tokens" and value != getattr(sampling, key, None):
                raise ValueError(
                    f"{self.spec}: its seat {name!r} samples with {key} = {value!r}, which is not the run's"
                    f" (rollout.{key}). Set {ARGS}.{name}.sampling to the run's, or leave it out of the environment"
                )

    async def _check_trainable(self) -> None:
        """ValueError for a role that the environment does not want to be trained, and the configuration does."""
        vf, harnesses = self._vf, self.env.config.agent_harnesses()

        def make(name: str, seat: Any) -> Any:
            ours = {"model": seat.model or MODEL, "client": seat.client or self._context.client}
            return vf.make_agent(seat.model_copy(update=ours | {"harness": harnesses[name]}))

        agents = vf.Agents(self.env.config, make)
        await self.env.setup(agents)
        for name, role in self._roles.items():
            if not getattr(agents, name).trainable and role not in self._untrained:
                others = "".join(f", and a table for each other role: {r}" for r in self._others(role))
                raise ValueError(
                    f"{self.spec} does not train its seat {name!r}: set workflow.roles.{role}.trained = false{others}"
                )

    def _others(self, role: str) -> list[str]:
        names = ", ".join(other for other in self._roles.values() if other != role)
        return [names] if names else []

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.env.serving():
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # boundary: the user's environment
            if not ready.done():
                ready.set_exception(error)


def reward_of(trace: Any) -> Reward:
    """The sum of a verifiers Trace's weighted rewards; its extras are each reward by itself, and the metrics."""
    if not trace.ok:
        return Reward(None, error=_said(trace.last_error) or "verifiers has not completed it")
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        return Reward(None, error=f"the environment has not computed {', '.join(missing)}")
    if not trace.rewards:
        return Reward(None, error="the environment has no reward for it")
    extras = {name: float(reward.score) for name, reward in trace.rewards.items()}
    extras |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Reward(float(trace.reward), extras)


def _why(episode: Any) -> str:
    """Why an episode is no valid result."""
    errors = [episode.last_error, *(trace.last_error for trace in episode.traces if not trace.ok)]
    return next(filter(None, map(_said, errors)), "verifiers does not take it for complete")


def _said(error: Any) -> str:
    return "" if error is None else f"{error.type}: {error.message}"
