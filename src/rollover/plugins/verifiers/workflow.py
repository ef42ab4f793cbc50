"""workflow.verifiers: episodes of a verifiers environment. Each trace of an episode is a trajectory.

    verifiers' Env ──▶ a harness for each seat ──call──▶ its interception server ──X-Session-ID──▶ our gateway
         └── traces with rewards and metrics, at the end ──▶ the trajectories that their calls were turns of

Owns the served environment, and the mapping from traces to trajectories. The gateway samples, and assigns calls to
rollouts, as for any agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rollover.config.workflow import WorkflowConfig
from rollover.functions import explained
from rollover.plugins.verifiers.package import ARGS, KEY, import_verifiers, load_environment, seats
from rollover.plugins.verifiers.source import reload_task
from rollover.types import Reward, SamplingParams
from rollover.workflows.episode import Episode, EpisodeTrajectory
from rollover.workflows.protocol import Answer, Lane, Waiting

MODEL = "policy"
_NO_VARIABLE = "ROLLOVER_HAS_NO_API_KEY"  # verifiers reads its key from a variable; ours comes from the trace
_SESSION, _KEY = b"x-session-id", b"authorization"
_CLEANUP_S = 10.0  # time for cancelled episodes to clean up


class EpisodeFailed(RuntimeError):
    """An episode without a valid result, with verifiers' reason."""


@dataclass(eq=False)
class _EpisodeRun:
    """One running Episode, with its trajectories by trace id."""

    episode: Episode
    sessions: Sessions
    roles: Mapping[str, str]  # of seats that call the policy
    trajectories: dict[str, EpisodeTrajectory] = field(default_factory=dict)

    def on_trace(self, trace: Any) -> None:
        """Create the trajectory of a seat, before its first call."""
        role = self.roles.get(trace.agent.name)
        if role is not None:
            trajectory = self.trajectories[trace.id] = self.episode.trajectory(role)
            self.sessions.add(trace.id, trajectory.api_key)

    def on_discard(self, trace: Any) -> None:
        """Discard a trajectory, as verifiers retries the seat."""
        if trace.id in self.trajectories:
            self.trajectories[trace.id].reward = Reward(None, error="verifiers has played it again")

    def score(self, trace: Any) -> None:
        if trace.id in self.trajectories:
            self.trajectories[trace.id].reward = reward_of(trace)


class VerifiersWorkflow:
    """The workflow of workflow.verifiers. ValueError, with the fix, for an unsupported environment."""

    wanted, over_http = ("task", "episode"), True

    def __init__(self, workflow: WorkflowConfig, sampling: SamplingParams) -> None:
        self.spec, self._taskset, self._untrained = (
            f"{KEY} = {workflow.verifiers!r}",
            workflow.verifiers,
            workflow.untrained,
        )
        self._vf = import_verifiers()
        self.env = load_environment(workflow.verifiers, workflow.verifiers_args)
        found = seats(self._vf, self.env.config)
        asking = [name for name, seat in found.items() if seat.client is None]
        # The role of a single seat is that of a plain run.
        self._roles = {name: MODEL if len(found) == 1 else name for name in asking}
        for name in asking:
            self._check_sampling(name, found[name], sampling)
        self._sessions = Sessions()
        self._context: Any = None
        self._playing: set[asyncio.Task[Any]] = set()
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def over(self, app: Any) -> Any:
        """Wrap the gateway's ASGI application for verifiers' calls."""
        return self._sessions.wrap(app)

    async def start(self, base_url: str) -> None:
        """Start the environment's servers, such as tools. base_url: the gateway's. ValueError on failure."""
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
        """Stop the environment's servers, after cancelled episodes have cleaned up."""
        if self._playing:
            await asyncio.wait(self._playing, timeout=_CLEANUP_S)
        self._stop.set()
        if self._serving is not None:
            await asyncio.wait([self._serving])

    async def __call__(
        self, values: Mapping[str, Any], waiting: Waiting = nullcontext, lane: Lane = Lane.TRAINING, /
    ) -> Answer:
        """Play one Episode, and set each trajectory's reward. EpisodeFailed if it has no valid result."""
        task = asyncio.current_task()
        assert task is not None
        self._playing.add(task)
        run = _EpisodeRun(values["episode"], self._sessions, self._roles)
        try:
            done = await self.env.run_episode(
                reload_task(self._taskset, values["task"]),
                self._context,
                on_trace=run.on_trace,
                on_discard=run.on_discard,
            )
        finally:
            self._playing.discard(task)
            self._sessions.remove(run.trajectories)
        if not self.env.complete(done):
            raise EpisodeFailed(_failure(done))
        for trace in done.traces:
            run.score(trace)
        return None

    # Private

    def _check_sampling(self, name: str, seat: Any, sampling: SamplingParams) -> None:
        """Raise ValueError if a seat samples differently than the run."""
        for key, value in seat.sampling.model_dump(exclude_none=True).items() if seat.sampling else ():
            if key != "max_tokens" and value != getattr(sampling, key, None):
                raise ValueError(
                    f"{self.spec}: its seat {name!r} samples with {key} = {value!r}, which is not the run's"
                    f" (rollout.{key}). Set {ARGS}.{name}.sampling to the run's, or leave it out of the environment"
                )

    async def _check_trainable(self) -> None:
        """Raise ValueError for a role that the configuration trains and the environment does not."""
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


class Sessions:
    """API keys of running trajectories by trace id.

    verifiers sends the id with each call; the gateway expects the trajectory's key.
    """

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    def add(self, trace_id: str, api_key: str) -> None:
        """Assign calls of this trace to this trajectory."""
        self._keys[trace_id] = api_key

    def remove(self, trace_ids: Iterable[str]) -> None:
        for trace_id in trace_ids:
            self._keys.pop(trace_id, None)

    def wrap(self, app: Any) -> Any:
        """Wrap the ASGI application `app`: replace trace ids by keys."""

        async def joined(scope: Any, receive: Any, send: Any) -> None:
            await app(self._with_key(scope) if scope["type"] == "http" else scope, receive, send)

        return joined

    def _with_key(self, scope: Any) -> Any:
        session = next((value for name, value in scope["headers"] if name == _SESSION), b"")
        key = self._keys.get(session.decode("latin-1"))
        if key is None:
            return scope
        headers = [(name, value) for name, value in scope["headers"] if name != _KEY]
        return {**scope, "headers": [*headers, (_KEY, f"Bearer {key}".encode())]}


def reward_of(trace: Any) -> Reward:
    """Return the weighted sum of a Trace's rewards, with each reward and metric in `extras`."""
    if not trace.ok:
        return Reward(None, error=_error_text(trace.last_error) or "verifiers has not completed it")
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        return Reward(None, error=f"the environment has not computed {', '.join(missing)}")
    if not trace.rewards:
        return Reward(None, error="the environment has no reward for it")
    extras = {name: float(reward.score) for name, reward in trace.rewards.items()}
    extras |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Reward(float(trace.reward), extras)


def _failure(episode: Any) -> str:
    """Return why an episode has no valid result."""
    errors = [episode.last_error, *(trace.last_error for trace in episode.traces if not trace.ok)]
    return next(filter(None, map(_error_text, errors)), "verifiers does not take it for complete")


def _error_text(error: Any) -> str:
    return "" if error is None else f"{error.type}: {error.message}"
