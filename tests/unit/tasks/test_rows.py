"""Rows of folders, of data sets of the hub (a stand-in for it), and of streams: what is read, in which order, and what
is held out. A stream gives what the same rows on disk would give, up to its shuffling."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from rollover.config import Config, RewardsConfig
from rollover.tasks import rows as rows_module
from rollover.tasks import text_rows
from rollover.tasks.rows import TableLocation, open_rows
from rollover.tasks.stream import TaskStream
from rollover.types import Task

CHUNK = 20


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "STREAM_ROWS", CHUNK)


def write(path: Path, texts: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": t, "answer": "1"}) + "\n" for t in texts))
    return str(path)


def stream(*sources: dict[str, Any], split: str = "train", seed: int = 0, **tasks: Any) -> TaskStream:
    wanted = {"sources": [{"kind": "dataset", **source} for source in sources]} | tasks
    config = Config.model_validate({"tasks": wanted}).tasks
    return TaskStream(config, seed, split, rewards=RewardsConfig())  # type: ignore[arg-type]


def draw(tasks: TaskStream, num: int) -> list[Task]:
    return list(itertools.islice(iter(tasks.next, None), num))


def numbers(tasks: list[Task]) -> list[int]:
    return [int(task.task_id.rpartition("/")[2]) for task in tasks]


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    return write(tmp_path / "numbered.jsonl", [f"problem {i}" for i in range(105)])


# Folders, and the hub


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write(tmp_path / "sums" / "train.jsonl", [f"sum {i}" for i in range(40)])
    write(tmp_path / "sums" / "test.jsonl", [f"test {i}" for i in range(10)] + ["sum 3"])
    return str(tmp_path / "sums")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_has_its_splits(folder: str, streaming: bool) -> None:
    source = {"path": folder, "eval_split": "test", "streaming": streaming}
    trained = draw(stream(source, epochs=1), 100)
    assert sorted(numbers(trained)) == [i for i in range(40) if i != 3], "row 3 has a problem of the held-out split"
    held = stream(source, split="eval").take(100)
    assert sorted(task.content for task in held) == sorted([*(f"user: test {i}" for i in range(10)), "user: sum 3"])
    assert held[0].task_id.startswith("sums/eval/")
    by_hash = {"path": folder, "split": "test", "streaming": streaming}
    kept = draw(stream(by_hash, epochs=1, eval_fraction=0.3), 100)
    out = stream(by_hash, split="eval", eval_fraction=0.3).take(100)
    assert len(kept) + len(out) == 11 and {t.content for t in kept}.isdisjoint(t.content for t in out)


class Hub:
    """Stands in for the hub at the public name of the library that asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        self.asked: list[dict[str, Any]] = []
        self.load, self.folder = datasets.load_dataset, folder
        monkeypatch.setattr(datasets, "load_dataset", self)
        monkeypatch.setattr(rows_module, "hub_is_away", lambda: "")

    def __call__(self, path: str, name: str | None = None, **options: Any) -> Any:
        self.asked.append({"path": path, "name": name, **options})
        return self.load(self.folder, **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, folder: str, streaming: bool) -> None:
    hub = Hub(monkeypatch, folder)
    source = {"path": "openai/gsm8k", "subset": "main", "eval_split": "test", "streaming": streaming}
    tasks = draw(stream(source), 3)
    assert tasks[0].source == "gsm8k" and tasks[0].task_id.startswith("gsm8k/")
    assert all(call["path"] == "openai/gsm8k" and call["name"] == "main" for call in hub.asked)
    assert {call["split"] for call in hub.asked} == {"train", "test"}
    assert {call["streaming"] for call in hub.asked} == {streaming}


def refusal(place: TableLocation) -> str:
    with pytest.raises(ValueError) as error:
        open_rows(place)
    return str(error.value)


def test_what_cannot_be_opened_says_why(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    at = partial(TableLocation, base_dir=tmp_path)
    for place, message in {
        at("sums/tset"): "'sums/tset': there is no such file or folder. Did you mean .*sums/test",
        at("sum"): "expected a file ending in .* or a data set of the hub (owner/name)",
        at("sums", split="dev"): "'sums' cannot be loaded: .*dev.*tasks.sources.subset and .split",
        at("sums", split="dev", streaming=True): "cannot be loaded: .*dev",
        at("empty"): "'empty' cannot be loaded",
        at("sums/train.jsonl", split="test"): "tasks.sources.split has no effect: .* is a file",
        at("sums/train.jsonl", subset="main"): "tasks.sources.subset has no effect: .* is a file",
        at("openai/gsm8k", streaming=True): "it is streamed from the hub, and HF_HUB_OFFLINE is set",
        at("openai/none", key="eval_path"): "eval_path = 'openai/none': no data set of that name",
    }.items():
        found = refusal(place)
        assert re.search(message.replace("(", "[(]").replace(")", "[)]"), found, re.DOTALL), found


def test_a_hub_that_is_away_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """What is in the cache of the library is taken: that is its own offline mode, which lasts as long as the call."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub = Hub(monkeypatch, folder)
    monkeypatch.setattr(rows_module, "hub_is_away", lambda: "huggingface.co cannot be reached")
    offline: list[bool] = []
    load = hub.load
    hub.load = lambda *args, **options: offline.append(datasets.config.HF_HUB_OFFLINE) or load(*args, **options)
    assert open_rows(TableLocation("openai/gsm8k")).num_rows == 40
    assert offline == [True] and datasets.config.HF_HUB_OFFLINE is False


# Streams


def test_streamed_rows_are_shuffled_within_each_chunk(numbered: str) -> None:
    on_disk, streamed = ({"path": numbered, "streaming": s} for s in (False, True))
    plain = [numbers(draw(stream(s, shuffle=False, epochs=2), 500)) for s in (on_disk, streamed)]
    assert plain[0] == plain[1] and len(plain[0]) > 180
    shuffled = numbers(draw(stream(streamed, epochs=2), 500))
    first, second = shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]
    for epoch in (first, second):
        assert sorted(epoch) == sorted(plain[0][: len(plain[0]) // 2]), "every row once"
        chunks = [[n for n in epoch if n // CHUNK == chunk] for chunk in range(6)]
        assert epoch == [n for chunk in chunks for n in chunk] and epoch != sorted(epoch)
    assert first != second
    assert numbers(draw(stream(streamed, seed=1, epochs=1), 500)) != first


def test_another_stream_is_refused(numbered: str, tmp_path: Path) -> None:
    first = stream({"path": numbered, "streaming": True})
    draw(first, 3)
    state = first.state_dict()
    with pytest.raises(ValueError, match="the data of tasks.sources.0 is not what it was"):
        stream({"path": numbered}).load_state_dict(state)
    Path(numbered).write_text(Path(numbered).read_text().replace("problem 7", "task 7"))
    with pytest.raises(ValueError, match="the data of tasks.sources.0 is not what it was"):
        stream({"path": numbered, "streaming": True}).load_state_dict(state)


def test_no_more_rows_are_read_than_are_needed(numbered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    rows_of = text_rows.rows_of

    def counted(path: str) -> Iterator[dict[str, Any]]:
        for index, row in enumerate(rows_of(path)):
            read.append(index)
            yield row

    monkeypatch.setattr(text_rows, "rows_of", counted)
    draw(stream({"path": numbered, "streaming": True}), 5)
    assert max(read) == CHUNK - 1
    held = stream({"path": numbered, "streaming": True}, split="eval", eval_fraction=0.3)
    assert len(held.take(2)) == 2 and max(read) < 60


def test_a_stream_that_breaks_says_where(numbered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = text_rows.rows_of

    def breaking(path: str) -> Iterator[dict[str, Any]]:
        for index, row in enumerate(rows_of(path)):
            if index == 50:
                raise ConnectionResetError("the hub went away")
            yield row

    monkeypatch.setattr(text_rows, "rows_of", breaking)
    tasks = stream({"path": numbered, "streaming": True}, shuffle=False)
    with pytest.raises(ValueError, match="numbered.jsonl' cannot be read from row 41 on: ConnectionResetError: the"):
        draw(tasks, 200)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            [{"path": "a", "streaming": True}, {"path": "b", "problem_key": "id"}],
            "tasks.sources.1.problem_key with tasks.sources.0.streaming: ",
        ),
        ([{"path": "a", "streaming": True, "problem_key": "m:f"}], "tasks.sources.0.problem_key with"),
        (
            [{"path": "b"}, {"path": "a", "streaming": True, "eval_split": "test"}],
            "tasks.sources.1.streaming with held-out rows of its own, beside tasks.sources.0, ",
        ),
    ],
)
def test_what_needs_all_rows_before_the_first_task_is_refused(sources: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(*sources)


def test_what_needs_no_row_of_a_stream_is_not(numbered: str, tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", ["problem 3", "other"])
    sources = [{"path": numbered, "eval_path": held}, {"path": numbered, "streaming": True}]
    assert isinstance(
        Config.model_validate({"tasks": {"sources": [{"kind": "dataset", **s} for s in sources]}}), Config
    )
    trained = {task.content for task in draw(stream(*sources, epochs=1), 500)}
    assert "user: problem 4" in trained
    assert "user: problem 3" not in trained, "also where it comes out of the stream"


CARD = "---\nconfigs:\n- config_name: sums\n  data_files:\n  - split: train\n    path: a/*.jsonl\n---\n# Sums\n"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("card", "subset"), [("# Sums\n", ""), (CARD, ""), (CARD, "sums")])
def test_answers_of_a_folder_with_a_card_keep_their_types(
    tmp_path: Path, card: str, subset: str, streaming: bool
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "README.md").write_text(card)
    rows = [{"prompt": "a", "answer": "2024-01-31"}, {"prompt": "b", "answer": "007"}]
    (tmp_path / "a" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = open_rows(TableLocation(str(tmp_path), subset=subset, streaming=streaming))
    assert [found[0], found[1]] == rows
