"""distill.roles and @distilled: a teacher trains some roles, and the others are trained as without one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trainer import TOGETHER, recorded, trainer

import tiny
from rollover import Played, distilled, ready_episodes
from rollover.algorithms.grouping import Grouping
from rollover.api.settings import Arguments
from rollover.config import Config, ReplayConfig
from rollover.config.load import ConfigError, load_config
from rollover.envs.protocol import RunEnvironment
from rollover.functions import load_function
from rollover.tasks.prompts import encode_prompt, encoder
from rollover.trainer.backend import TEACHER
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.distill import TeacherPrompts
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.types import Group, Reward, SamplingParams, Segment, StopReason, Task
from rollover.workflows.distilled import distill_options
from unit.config.written import load

CHAT = Task("t-0", "sums", "exact_match", messages=({"role": "user", "content": "3+4?"},), columns={"answer": "7"})
JUDGED = {"teacher": "other", "roles": ["judge"]}


def played(role: str, score: float | None, prompt: tuple[int, ...], *tokens: int, **reward: Any) -> Played:
    ids = np.array(tokens, np.int32)
    segment = Segment(ids, np.full(len(ids), -4.6, np.float32), 0, SamplingParams(), StopReason.EOS)
    return Played([(prompt, [segment])], Reward(score, error=None if score is not None else "e", **reward), role)


def group(judged: float | None = None) -> Group:
    """Two episodes: solvers of the scores 1 and 0, and judges."""
    prompt = encode_prompt(CHAT, tiny.tokenizer()).ids
    return ready_episodes(
        0, CHAT,
        [
            [played("solver", s, prompt, 10 + i, 20), played("judge", judged, (5, 6), 30 + i)]
            for i, s in enumerate((1.0, 0.0))
        ],
    )  # fmt: skip


def config(distill: dict[str, Any], **tables: Any) -> Config:
    values = {"model": {"dtype": "float32"}, "algorithm": {"advantage": "dr_grpo"}, "distill": distill, **tables}
    return Config.model_validate(values)


def batch(of: Config, made: Group, prompts: TeacherPrompts | None = None) -> Batch:
    return BatchBuilder(of, ReplayBuffer(ReplayConfig(), 0), prompts).build([made], 0)


def advantages(of: Batch) -> dict[str, list[float]]:
    return {s.rollout_id: s.advantages[s.mask].tolist() for s in of.samples if s.mask.any()}


def test_taught_role_needs_no_reward() -> None:
    of = config(JUDGED)
    assert advantages(batch(of, group())) == {"0-0": [0.5] * 2, "0-1": [-0.5] * 2, "0-0.1.0": [0.0], "0-1.1.0": [0.0]}
    assert of.min_valid_rewards == 2 and Grouping(of.workflow, of.distill).max_valid(group()) == 2
    # Without a teacher nobody can train the judges, and where its advantages are added they need rewards.
    for other in ({}, JUDGED | {"mix": "add"}):
        assert advantages(batch(config(other), group())) == {"0-0": [0.5] * 2, "0-1": [-0.5] * 2}
    assert advantages(batch(config(JUDGED | {"mix": "add"}), group(1.0))) == advantages(batch(config({}), group(1.0)))


def test_the_teacher_gives_advantages_to_its_roles_alone() -> None:
    of = config(JUDGED | {"coef": 2.0})
    samples = batch(of, group()).samples
    made = trainer(of.algorithm, distill=of.distill, teacher=tiny.loaded(seed=1))
    policy, teacher = made.backend.compute_logprobs(samples), made.backend.compute_logprobs(samples, TEACHER)
    passes = recorded(made)
    metrics = made.train_step(Batch(samples))
    seen = {s.rollout_id: s.advantages.tolist() for part in passes for s in part}
    expected = {i: 2.0 * (teacher[i] - policy[i]).astype(float) for i in ("0-0.1.0", "0-1.1.0")}
    assert seen["0-0"] == [0.5] * 2 and seen["0-1"] == [-0.5] * 2
    for rollout_id, values in expected.items():
        np.testing.assert_allclose(seen[rollout_id], values.clip(-20, 20), atol=1e-5)
    behavior = {s.rollout_id: s.behavior_logprobs[s.mask] for s in samples}
    weights = {i: np.minimum(np.exp(policy[i] - behavior[i]), 2.0) for i in expected}
    kl = -np.mean([weights[i] * values / 2 for i, values in expected.items()])
    assert metrics["distill/kl"] == pytest.approx(kl, abs=1e-5), "of the judges' tokens alone"


def test_a_privileged_prompt_is_asked_for_taught_roles_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judges' prompts do not begin with the task's, so that nothing could stand in its place."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def told(task, messages):\n    return [{'role': 'system', 'content': '7'}, *messages]\n")
    of = config({"teacher": "initial", "roles": ["solver"], "privileged": "own.py:told"})
    prompts = TeacherPrompts(of, RunEnvironment(encoder(tiny.tokenizer())).prompt, None)
    found = {s.rollout_id: s.teacher_prompt_ids for s in batch(of, group(1.0), prompts).samples}
    assert found["0-0.1.0"] is None
    solver = found["0-0"]
    assert solver is not None and tiny.tokenizer().decode(solver.tolist()) == "s:7\nu:3+4?\na:"
    every = config({"teacher": "initial", "privileged": "own.py:told", "mix": "add"})
    with pytest.raises(ValueError, match=r"rollout 0-0.1.0 does not begin with that of its task .*distill.roles"):
        batch(every, group(1.0), prompts)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r'distill.roles: no trajectory .* the role "judg", they have judge, solver'):
        batch(config({"teacher": "other", "roles": ["judg"]}), group())
    brings = ready_episodes(0, CHAT, [[played("judge", 1.0, (5,), 9, advantages=1.0)]] * 2)
    for teacher in ({"teacher": "other"}, JUDGED):
        with pytest.raises(
            ValueError, match=r"role 'judge'.* has precomputed advantages.*\"precomputed\" and distill.mix to"
        ):
            batch(config(teacher, algorithm={}), brings)


def test_grouping_of_taught_with_other_role_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TOGETHER)
    with pytest.raises(ValueError, match=r"'dr_grpo' and 'distill.teacher': put them into groups of their own"):
        batch(config(JUDGED, workflow={"group_by": "own.py:together"}), group())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[distill]\nroles = ["judge"]', "distill.roles has no effect"),
        (
            '[distill]\nteacher = "x"\nroles = ["judg"]\n[workflow.roles.judge]',
            'distill.roles names "judg", which [workflow.roles] does not train: it trains judge',
        ),
        (
            '[distill]\nteacher = "x"\nroles = ["judge"]\n[workflow.roles.judge]\ntrained = false\n[workflow.roles.a]',
            "does not train: it trains a",
        ),
        (
            '[distill]\nteacher = "x"\nroles = ["judge"]\n[algorithm]\nadvantage = "gae"',
            "a critic would learn from rewards",
        ),
        ('[distill]\nteacher = "x"\nroles = ["a"]\n[filters]\nzero_variance = true', "filters.zero_variance has no ef"),
        (
            '[distill]\nteacher = "x"\nroles = ["judge"]\n[workflow.roles.judge]\nweight = 0.5\n[workflow.roles.a]',
            'workflow.roles.judge.weight has no effect with distill.mix = "replace": its advantages are the teacher',
        ),
        (
            '[distill]\nteacher = "x"\n[workflow.roles.judge]\nadvantage = "rloo"\n[workflow.roles.a]',
            "workflow.roles.judge.advantage has no effect",
        ),
        ('[distill]\nteacher = "x"\n[workflow]\ncredit = "turn_returns"', "workflow.credit has no effect"),
    ],
)
def test_rules(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert part in str(error.value)


def test_with_roles_rewards_still_have_a_part(tmp_path: Path) -> None:
    found = load(tmp_path, '[distill]\nteacher = "x"\nroles = ["a"]\n[algorithm]\nadvantage = "rloo"')
    assert not found.notices and found.config.distill.replaces_for("a") and not found.config.distill.replaces_for("b")


# The decorator

AGENTS = """
from rollover import distilled

def told(task, messages):
    return messages

@distilled(teacher="initial", roles="judge", privileged=told, coef=0.5, discount=0.25, mix="add")
async def solve(task, episode):
    return 1.0

@distilled(teacher="policy", refresh_steps=4, privileged="agents.py:told", clip=2.0)
class Game:
    def step(self, message): ...

def inner():
    def told(task, messages): ...

    @distilled(teacher="initial", privileged=told)
    async def solve(task): ...

    return solve

hidden = inner()

async def plain(task): ...
"""
TASKS = {"tasks.sources": [{"kind": "dataset", "path": "rows.jsonl"}], "rewards.function": "exact_match"}


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agents.py").write_text(AGENTS)
    Path("rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')


@pytest.mark.usefixtures("agents")
def test_a_decorated_workflow_is_as_if_its_file_had_said_so() -> None:
    values = {"model.path": "m", "workflow.function": "agents.py:solve", **TASKS}
    found = load_config([values], under=distill_options)
    said = {
        "teacher": "initial", "roles": ["judge"], "privileged": "agents.py:told", "coef": 0.5, "discount": 0.25,
        "mix": "add",
    }  # fmt: skip
    assert found.config == load_config([values | {"distill": said}]).config
    assert found.origin["distill.coef"] == "@distilled"
    above = load_config([values, {"distill.coef": 2.0}], [("distill.roles", "[]")], under=distill_options).config
    assert above.distill.coef == 2.0 and above.distill.roles == [] and above.distill.mix == "add"
    game = load_config([values | {"workflow.function": "", "workflow.environment": "agents.py:Game"}],
                       under=distill_options).config.distill  # fmt: skip
    assert (game.teacher, game.refresh_steps, game.clip, game.privileged) == ("policy", 4, 2.0, "agents.py:told")
    for spec in ("agents.py:plain", "agents.py:nothing", "nowhere.py:solve"):
        assert not load_config([values | {"workflow.function": spec}], under=distill_options).config.distill.teacher


@pytest.mark.usefixtures("agents")
def test_decorated_file_is_imported_after_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What libraries such as torch read when they are loaded is set by then."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    Path("plain.py").write_text("raise SystemExit(3)\n")
    assert distill_options(Config.model_validate({"workflow": {"function": "plain.py:solve"}})) == {}
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    Path("looks.py").write_text(f"import os\nSEEN = os.environ.get('TOKENIZERS_PARALLELISM')\n{AGENTS}")
    said = distill_options(Config.model_validate({"workflow": {"function": "looks.py:Game"}}))
    assert said["distill.teacher"] == "policy" and load_function("looks.py:solve", ".").__globals__["SEEN"] == "false"


@pytest.mark.usefixtures("agents")
def test_a_decorated_function_that_a_program_hands_over() -> None:
    def told(task: Task, messages: Any) -> Any:
        return messages

    @distilled(teacher="initial", privileged=told, roles=["a", "b"])
    async def solve(task: Task, episode: Any) -> float:
        return 1.0

    rows = [{"prompt": "1+1", "answer": "2"}]
    settings = Arguments(
        model="m", tasks=rows, reward="exact_match", overrides={"workflow": {"function": solve}}
    ).settle()
    try:
        distill = settings.config.distill
        assert distill.teacher == "initial" and distill.roles == ["a", "b"]
        assert settings.live[distill.privileged] is told
    finally:
        settings.release()


@pytest.mark.usefixtures("agents")
def test_a_decoration_that_cannot_be_is_refused() -> None:
    of = Config.model_validate({"workflow": {"function": "agents.py:hidden"}})
    with pytest.raises(ValueError, match="@distilled of 'agents.py:hidden': privileged is .*Define it there, outside"):
        distill_options(of)
    with pytest.raises(ValueError, match="@distilled twice: a run has one teacher"):
        distilled(teacher="initial")(distilled(teacher="policy")(lambda task: None))
    values = {"model.path": "m", "workflow.function": "agents.py:solve", **TASKS}
    with pytest.raises(ConfigError, match="distill.mix"):
        load_config([values, {"distill.mix": "both"}], under=distill_options)
