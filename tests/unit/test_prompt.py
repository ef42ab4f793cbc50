"""Prompts with media: told apart from those of equal token ids wherever something is shared, and the same after every
way out of the process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from test_trajectories import group, rollout

from local_trainer import build_batch
from rollover.config import AlgorithmConfig, RerollConfig
from rollover.engine.process.engine import requests_from_json, requests_to_json
from rollover.engine.protocol import ExtendRequest
from rollover.envs.protocol import turn_error, written
from rollover.rollout.cache import groups_from_state, groups_to_state
from rollover.run.event_log import digest_of
from rollover.tasks.prompts import truncated
from rollover.tasks.reroll import Reroll
from rollover.track.records import FORMATS, RolloutRecorder, read_rollouts
from rollover.track.tracker import RecordedGroup
from rollover.trainer.passes import row_tokens
from rollover.types import Media, Prompt, Reward, SamplingParams, Task
from rollover.workflows.turns import turn_key

CAT = Media("cat.png", "c" * 64, (8, 8), 1, 2, (1, 2, 2))
DOG = dataclasses.replace(CAT, source="dog.png", digest="d" * 64)
IDS = (5, 90, 90, 7)
TEXT, OF_CAT, OF_DOG = Prompt(IDS), Prompt(IDS, (CAT,)), Prompt(IDS, (DOG,))


def request(number: int, prompt: Prompt) -> ExtendRequest:
    return ExtendRequest(f"0-{number}", prompt, (), 3, number, SamplingParams())


def test_equal_token_ids_of_other_media_are_another_prompt() -> None:
    assert len({TEXT, OF_CAT, OF_DOG, Prompt(IDS, (CAT,))}) == 3
    assert len({digest_of(prompt) for prompt in (TEXT, OF_CAT, OF_DOG)}) == 3
    assert len({turn_key("policy", prompt, None, (), 0) for prompt in (TEXT, OF_CAT, OF_DOG)}) == 3
    assert not Prompt() and len(OF_CAT) == 4


def test_a_row_holds_the_prompt_once_for_each_of_its_media() -> None:
    answers = [rollout(i, prompt=prompt) for i, prompt in enumerate((OF_CAT, OF_DOG, OF_CAT))]
    for i, one in enumerate(answers):
        one.reward = Reward(float(i))
    samples = build_batch([group(*answers)], AlgorithmConfig()).samples
    assert [sample.media for sample in samples] == [(CAT,), (DOG,), (CAT,)]
    assert row_tokens(samples) == 2 * len(IDS) + sum(len(sample.token_ids) for sample in samples)


def test_requests_and_waiting_tasks_come_back_with_their_media() -> None:
    requests = {i: request(i, prompt) for i, prompt in enumerate((OF_CAT, TEXT, OF_CAT, OF_DOG))}
    requests[4] = dataclasses.replace(requests[0], generated_ids=(3, 90, 90), later_media=(DOG.moved(4),))
    assert requests[4].shown == Prompt((*IDS, 3, 90, 90), (CAT, DOG.moved(4))) and requests[0].shown is OF_CAT
    assert requests_from_json(json.loads(json.dumps(requests_to_json(requests)))) == requests
    before = Reroll(RerollConfig(max_groups=2, start_fraction=0.0), 10, lambda: None)
    failed = group(rollout(0, reward=Reward(0.0)))
    for i, prompt in enumerate((OF_CAT, TEXT)):
        task = Task(f"t{i}", "s", "r", prompt="x")
        before.on_step([dataclasses.replace(failed, group_id=i, task=task, prompt=prompt)], 1)
    after = Reroll(RerollConfig(max_groups=2, start_fraction=0.0), 10, lambda: None)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())), 100)
    assert [item and item[1] for item in (after(), after(), after())] == [OF_CAT, TEXT, None]


def test_bare_token_ids_are_refused_where_they_are_given() -> None:
    """Further inside they would fail late, or hang an engine in another process."""
    for given in ((1, 2), [1, 2], None):
        with pytest.raises(TypeError, match=r"give rollover.Prompt.of\(token_ids\)"):
            request(0, given)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"give rollover.Prompt.of\(token_ids\)"):
            dataclasses.replace(group(rollout(0)), prompt=given)


def test_a_prompt_with_media_is_never_cut() -> None:
    assert truncated(OF_CAT, 3, "left") is None and truncated(OF_CAT, 4, "left") is OF_CAT
    assert truncated(TEXT, 3, "left") == Prompt(IDS[1:])


def test_media_of_an_answer_come_back_from_every_file(tmp_path: Path) -> None:
    of = rollout(0, prompt=OF_CAT, reward=Reward(1.0))
    said = written(of, Prompt((90, 90, 4), (dataclasses.replace(DOG, offset=0),)))
    assert said.media == (dataclasses.replace(DOG, offset=len(OF_CAT) + of.num_tokens),)
    of.add(said)
    one = group(of)
    assert build_batch([one], AlgorithmConfig()).samples[0].media == (CAT, *said.media)
    [saved] = groups_from_state(*groups_to_state([one]))
    RolloutRecorder(tmp_path, formats=FORMATS).write(1, [RecordedGroup(one, ["text"], [1.0])])
    [[recorded]] = read_rollouts(tmp_path)
    for found in (saved, recorded):
        assert found.rollouts[0].later_media == said.media and found.rollouts[0].prompt == OF_CAT


@pytest.mark.parametrize("offset, count", [(0, 2), (8, 4), (20, 1)])
def test_an_answer_whose_image_lies_elsewhere_is_refused(offset: int, count: int) -> None:
    of = rollout(0, prompt=TEXT)
    image = dataclasses.replace(DOG, offset=offset, count=count)
    said = dataclasses.replace(written(of, (90, 90, 4)), media=(image,))
    assert "which does not lie within its tokens" in str(turn_error(said, of, 100))
    where = dataclasses.replace(DOG, offset=len(TEXT) + of.num_tokens)
    assert turn_error(dataclasses.replace(said, media=(where,)), of, 100) is None
