"""Views over a Group, and prompts with media."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

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
from rollover.trajectories import by_role, episodes_of, turns_of
from rollover.types import Group, Media, Prompt, Reward, Rollout, RolloutState, SamplingParams, StopReason, Task
from rollover.workflows.turns import turn_key
from unit.rollout.world import make_segment

# Views over a Group: turns, trajectories, episodes, and what is compared with what


TASK = Task("t0", "s", "r", prompt="x")
EOS, PAUSED = StopReason.EOS, StopReason.PAUSED


def rollout(sibling: int, trajectory: int = 0, context: int = 0, role: str = "policy", **fields) -> Rollout:
    segments = fields.pop("segments", [make_segment(2, 0, EOS)])
    reward = fields.pop("reward", Reward(1.0))
    return Rollout(
        3,
        sibling,
        TASK,
        segments,
        RolloutState.READY,
        EOS,
        reward,
        role=role,
        trajectory=trajectory,
        context=context,
        **fields,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(3, TASK, Prompt((7, 8)), list(rollouts))


def test_a_plain_group_has_an_episode_of_one_trajectory_of_one_rollout_a_sibling() -> None:
    plain = group(rollout(0), rollout(1), rollout(2, greedy=True))
    assert [r.rollout_id for r in plain.rollouts] == ["3-0", "3-1", "3-2"]
    assert all(r.prompt is plain.prompt for r in plain.rollouts)
    episodes = episodes_of(plain)
    assert [[t.rollouts for t in e.trajectories] for e in episodes] == [[(r,)] for r in plain.rollouts]
    assert all(t.reward is r.reward for e, r in zip(episodes, plain.rollouts, strict=True) for t in e.trajectories)
    (compared,) = by_role(episodes)
    assert compared.role == "policy" and [t.episode for t in compared.trajectories] == [0, 1], "no greedy baseline"


def test_episodes_hold_their_trajectories_and_these_their_contexts_in_order() -> None:
    solver = [rollout(s, 0, c, "solver", prompt=Prompt((s, c))) for s in (0, 1) for c in (0, 1)]
    judge = [rollout(s, 1, 0, "judge") for s in (0, 1)]
    episodes = episodes_of(group(judge[1], solver[3], solver[0], solver[1], judge[0], solver[2]))
    assert [[t.rollouts for t in e.trajectories] for e in episodes] == [
        [(solver[0], solver[1]), (judge[0],)],
        [(solver[2], solver[3]), (judge[1],)],
    ]
    assert [r.rollout_id for r in solver] == ["3-0", "3-0.0.1", "3-1", "3-1.0.1"] and judge[1].rollout_id == "3-1.1.0"
    assert solver[1].prompt == Prompt((0, 1)) and judge[0].prompt == Prompt((7, 8)), "its own, or else its group's"
    assert [(g.role, len(g.trajectories)) for g in by_role(episodes)] == [("solver", 2), ("judge", 2)]
    assert str(episodes[1].trajectories[1]) == "trajectory 1 (role 'judge') of episode 3-1"


def test_a_trajectory_is_valid_when_all_its_rollouts_have_their_reward() -> None:
    ((whole,), (missing,), (unscored,)) = (
        e.trajectories
        for e in episodes_of(
            group(
                *(rollout(0, context=c) for c in (0, 1)),
                *(rollout(1, context=c, reward=Reward(1.0) if c else Reward(None, error="e")) for c in (0, 1)),
                *(rollout(2, context=c, reward=Reward(1.0) if c else None) for c in (0, 1)),
            )
        )
    )
    assert whole.valid and not missing.valid and not unscored.valid
    assert missing.reward is not None and missing.reward.error == "e" and unscored.reward is None


def test_the_rollouts_of_a_trajectory_have_one_role_and_one_score() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0 \(role 'a'\) of episode 3-0: .* roles \['a', 'b'\]"):
        episodes_of(group(rollout(0, role="a"), rollout(0, context=1, role="b")))
    with pytest.raises(ValueError, match=r"trajectory 0 .* of episode 3-0: .* scores \['1.0', '2.0'\]"):
        episodes_of(group(rollout(0), rollout(0, context=1, reward=Reward(2.0))))


def test_turns_are_cut_where_a_generation_stopped_or_an_environment_wrote() -> None:
    def environment(num: int):
        return make_segment(num, 0, trainable=False)

    played = rollout(
        0,
        segments=[
            environment(1),
            make_segment(2, 0, PAUSED),
            make_segment(3, 1, StopReason.STOP_STRING),
            environment(2),
            environment(1),
            make_segment(1, 1, PAUSED),
            environment(1),  # whoever brings rollouts need not say how a turn ended
            make_segment(2, 1, EOS),
            make_segment(1, 2, PAUSED),
        ],
    )
    assert [(t.start, t.end, len(t)) for t in turns_of(played)] == [(1, 6, 5), (9, 10, 1), (11, 13, 2), (13, 14, 1)]
    assert turns_of(rollout(0, segments=[environment(2)])) == []


# Prompts with media: told apart from those of equal token ids wherever something is shared, and the same after
# every way out of the process


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
