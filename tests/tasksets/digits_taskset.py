"""One turn: an answer is worth its digits; the process is killed in the middle, where a file says so. As a user of
verifiers writes it; nothing of it is Rollover's."""

import os
import signal

import verifiers.v1 as vf


class DigitsData(vf.TaskData):
    answer: str


class DigitsTask(vf.Task[DigitsData]):
    num_scored = 0

    @vf.reward(weight=0.5)
    async def digits(self, trace: vf.Trace) -> float:
        return sum(c.isdigit() for c in trace.last_reply) / 10

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        DigitsTask.num_scored += 1
        if DigitsTask.num_scored == 20 and os.path.exists("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        return float(len(trace.last_reply))


class DigitsConfig(vf.TasksetConfig):
    num_tasks: int = 40
    opening: str = "count to"


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> list[DigitsTask]:
        return [
            DigitsTask(DigitsData(prompt=f"{self.config.opening} {i}", answer=str(i)), self.config.task)
            for i in range(self.config.num_tasks)
        ]


__all__ = ["DigitsTaskset"]
