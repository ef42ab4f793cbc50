import datetime
import json

import datasets
import pytest

from rollover.config import TaskSourceConfig
from rollover.tasks.dataset import DatasetSource
from rollover.tasks.rows import TableLocation
from rollover.tasks.source import SourceSetup

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2"}]


def jsonl(tmp_path, *rows, name="data.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def make(tmp_path, path, needs_answer=False, chat=True, **columns):
    reward = "exact_match/last_number" if needs_answer else "own.py:score"
    setup = SourceSetup(TaskSourceConfig(**columns), "data", reward, 0, chat=chat)
    return DatasetSource(setup, TableLocation(path, base_dir=tmp_path))


def test_verl_layout_in_parquet(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "split": "train"},
    }
    datasets.Dataset.from_list([row, row]).to_parquet(str(tmp_path / "train.parquet"))
    problem = make(tmp_path, "train.parquet", needs_answer=True).problem(1)
    assert problem.messages == tuple(CHAT)
    assert problem.columns == {k: v for k, v in row.items() if k != "prompt"}


def test_csv_with_question_and_answer_and_an_fsspec_url(tmp_path):
    (tmp_path / "qa.csv").write_text('question,answer\n"2 + 2, please",4\n')
    for path in ("qa.csv", f"file://{tmp_path}/qa.csv"):
        problem = make(tmp_path, path, needs_answer=True).problem(0)
        assert (problem.task_id, problem.source, problem.prompt) == ("data/0", "data", "2 + 2, please")
        assert problem.columns == {"answer": "4"}, "values of a CSV are texts"


def test_named_columns_win(tmp_path):
    path = jsonl(
        tmp_path, {"prompt": "no", "text": "yes", "answer": "no", "gold": "yes", "reward_model": {"style": "x"}}
    )
    problem = make(tmp_path, path, prompt_column="text", answer_column="gold").problem(0)
    assert problem.prompt == "yes" and problem.columns["answer"] == "yes"
    assert problem.columns["reward_model"] == {"style": "x", "ground_truth": "yes"}


def test_values_become_json(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "p", "answer": "4", "when": datetime.date(2020, 1, 2)}])
    rows.to_parquet(str(tmp_path / "a.parquet"))
    assert make(tmp_path, "a.parquet").problem(0).columns["when"].startswith("2020-01-02")
    datasets.Dataset.from_list([{"prompt": "p", "raw": b"\x00"}]).to_parquet(str(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match="row 1: column 'raw' holds a bytes"):
        make(tmp_path, "b.parquet").problem(0)


@pytest.mark.parametrize(
    ("row", "options", "error"),
    [
        ({"text": "x"}, {}, "no prompt column.*columns are text: set tasks.sources.prompt_column"),
        ({"prompt": "x"}, {"prompt_column": "q"}, "no prompt column 'q'.*columns are prompt"),
        ({"prompt": "x"}, {"answer_column": "gold"}, "no answer column 'gold'.*set tasks.sources.answer_column"),
        ({"prompt": "x"}, {"needs_answer": True}, "no answer column.*exact_match.*set tasks.sources.answer_column"),
    ],
)
def test_missing_columns_are_named(tmp_path, row, options, error):
    path = jsonl(tmp_path, row)
    with pytest.raises(ValueError, match=f"{path}.*{error}"):
        make(tmp_path, path, **options)


@pytest.mark.parametrize("prompt", ["", 3, [], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_a_bad_prompt_names_the_row(tmp_path, prompt):
    source = make(tmp_path, jsonl(tmp_path, {"prompt": prompt, "answer": "4"}))
    with pytest.raises(ValueError, match="data.jsonl', line 1: .*'prompt'"):
        source.problem(0)


def test_chat_rows_need_chat(tmp_path):
    with pytest.raises(ValueError, match="set tasks.chat = true"):
        make(tmp_path, jsonl(tmp_path, {"prompt": CHAT}), chat=False).problem(0)


def test_bad_files_name_the_key(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{not json\n")
    (tmp_path / "empty.csv").write_text("prompt,answer\n")
    (tmp_path / "zero.jsonl").write_text("")
    datasets.Dataset.from_dict({"prompt": []}).to_parquet(str(tmp_path / "rowless.parquet"))
    for path, error in {
        "none.jsonl": "tasks.sources.path = 'none.jsonl': there is no such file. Check the path",
        "emty.csv": "tasks.sources.path = 'emty.csv': there is no such file. Did you mean .*/empty.csv",
        "data.txt": "expected a file ending in .jsonl",
        "nosuch://x/a.csv": "tasks.sources.path = 'nosuch://x/a.csv' cannot be opened",
        "bad.jsonl": "bad.jsonl' cannot be read: .*bad.jsonl, line 1 is no JSON: ",
        "empty.csv": "empty.csv' has no rows",
        "zero.jsonl": "zero.jsonl' is empty",
        "rowless.parquet": "rowless.parquet' has no rows",
    }.items():
        with pytest.raises(ValueError, match=error):
            make(tmp_path, path)


def test_a_message_keeps_its_keys_and_parts_of_text_are_one(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "bob"}, {"role": "assistant", "content": "b"}]},
        {"prompt": [{"role": "user", "content": "c"}]},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))  # Arrow: every message has every key
    source = make(tmp_path, "a.parquet")
    assert [list(source.problem(i).messages) for i in (0, 1)] == [row["prompt"] for row in rows]
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2"}]
    path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": parts}]}, name="b.jsonl")
    assert make(tmp_path, path).problem(0).messages == ({"role": "user", "content": "2 + 2"},)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"prompt": CHAT, "images": [{"path": "a.png"}]},
            "column 'images': there is no file .*a.png",
        ),
        ({"prompt": "p", "video": "a.mp4"}, "column 'video' holds what a prompt shows.*Use rows of these"),
        (
            {"prompt": [*CHAT, CALL]},
            r"a message in 'prompt' has tool_calls = \[.*write it into its content, or remove it",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message has a part {.*} without an image, and there is no column images",
        ),
        ({"prompt": json.dumps(CHAT)}, "'prompt' holds chat messages as the text of JSON: store them as a list"),
        ({"prompt": str(CHAT)}, "'prompt' holds chat messages as the text of JSON: store them as a list"),
    ],
)
def test_what_would_be_left_out_of_a_prompt_is_refused(tmp_path, row, error):
    with pytest.raises(ValueError, match=f"data.jsonl', line 1: .*{error}"):
        make(tmp_path, jsonl(tmp_path, row)).problem(0)
