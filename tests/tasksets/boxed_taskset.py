"""Its tasks want a container."""

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self) -> list[BoxedTask]:
        return [BoxedTask(vf.TaskData(prompt="x"), self.config.task)]


__all__ = ["BoxedTaskset"]
