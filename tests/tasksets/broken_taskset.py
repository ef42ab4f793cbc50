"""Tasksets that fail: at a reward, which raises or never ends, at `load`, or as they have no task."""

import asyncio

import verifiers.v1 as vf


class BrokenConfig(vf.TasksetConfig):
    how: str = "reward"


class BrokenTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        assert self.data.idx is not None
        if self.data.idx % 5 == 3:
            await asyncio.sleep(60)
        if self.data.idx % 5 == 1:
            raise KeyError("no judge")
        return float(len(trace.last_reply) % 3)


class BrokenTaskset(vf.Taskset[BrokenTask, BrokenConfig]):
    def load(self) -> list[BrokenTask]:
        if self.config.how == "load":
            raise OSError("no such data")
        num = 0 if self.config.how == "empty" else 20
        return [BrokenTask(vf.TaskData(prompt=f"count to {i}"), self.config.task) for i in range(num)]


__all__ = ["BrokenTaskset"]
