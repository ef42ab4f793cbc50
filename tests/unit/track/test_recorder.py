"""RolloutRecorder: exact round trip, files that common tools read, and errors that name file and line."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.track.records import RolloutRecorder, read_records, read_rollouts
from rollover.track.tracker import Cut, RecordedGroup
from rollover.types import (
    DropReason,
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
)


def segment(ids: list[int], logprobs: list[float], version: int = 0, **fields) -> Segment:
    return Segment(
        np.array(ids, np.int32),
        np.array(logprobs, np.float32),
        version,
        fields.get("sampling", SamplingParams()),
        fields.get("stop_reason", StopReason.PAUSED),
        fields.get("trainable", True),
    )


TRUNCATED = SamplingParams(0.7, 0.9, 5, 0.1)


def group(group_id: int, rewards: list[Reward | None], first: list[Segment] | None = None, **task_fields) -> Group:
    """`first`: the segments of the first rollout, in place of those that all have."""
    fields = {"messages": ({"role": "user", "content": "1 + 1?"},), "columns": {"answer": "2"}} | task_fields
    task = Task(f"task-{group_id}", "chain_sum", "own", **fields)
    rollouts = []
    for sibling, reward in enumerate(rewards):
        segments = [
            segment([1, 2], [-0.1, -2.5e-7], version=group_id),
            segment([3], [-1 / 3], version=group_id + 1, stop_reason=StopReason.EOS, sampling=TRUNCATED),
        ]
        if sibling == 0 and first is not None:
            segments = first
        rollouts.append(Rollout(group_id, sibling, task, segments, RolloutState.CONSUMED, StopReason.EOS, reward))
    return Group(group_id, task, Prompt((7, 8)), rollouts)


def recorded(group: Group, dropped: DropReason | None = None) -> RecordedGroup:
    n = len(group.rollouts)
    return RecordedGroup(group, [f"text {i} ü\u2028" for i in range(n)], [0.5 * i for i in range(n)], dropped)


def facts(group: Group) -> dict:
    """Everything that must survive, in comparable form; NaN compares equal through repr."""
    return {
        "id": group.group_id,
        "task": repr(asdict(group.task)),
        "prompt": group.prompt,
        "rollouts": [
            (
                r.group_id,
                r.sibling,
                r.task is group.task,
                r.stop_reason,
                repr(r.reward),
                [
                    (s.token_ids.tolist(), s.token_ids.dtype, s.logprobs.tobytes(), s.logprobs.dtype)
                    + (s.policy_version, s.sampling, s.stop_reason, s.trainable)
                    for s in r.segments
                ],
            )
            for r in group.rollouts
        ],
    }


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
json_leaves = st.none() | st.booleans() | st.integers() | floats | st.text(st.characters(codec="utf-8"))
json_values = st.recursive(json_leaves, st.lists)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = st.text(st.characters(codec="utf-8"), max_size=20)
    task = Task(
        data.draw(text),
        data.draw(text),
        data.draw(text),
        prompt=data.draw(text),
        columns=data.draw(st.dictionaries(text, json_values, max_size=3)),
        attempt=data.draw(st.integers(0, 9)),
    )
    rollouts = []
    for sibling in range(data.draw(st.integers(1, 3))):
        segments = []
        for _ in range(data.draw(st.integers(0, 3))):
            logprobs = data.draw(st.lists(floats, max_size=6))
            ids = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(logprobs), max_size=len(logprobs)))
            fields = {"stop_reason": data.draw(st.sampled_from(StopReason)), "trainable": data.draw(st.booleans())}
            segments.append(segment(ids, logprobs, data.draw(st.integers(0, 99)), **fields))
        score = data.draw(st.none() | floats)
        reward = Reward(score, data.draw(st.dictionaries(text, floats)), None if score is not None else data.draw(text))
        stop_reason = data.draw(st.none() | st.sampled_from(StopReason))
        rollouts.append(Rollout(5, sibling, task, segments, RolloutState.READY, stop_reason, reward))
    original = Group(5, task, Prompt((1,)), rollouts)
    dir = tmp_path_factory.mktemp("r")
    RolloutRecorder(dir).write(1, [recorded(original)])
    ((rebuilt,),) = read_rollouts(dir)
    assert facts(rebuilt) == facts(original)


def test_non_finite_numbers_are_null_and_come_back_nan(tmp_path: Path) -> None:
    original = group(0, [Reward(1.0, {"x": float("inf")})], first=[segment([1], [float("nan")])])
    path = RolloutRecorder(tmp_path).write(1, [RecordedGroup(original, ["\ud800"], [float("nan")])])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["advantage"], record["logprobs"], record["extras"]) == (None, [None], {"x": None})
    ((rebuilt,),) = read_rollouts(tmp_path)
    assert np.isnan(rebuilt.rollouts[0].segments[0].logprobs[0])


def test_record_keys(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(12, [recorded(group(4, [Reward(0.0), Reward(1.0)]), DropReason.STALE)])
    assert path.name == "step-000012.jsonl"
    record = json.loads(path.read_text(encoding="utf-8").split("\n")[1])
    assert record["rollout_id"] == "4-1" and record["outcome"] == "dropped:stale" and record["step"] == 12
    assert record["completion"] == "text 1 ü\u2028" and record["advantage"] == 0.5 and record["num_tokens"] == 3
    assert [s["policy_version"] for s in record["segments"]] == [4, 5]


def damages(content: bytes) -> list[bytes]:
    """A file of at least two lines, damaged in its second."""
    at = content.index(b"\n") + 1
    first, second = content[:at], content[at:]
    bad = (b"\xff" + second[1:-1], second[:-9], bytes(len(second)), b"\xfe\x9c", b"[]", b"5", b"{}")
    return [first + line + b"\n" for line in bad]


def test_truncate_damaged_record_names_file_and_line(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    path = recorder.write(2, [recorded(group(i, [None])) for i in (1, 2)])
    later = recorder.write(3, [recorded(group(3, [None]))])
    for content in damages(path.read_bytes()):
        path.write_bytes(content)
        later.write_bytes(b"\xff")
        with pytest.raises(ValueError, match=re.escape(f"{path}:2: not a recorded rollout: ")):
            recorder.truncate(Cut(2, next_group_id=9))
        recorder.truncate(Cut(1))
        assert not later.exists()
        path.write_bytes(content)


def test_truncate_torn_last_line_is_removed(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    path = recorder.write(2, [recorded(group(i, [None])) for i in (1, 2)])
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    recorder.truncate(Cut(2))
    assert path.read_bytes() == content[: content.index(b"\n") + 1]


def test_truncate_leaves_of_the_last_step_what_had_left_by_then(tmp_path: Path) -> None:
    """Group 3 was in flight at the checkpoint, 5 and 6 came after it: dropped and recorded, they all come again."""
    recorder = RolloutRecorder(tmp_path)
    recorder.write(1, [recorded(group(0, [None]))])
    recorder.write(2, [recorded(group(i, [None])) for i in (1, 2)])
    recorder.write(2, [recorded(group(i, [None]), DropReason.FILTERED) for i in (6, 3, 4, 5)])

    def left() -> list[int]:
        return [g.group_id for step in read_rollouts(tmp_path, include_dropped=True) for g in step]

    recorder.truncate(Cut(2))
    assert left() == [0, 1, 2, 6, 3, 4, 5]
    recorder.truncate(Cut(2, held={3}, next_group_id=5))
    assert left() == [0, 1, 2, 4]
    recorder.truncate(Cut(2, next_group_id=2))
    assert left() == [0, 1]


# ---- other tools


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Records that differ as much as records may: chat and plain, no extras, no tokens, columns of other types."""
    empty = group(1, [None], first=[], messages=None, prompt="x", columns={"answer": 2})
    groups = [recorded(empty, DropReason.STALE), recorded(group(0, [Reward(1, {"acc": 1}), Reward(None, error="e")]))]
    return RolloutRecorder(tmp_path / "rollouts").write(1, groups)


def test_datasets_reads_it(mixed: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset("json", data_files=str(mixed), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 3
    assert loaded[1]["messages"] == [{"role": "user", "content": "1 + 1?"}]
    assert loaded[1]["segments"][1]["sampling"]["top_k"] == 5


# ---- malformed records


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda r: r.pop("token_ids"), "key 'token_ids' is missing"),
        (lambda r: r["token_ids"].pop(), "do not agree"),
        (lambda r: r["logprobs"].append(0.0), "do not agree"),
        (lambda r: r.update(stop_reason="bored"), "'bored' is not a valid StopReason"),
        (lambda r: r.update(outcome="dropped:bored"), "'bored' is not a valid DropReason"),
        (lambda r: r.update(token_ids=[1, 2, 2**40]), "not a recorded rollout"),
        (lambda r: r.update(segments=None), "not a recorded rollout"),
        (lambda r: r.update(extras=[1], error="e"), "not a recorded rollout"),
        (lambda r: r.update(sibling=0), "out of order"),
        (lambda r: r.update(group_size=3), "out of order"),
    ],
)
def test_malformed_record_names_file_and_line(tmp_path: Path, damage, problem: str) -> None:
    path = RolloutRecorder(tmp_path).write(1, [recorded(group(0, [Reward(1.0), Reward(0.0)]))])
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    damage(records[1])
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(ValueError, match=r"step-000001\.jsonl:2: .*" + problem):
        list(read_rollouts(tmp_path))


@pytest.mark.parametrize("damage", [{"columns": "{"}, {"columns": None}, {"prompt_ids": None}, {"messages": 5}])
def test_a_group_without_its_task_names_file_and_line(tmp_path: Path, damage: dict) -> None:
    path = RolloutRecorder(tmp_path).write(1, [recorded(group(0, [Reward(1.0), Reward(0.0)]))])
    first, second, _ = path.read_text().split("\n")
    path.write_text(json.dumps(json.loads(first) | damage) + "\n" + second + "\n")
    with pytest.raises(ValueError, match=r"step-000001\.jsonl:1: not a recorded rollout"):
        list(read_rollouts(tmp_path))


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\xff\xfe\n", b"\n"])
def test_malformed_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "step-000001.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=r"step-000001\.jsonl:1: not a recorded rollout"):
        list(read_rollouts(tmp_path))


def test_a_missing_sibling_is_an_error(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, [recorded(group(0, [Reward(1.0), Reward(0.0)]))])
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match=r"step-000001\.jsonl: group 0 has 1 of its 2 rollouts"):
        list(read_rollouts(tmp_path))


def test_no_recordings_is_an_error(tmp_path: Path) -> None:
    for dir in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="run.train_on_recorded: .* has no step"):
            list(read_rollouts(dir))


def test_a_pipe_instead_of_a_step_file_is_rejected(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    os.mkfifo(tmp_path / "step-000001.jsonl")
    with pytest.raises(ValueError, match="step-000001.jsonl is no file"):
        recorder.truncate(Cut(1))
    with pytest.raises(ValueError, match="step-000001.jsonl is no file"):
        recorder.write(1, [])


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_images_of_prompts_are_read_back(tmp_path: Path, format) -> None:
    media = Media("/data/a.png", "12ab", (6, 4), 1, 4, (1, 4, 4))
    content = [{"type": "image", "image": "/data/a.png", "sha256": "3c"}, {"type": "text", "text": "What?"}]
    of = group(0, [None, None, None], messages=({"role": "user", "content": content},))
    of.prompt = Prompt((7, 8, 8, 8, 8, 9), (media,))
    other = Prompt((7, 8, 9), (replace(media, count=1, grid=()),))
    for rollout, prompt in zip(of.rollouts, (of.prompt, of.prompt, other), strict=True):
        rollout.prompt = prompt
    RolloutRecorder(tmp_path, formats=[format]).write(1, [RecordedGroup(of, ["", "", ""], [None] * 3)])
    ((found,),) = read_rollouts(tmp_path)
    assert found.prompt == of.prompt and [r.prompt for r in found.rollouts] == [of.prompt, of.prompt, other]
    assert found.task.images == ["/data/a.png"] and found.task.to_json() == of.task.to_json()
    assert [record["media"][0]["count"] for record in read_records(tmp_path)] == [4, 4, 1]


def test_files_without_media_are_read(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, [RecordedGroup(group(0, [None]), [""], [None])])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "media"}) + "\n" for r in records))
    assert next(read_rollouts(tmp_path))[0].prompt == Prompt((7, 8))
    assert [record["media"] for record in read_records(tmp_path)] == [None]
