"""The real driver over the lengths of a simulated workload: what the simulator is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from fake_engine import FakeEngine
from rollover.config.rollout import RolloutConfig
from rollover.envs.build import SingleTurn
from rollover.envs.protocol import RunEnvironment
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Event, Lifecycle
from rollover.rollout.requests import Requests
from rollover.sim.workload import Turns, Workload
from rollover.types import Prompt, Reward, Rollout, Segment, Task
from unit.rollout.world import make_task


class Lengths(dict):
    """The length of a rollout by its id, as FakeEngine asks for it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload

    def __missing__(self, rollout_id: str) -> int:
        group_id, sibling = map(int, rollout_id.split("-"))
        return self.workload.lengths(group_id)[sibling]


class Tools(Lengths, RunEnvironment):
    """The environment of a planned workload of several turns, and where the present turn of each rollout ends."""

    def __init__(self, workload: Workload, turns: Turns) -> None:
        super().__init__(workload)
        self.turns, self.taken = turns, Counter[str]()

    def __missing__(self, rollout_id: str) -> int:
        return self.ends(rollout_id)[self.taken[rollout_id]]

    def ends(self, rollout_id: str) -> list[int]:
        first, later = self.turns.split([super().__missing__(rollout_id)])
        return [first[0], *later[0]]

    async def next(self, rollout: Rollout) -> Segment | None:
        answer = self.turns.answer(rollout, self.ends(rollout.rollout_id)[self.taken[rollout.rollout_id] + 1 :])
        self.taken[rollout.rollout_id] += answer is not None
        return answer

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        return [Reward(1.0) for _ in rollouts]

    def scores_singly(self, task: Task, /) -> bool:
        return False


def driver_over(
    config: RolloutConfig,
    max_running: int,
    workload: Workload,
    num_tasks: int | None,
    on_event: Callable[[Event], None],
    make_engine: Callable[[Mapping[str, int]], FakeEngine],
    turns: Turns | None = None,
) -> Driver:
    """Prompts of three tokens, a reward of 1 for everything. `turns`: those of an environment that answers at once."""

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(1.0) for _ in rollouts]

    tasks = iter(range(10**9 if num_tasks is None else num_tasks))

    def next_task():
        i = next(tasks, None)
        return None if i is None else (make_task(i), Prompt((1, 2, 3)))

    lifecycle = Lifecycle(config, max_running, 1, [on_event])
    if turns is not None:
        tools = Tools(workload, turns)
        return Driver(
            lifecycle, make_engine(tools), next_task, tools, Requests(lifecycle.config, 0, may_continue=tools.has_turns)
        )
    return Driver(
        lifecycle, make_engine(Lengths(workload)), next_task, SingleTurn(score), Requests(lifecycle.config, 0)
    )
