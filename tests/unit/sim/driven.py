"""The real driver over the lengths of a simulated workload: what the simulator is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollover.config.rollout import RolloutConfig
from rollover.engine.fake import FakeEngine
from rollover.envs.single_turn import SingleTurn
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Event, Lifecycle
from rollover.sim.workload import Workload
from rollover.types import Reward, Rollout
from unit.rollout.world import make_task


class Lengths(dict):
    """The length of a rollout by its id, as FakeEngine asks for it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload

    def __missing__(self, rollout_id: str) -> int:
        group_id, sibling = map(int, rollout_id.split("-"))
        return self.workload.lengths(group_id)[sibling]


def driver_over(
    config: RolloutConfig,
    max_running: int,
    workload: Workload,
    num_tasks: int | None,
    on_event: Callable[[Event], None],
    make_engine: Callable[[Mapping[str, int]], FakeEngine],
) -> Driver:
    """Prompts of three tokens, a reward of 1 for everything."""

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(1.0) for _ in rollouts]

    tasks = iter(range(10**9 if num_tasks is None else num_tasks))

    def next_task():
        i = next(tasks, None)
        return None if i is None else (make_task(i), [1, 2, 3])

    lifecycle = Lifecycle(config, max_running, 1, on_event)
    return Driver(lifecycle, make_engine(Lengths(workload)), next_task, SingleTurn(score), run_seed=0)
