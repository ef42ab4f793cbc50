"""A tool, in a server that the tasks share. As a user of verifiers writes it; nothing of it is Rollover's."""

import verifiers.v1 as vf


class AdderToolset(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def num_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class AdderTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [AdderToolset(vf.SharedToolsetConfig())]

    def load(self) -> list[SumTask]:
        return [SumTask(SumData(prompt=f"{i} + 30", answer=str(i + 30)), self.config.task) for i in range(20)]


__all__ = ["AdderTaskset"]

if __name__ == "__main__":
    AdderToolset.run()
