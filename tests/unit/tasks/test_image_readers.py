"""Readers of messages with images: environments refuse them; texts for people name them."""

from pathlib import Path

import numpy as np

from recorded_run import group, recorded, write_run
from rollover import cli
from rollover.plugins.dashboard.rollout_query import question
from rollover.run.sample import transcript
from rollover.track.records import RolloutRecorder
from rollover.trajectories import Episode, episodes_of
from rollover.types import (
    Group,
    Media,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
    content_text,
)  # fmt: skip

CONTENT = [{"type": "image", "image": "/data/a.png", "sha256": "3c"}, {"type": "text", "text": "What?"}]
MESSAGES = ({"role": "user", "content": CONTENT},)
TASK = Task("rows/0", "rows", "exact_match", messages=MESSAGES, columns={"answer": "1"})


def test_content_is_told_with_names():
    assert content_text(CONTENT) == "[image: a.png]What?" and content_text("What?") == "What?"
    assert question({"messages": list(MESSAGES), "prompt": None}) == "[image: a.png]What?"


def test_show_names_images(tmp_path: Path, capsys):
    write_run(tmp_path)
    of = group(50, [1.0])
    of.task = TASK
    for rollout in of.rollouts:
        rollout.task = TASK
    RolloutRecorder(tmp_path / "rollouts").write(4, [recorded(of)])
    assert cli.main(["show", str(tmp_path), "--rollouts", "--num", "40"]) == 0
    assert "[image: a.png]What?" in capsys.readouterr().out


def test_transcript_names_images_for_their_placeholders():
    prompt = Prompt((7, 5, 5, 5, 8), (Media("/data/a.png", "3c", (2, 2), 1, 3),))
    ids = np.array([9], dtype=np.int32)
    segment = Segment(ids, np.zeros(1, np.float32), 0, SamplingParams(), StopReason.EOS)
    rollout = Rollout(0, 0, TASK, [segment], RolloutState.READY, StopReason.EOS, Reward(1.0), prompt=prompt)
    (episode,) = episodes_of(Group(0, TASK, prompt, [rollout]))
    assert isinstance(episode, Episode)
    said = transcript(episode, lambda ids: "".join(f"<{i}>" for i in ids))
    assert "<7>[image: a.png]<8>" in said and "<5>" not in said
