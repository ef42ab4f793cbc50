"""What a teacher is made of: another model with the same tokens, and the prompts that a function of one's own gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from local_trainer import build_batch
from rollover.config import AlgorithmConfig, Config
from rollover.envs.protocol import RunEnvironment
from rollover.functions import FunctionError
from rollover.tasks.prompts import encode_prompt, encoder
from rollover.trainer.auxiliary_models import load_teacher, vocabulary_difference
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.distill import TeacherPrompts, teacher_prompts
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.trainer.trainer import build_trainer
from rollover.types import Group, Prompt, Task
from samples import group, random_samples, rollout, segment
from unit.envs.played import TOKENIZER, environment

CHAT = Task("t-0", "sums", "exact_match", messages=({"role": "user", "content": "3+4?"},), columns={"answer": "7"})
TEXT = Task("t-1", "sums", "exact_match", prompt="3+4=", columns={"answer": "7"})
OWN = """
import sys

def told(task, messages):
    return [{"role": "system", "content": f"It is {task.columns['answer']}."}, *messages]

def text(task, prompt):
    return f"({task.columns['answer']}) {prompt}"

def raises(task, messages):
    raise KeyError("hint")

def leaves(task, messages):
    sys.exit(0)

def nothing(task, messages):
    return None

def numbers(task, messages):
    return [{"role": "user", "content": 7}]

def too_long(task, messages):
    return [{"role": "user", "content": "7" * 2000}]

def changes(task, messages):
    task.columns["answer"] = "8"
    messages[0]["content"] = "4+4?"
    return messages
"""


def config(**distill: Any) -> Config:
    values: dict[str, Any] = {"teacher": "initial"} | distill
    return Config.model_validate({"model": {"dtype": "float32"}, "distill": values, "rollout": {"group_size": 2}})


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    encode = RunEnvironment(encoder(tiny.tokenizer())).prompt
    return lambda name: TeacherPrompts(config(privileged=f"own.py:{name}"), encode, 1024)


def read(prompts: TeacherPrompts, task: Task, tokens: int = 3, own: tuple[int, ...] = ()) -> str:
    """What the teacher reads of a group's samples, which is the same for all; `own`: what their prompts have more."""
    made = of(task, tokens, own)
    samples = prompts.for_samples([made], build_batch([made], AlgorithmConfig(advantage="dr_grpo")).samples)
    first, *others = [s.teacher_prompt_ids.tolist() for s in samples if s.teacher_prompt_ids is not None]
    assert others == [first]
    return str(tiny.tokenizer().decode(first))


def of(task: Task, tokens: int = 3, own: tuple[int, ...] = ()) -> Group:
    prompt = encode_prompt(task, tiny.tokenizer())
    rollouts = [rollout(0, i, 1.0, [segment([8 + i] * tokens)]) for i in range(2)]
    for made in rollouts:
        made.prompt = Prompt((*prompt.ids, *own)) if own else Prompt()
    made = group(0, rollouts, prompt.ids)
    made.task = task
    return made


def test_the_teacher_reads_what_the_function_says(prompts) -> None:
    assert read(prompts("told"), CHAT) == "s:It is 7.\nu:3+4?\na:"
    assert read(prompts("text"), TEXT) == "(7) 3+4="
    assert teacher_prompts(config(teacher="other"), tiny.loaded(), None) is None


class Counter:
    """Tells of the question that it was given: of the policy's, whatever the teacher reads."""

    def reset(self, question: list[dict[str, str]], answer: str) -> str:
        return f" Count to {answer}: {question[-1]['content']}"

    def up(self, step: int) -> int:
        """Counts.

        Args:
            step: how far
        """
        return step


def test_teacher_prompt_includes_tools_and_episode(prompts) -> None:
    with environment(Counter) as env:
        own = TOKENIZER.decode(list(env.prompt(CHAT).ids))
        taught = TeacherPrompts(config(privileged="own.py:told"), env.prompt, None)
        text = TOKENIZER.decode(taught.encode_task(CHAT).ids)
        assert TOKENIZER.decode(list(env.prompt(CHAT).ids)) == own
    assert '"up"' in own and "It is 7." not in own and own.count("Count to 7: 3+4?") == 1
    assert '"up"' in text and "It is 7." in text and text.count("Count to 7: 3+4?") == 1


def test_what_a_context_has_after_the_tasks_prompt_stays(prompts) -> None:
    """A rollout that opened another context has a prompt of its own; one of another role begins with other words."""
    more = tuple(tiny.tokenizer()("7.\nu:sure?\na:")["input_ids"])
    assert read(prompts("told"), CHAT, own=more) == "s:It is 7.\nu:3+4?\na:7.\nu:sure?\na:"
    made = of(CHAT)
    for one in made.rollouts:
        one.prompt = Prompt((5, 6))
    samples = build_batch([made], AlgorithmConfig(advantage="dr_grpo")).samples
    with pytest.raises(ValueError, match="the prompt of rollout 0-0 does not begin with that of its task 't-0'"):
        prompts("told").for_samples([made], samples)


def test_what_the_function_changes_in_place_is_its_own(prompts) -> None:
    assert read(prompts("changes"), CHAT) == "u:4+4?\na:"
    assert CHAT.columns == {"answer": "7"} and CHAT.messages == ({"role": "user", "content": "3+4?"},)


@pytest.mark.parametrize(
    ("name", "task", "what"),
    [
        ("raises", CHAT, r"failed: KeyError: 'hint' \(own.py:11\)"),
        ("leaves", CHAT, r"failed: SystemExit: 0"),
        ("nothing", CHAT, r"returned None for task 't-0'"),
        ("numbers", CHAT, r"returned \[\{'role': 'user', 'content': 7\}\] \(list\)"),
        ("too_long", CHAT, r"returned 2005 tokens for task 't-0', and 3 follow: the model has 1024 positions"),
        ("nothing", TEXT, r"returned None for task 't-1', whose prompt is a text"),
    ],
)
def test_a_function_that_fails_or_returns_nonsense_is_named(prompts, name: str, task: Task, what: str) -> None:
    with pytest.raises(
        FunctionError, match=f"distill.privileged = 'own.py:{name}'.* {what}.*it must return the teacher"
    ):
        read(prompts(name), task)


def test_the_function_must_exist(prompts) -> None:
    with pytest.raises(ValueError, match=r"distill.privileged = 'own.py:tolt': own.py has no function 'tolt'; did you"):
        prompts("tolt")


def test_samples_carry_teacher_prompt(prompts) -> None:
    of_config = config(privileged="own.py:told")
    batches = BatchBuilder(of_config, ReplayBuffer(of_config.replay, 0), prompts("told"))
    groups = [of(CHAT)]
    expected = np.array(encode_prompt(CHAT, tiny.tokenizer()).ids)
    for samples in (batches.build(groups, 0).samples, batches.with_signal(groups, 0)):
        assert len(samples) == 2, "equal scores, and yet in the loss: the teacher has a signal"
        for sample in samples:
            assert sample.teacher_prompt_ids is not None and len(sample.teacher_prompt_ids) > len(expected)
            assert sample.prompt_ids.tolist() == list(groups[0].prompt.ids) and sample.mask.all()


def test_unrewarded_rollout_is_in_loss_unless_mix_add() -> None:
    groups = [group(0, [rollout(0, 0, None, [segment([8])]), rollout(0, 1, 1.0, [segment([9])])])]
    for mix, masks in (("replace", [True, True]), ("add", [False, True])):
        of_config = config(teacher="other", mix=mix)
        samples = BatchBuilder(of_config, ReplayBuffer(of_config.replay, 0)).build(groups, 0).samples
        assert [bool(s.mask[0]) for s in samples] == masks


def saved(folder: Path, seed: int, **tokens: int) -> Path:
    """A model folder; `tokens` get other ids in its tokenizer."""
    tiny.save(folder, seed=seed)
    if tokens:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        content["model"]["vocab"] |= tokens
        path.write_text(json.dumps(content))
    return folder


def test_another_model_is_loaded_once_and_never_trained(tmp_path: Path) -> None:
    saved(tmp_path / "teacher", 1)
    of_config = config(teacher=str(tmp_path / "teacher"))
    trainer, samples = build_trainer(of_config, tiny.loaded()), random_samples(0)
    expected = tiny.model(seed=1).state_dict()
    loaded = load_teacher(of_config, tiny.loaded())
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in expected.items())
    assert not any(p.requires_grad for p in loaded.model.parameters())
    first = trainer.backend.compute_logprobs(samples, "teacher")
    for _ in range(2):
        trainer.train_step(Batch(samples))
    for rollout_id, values in trainer.backend.compute_logprobs(samples, "teacher").items():
        np.testing.assert_array_equal(values, first[rollout_id])


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "teacher", 1, a=13, b=12)
    with pytest.raises(ValueError) as error:
        build_trainer(config(teacher=str(tmp_path / "teacher")), tiny.loaded())
    text = str(error.value)
    assert f"distill.teacher = '{tmp_path / 'teacher'}' has another vocabulary than the policy, 'tiny-llama'" in text
    assert "'a' is token 12 of the policy, and it is 13 there" in text and "the same tokenizer" in text


def test_a_teacher_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"distill.teacher = './nowhere': there is no such folder"):
        build_trainer(config(teacher="./nowhere"), tiny.loaded())


class Vocabulary(dict[str, int]):
    def get_vocab(self) -> dict[str, int]:
        return self


@pytest.mark.parametrize(
    ("policy", "teacher", "why"),
    [
        ({"a": 0, "b": 1}, {"b": 1, "a": 0}, ""),
        ({"a": 0, "b": 1}, {"a": 0, "b": 2}, "'b' is token 1 of the policy, and it is 2 there"),
        ({"a": 0, "b": 1}, {"a": 0}, "'b' is token 1 of the policy, and there is none of that name"),
        ({"a": 0}, {"a": 0, "b": 1, "c": 2}, "it has 2 tokens that the policy has not"),
    ],
)
def test_where_two_vocabularies_differ(policy: dict[str, int], teacher: dict[str, int], why: str) -> None:
    assert vocabulary_difference(Vocabulary(policy), Vocabulary(teacher)) == why
