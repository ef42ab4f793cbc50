"""Episodes: every sibling of a group is a run of the user's function, and its model calls are turns of Rollouts.

    begin ──▶ function ──call──▶ host.open(rollout)  or  the answer to `next`: tokens that continue a Rollout
                  ▲                        │
                  └──reply── next(rollout) ◀── the turn has ended, and the Rollout waits for the next call, or the end
              returns ──▶ None for every `next` ──▶ score

It is the Environment of a run with a workflow: what follows the policy's turn is the agent's next call. Owns the runs
of the function and the keys of their calls. Never changes a rollout, and never decides who runs: the host does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollover.envs.protocol import TurnOptions
from rollover.functions import Causes
from rollover.images import Places, stored
from rollover.types import Prompt, Reward, Rollout, SamplingParams, Segment, Task, episode_name
from rollover.workflows.agent_run import AgentRun, EpisodePlace, Host, Limits
from rollover.workflows.calls import MODEL, Call, Reply, UnknownKey, UnknownModel
from rollover.workflows.conversations import Chats
from rollover.workflows.episode import EpisodeTrajectory
from rollover.workflows.lanes import Lane
from rollover.workflows.large_calls import LargeCalls, with_stored_images
from rollover.workflows.matching import Break
from rollover.workflows.once import Once
from rollover.workflows.protocol import Workflow

logger = logging.getLogger(__name__)

COUNTERS = (
    *(f"episodes/{how}" for how in ("done", "length", "timeout", "error", "restarted", "replayed", "diverged")),
    "turns/continued",
    *(f"turns/breaks/{reason.value}" for reason in Break),
)


class Episodes:
    """Of one run, in which tokens are sampled as `sampling` says.

    `host` is set before the first Episode begins. Where a gateway is served, `base_url` and `make_client` (of an API
    key) are its own. `calls` answers what agents ask. `on_kept` is told of what an Episode keeps over a kill: its
    group id and sibling, the name and the value. `resumes`: whether an Episode whose agent was lost goes on from what
    is on record of it; else it begins again.
    """

    def __init__(
        self,
        function: Workflow,
        chats: Chats,
        limits: Limits,
        sampling: SamplingParams,
        *,
        resumes: bool = True,
        lane: Lane = Lane.TRAINING,
    ) -> None:
        self.lane = lane
        self.function, self.chats, self.limits, self.resumes = function, chats, limits, resumes
        self.large_calls = LargeCalls(chats, limits.max_prompt_tokens + limits.max_new_tokens)
        self.host: Host | None = None
        self.calls = EpisodeCalls(chats.tokenizer, sampling)
        self.notice = "" if (fit := chats.of(()).fit("user")).exact else f"{fit.why}: every call opens a rollout"
        self.base_url = ""
        self.make_client: Callable[[str], Any] = lambda api_key: None
        self.on_kept: Callable[[EpisodePlace, str, Any], None] = lambda place, name, value: None
        self.counts: Counter[str] = Counter()
        self._agent_runs: dict[EpisodePlace, AgentRun] = {}
        self._failures: Counter[EpisodePlace] = Counter()
        self._once: dict[EpisodePlace, Once] = {}
        self._said = Causes()

    def apart(self) -> Episodes:
        """Those of an evaluation, by the same function, with a host and counts of their own; their agents ask by the
        same server."""
        others = Episodes(self.function, self.chats, self.limits, self.calls.sampling, lane=Lane.EVALUATION)
        others.calls, others.base_url, others.make_client = self.calls, self.base_url, self.make_client
        return others

    # The host's side: it is the run's Environment

    def prompt(self, task: Task, instead: Sequence[Mapping[str, str]] | None = None) -> Prompt:
        """The task's own, as `chat` makes it of the task's messages: which calls have it is the function's business.

        `instead`: of what a teacher reads in the place of its messages.
        """
        messages = task.messages if instead is None else instead
        if messages is None:
            return Prompt.of(self.chats.tokenizer(task.prompt)["input_ids"])
        return self.chats.of(()).prompt(messages)

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Their groups have left: what still runs of their episodes is cancelled."""
        self.end({rollout.group_id for rollout in rollouts})

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        ended = sum(self.counts[f"episodes/{how}"] for how in ("done", "length", "timeout", "error"))
        return {name: float(self.counts[name]) for name in COUNTERS} | {"episodes/ended": float(ended)}

    def begin(self, rollout: Rollout, kept: Mapping[str, Any] | None = None, recorded: Sequence[Rollout] = ()) -> None:
        """The Episode of a sibling begins, or begins again. `rollout`: its only one, as its group was admitted with it.
        `kept`: what an earlier process kept of it.

        `recorded`: copies of all Rollouts that it has, where its agent was lost. None of them runs. What the agent asks
        again is answered from these.
        """
        place = rollout.group_id, rollout.sibling
        if place in self._agent_runs:
            self._agent_runs.pop(place).cancel()
        once = self._once.setdefault(place, Once(partial(self._keep, place)))
        once.know(kept or {})
        if recorded:
            self.counts["episodes/replayed"] += 1
        self._agent_runs[place] = AgentRun(self, place, rollout.task, rollout.prompt, once, recorded)

    def unasked(self, place: EpisodePlace) -> Mapping[str, int]:
        """Of an Episode that has ended: what was on record and was not asked for again, see AgentRun."""
        return self._agent_runs[place].unasked if place in self._agent_runs else {}

    def close(self, place: EpisodePlace) -> None:
        """What was not asked for again has gone."""
        if place in self._agent_runs:
            self._agent_runs[place].close()

    @property
    def num_at_work(self) -> int:
        """Episodes that have not ended."""
        return sum(not run.over for run in self._agent_runs.values())

    def has(self, place: EpisodePlace) -> bool:
        """Whether somebody plays the Episode, or has played it to its end."""
        return place in self._agent_runs and not self._agent_runs[place].lost

    def end_all(self) -> None:
        """As `end`, of every group."""
        self.end({place[0] for place in self._agent_runs})

    def end(self, group_ids: Iterable[int]) -> None:
        """These groups have left: what still runs of their episodes is cancelled."""
        groups = set(group_ids)
        for place in [place for place in self._agent_runs if place[0] in groups]:
            self._agent_runs.pop(place).cancel()
            del self._failures[place]
            self._once.pop(place, None)

    async def next(self, rollout: Rollout) -> Segment | None:
        """The turn goes to the agent that asked for it; what comes back begins its next call. None: the end."""
        return await self._agent_runs[rollout.group_id, rollout.sibling].next(rollout)

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        """Each gets the reward of its trajectory."""
        return [self._agent_runs[rollout.group_id, rollout.sibling].reward_of(rollout) for rollout in rollouts]

    def scores_singly(self, task: Task, /) -> bool:
        return True

    def options(self, rollout: Rollout) -> TurnOptions:
        """Of the call that the Rollout's present turn answers."""
        return self._agent_runs[rollout.group_id, rollout.sibling].turns.options[rollout.rollout_id]

    # The agents' side

    def arguments(self, api_key: str) -> Mapping[str, Any]:
        return {"client": self.make_client(api_key)} if "client" in self.function.wanted else {}

    def may_retry(self, place: EpisodePlace, why: str) -> bool:
        self._failures[place] += 1
        again = self._failures[place] <= self.limits.retries
        if self._said.is_new(why):
            what = "it is run again" if again else "its rewards are missing"
            logger.warning(
                f"{self.function.spec} failed at episode {episode_name(*place)} ({why}): {what}; later ones are"
                " counted (episodes/restarted, episodes/error)"
            )
        return again

    # Private

    def _keep(self, place: EpisodePlace, name: str, value: Any) -> None:
        if place in self._agent_runs:
            self.on_kept(place, name, value)


class EpisodeCalls:
    """The calls of agents that know their trajectory by its key: what the gateway asks (calls.Caller).

    Of one run. `undelivered` takes the answers of a key that reached no client, where there is a gateway."""

    def __init__(self, tokenizer: Any, sampling: SamplingParams) -> None:
        self.sampling, self._tokenizer = sampling, tokenizer
        self.undelivered: Callable[[str], Sequence[Reply]] = lambda api_key: ()
        self._of_key: dict[str, tuple[AgentRun, EpisodeTrajectory]] = {}

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
        run, trajectory = self._of_key[key]
        role = model.partition("/")[2]
        call = await with_stored_images(call, partial(_stored, run))
        return await run.ask(run.of_model(trajectory, role) if role else trajectory, call)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([token_id]) for token_id in token_ids]

    def add(self, run: AgentRun, trajectory: EpisodeTrajectory) -> None:
        """From now on calls with the key of the trajectory are of this run."""
        self._of_key[trajectory.api_key] = run, trajectory

    def close(self, run: AgentRun) -> set[str]:
        """No more. Returns the ids of Rollouts with an answer that did not reach its client."""
        ids: set[str] = set()
        for trajectory in run.trajectories:
            if self._of_key.pop(trajectory.api_key, None) is not None:
                ids |= {reply.reply_id.partition("/")[0] for reply in self.undelivered(trajectory.api_key)}
        return ids


def _stored(run: AgentRun, value: Any) -> tuple[str, str]:
    """Store an image of a call over HTTP. An agent may name images of its task by their paths, and no other file."""
    if isinstance(value, str) and value in run.task.images:
        return stored(value, Places(Path("/")))
    return stored(value, Places(None, run.around.limits.image_urls))
