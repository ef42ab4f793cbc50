"""Two roles: a solver answers twice, a judge once, and the judge is not asked by the task's own rewards. As a user of
verifiers writes it; nothing of it is Rollover's."""

import verifiers.v1 as vf


class ClaimTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return min(1.0, len(trace.last_reply) / 40)


class VerdictTask(vf.Task[vf.TaskData]):
    pass


class DebateConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    fixed_judge: bool = False


class DebateEnv(vf.Env[DebateConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = not self.config.fixed_judge

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.solver.interaction(task) as solver:
            await solver.turn()
            claim = await solver.turn("Are you sure?")
        await agents.judge.run(VerdictTask(vf.TaskData(prompt=f"Right? {claim.last_reply}")))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        [verdict] = episode.by_agent["judge"]
        verdict.record_reward("digits", sum(c.isdigit() for c in verdict.last_reply) / 10)


class DebateTaskset(vf.Taskset[ClaimTask, vf.TasksetConfig]):
    def load(self) -> list[ClaimTask]:
        return [ClaimTask(vf.TaskData(prompt=f"What is {i}?"), self.config.task) for i in range(20)]


__all__ = ["DebateEnv", "DebateTaskset"]
