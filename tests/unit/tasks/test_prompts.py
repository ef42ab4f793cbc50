"""Long prompts: passed over or cut, counted, and the same after a resume; the chat template's arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from rollover.config import Config, ModelConfig
from rollover.config.load import load_config
from rollover.config.tasks import Truncation
from rollover.models.load import load_model, load_outline
from rollover.run.evaluate import encode_tasks
from rollover.tasks.prompts import PromptSource, build_prompts, encode_prompt, encoder
from rollover.types import Task

LONG, SHORT = "0123456789", "abc"


def prompts(folder: Path, truncation: str, most: int = 5) -> PromptSource:
    """Of a configuration as a user writes it: two long problems and two short ones."""
    rows = [{"prompt": text, "answer": "1"} for text in (LONG, SHORT, LONG + "!", SHORT + "d")]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.toml").write_text(
        f'[tasks]\nchat = false\nshuffle = false\nepochs = 1\nmax_prompt_tokens = {most}\ntruncation = "{truncation}"\n'
        f'eval_fraction = 0\n[[tasks.sources]]\nkind = "dataset"\npath = "{folder}/tasks.jsonl"\n'
    )
    config = load_config([folder / "run.toml"], []).config
    return build_prompts(config)(encoder(tiny.tokenizer()), config.tasks.max_prompt_tokens)


def rows(folder: Path, num: int, *words: str, rollout: str = "groups_per_step = 4") -> PromptSource:
    """Prompts of `num` rows in shuffled passes, with tasks.drop_last."""
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(num))
    )
    (folder / "rows.toml").write_text(
        f"[rollout]\ngroups_per_step = 4\n[tasks]\nchat = false\ndrop_last = true\neval_fraction = 0\n"
        f'[[tasks.sources]]\nkind = "dataset"\npath = "{folder}/rows.jsonl"\n'
    )
    config = load_config([folder / "rows.toml"], [(key, value) for key, value in [w.split("=") for w in words]]).config
    return build_prompts(config)(encoder(tiny.tokenizer()), config.tasks.max_prompt_tokens)


def test_drop_last_leaves_out_the_end_of_each_pass(tmp_path: Path) -> None:
    source = rows(tmp_path, 10, "tasks.epochs=2")
    first, second = texts(source)[:8], texts(rows(tmp_path, 10, "tasks.epochs=2"))[8:]
    assert len(set(first)) == len(set(second)) == 8 and set(first) != set(second)
    assert source.num_dropped_last == 4 and source() is None


@pytest.mark.parametrize("given", [0, 7, 8, 15])
def test_drop_last_resumed_anywhere_gives_the_same_tasks(tmp_path: Path, given: int) -> None:
    whole = texts(rows(tmp_path, 10, "tasks.epochs=2"))
    source = rows(tmp_path, 10, "tasks.epochs=2")
    for _ in range(given):
        source()
    resumed = rows(tmp_path, 10, "tasks.epochs=2")
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert texts(resumed) == whole[given:] and resumed.num_dropped_last == 4


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_drop_last_of_a_pass_below_one_step_is_refused(tmp_path: Path, epochs: int) -> None:
    with pytest.raises(ValueError, match=r"a pass over the data has 3 tasks, too few for a step of 4"):
        rows(tmp_path, 3, f"tasks.epochs={epochs}")()


def texts(source: PromptSource) -> list[str]:
    return [str(tiny.tokenizer().decode(prompt.ids)) for _, prompt in iter(source, None)]


@pytest.mark.parametrize(
    ("truncation", "most", "expected"),
    [
        ("skip", 5, ["abc", "abcd"]),
        ("left", 5, ["56789", "abc", "6789!", "abcd"]),
        ("right", 5, ["01234", "abc", "01234", "abcd"]),
        ("middle", 5, ["01789", "abc", "0189!", "abcd"]),  # verl: most // 2 of the beginning, the rest of the end
        ("middle", 4, ["0189", "abc", "019!", "abcd"]),
        ("left", 11, [LONG, SHORT, LONG + "!", "abcd"]),
    ],
)
def test_long_prompts(tmp_path: Path, truncation: str, most: int, expected: list[str]) -> None:
    source = prompts(tmp_path, truncation, most)
    assert texts(source) == expected
    cut = sum(len(text) > most for text in (LONG, SHORT, LONG + "!", "abcd"))
    assert (source.num_skipped, source.num_truncated) == ((cut, 0) if truncation == "skip" else (0, cut))


@pytest.mark.parametrize("fields", [{"prompt": "\ud800"}, {"messages": ({"role": "user", "content": "\ud800"},)}])
def test_prompt_of_half_a_character_names_its_task(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"^task 'rows/3' of rows: "):
        encode_prompt(Task("rows/3", "rows", "exact", **fields), tiny.tokenizer())


def test_the_count_goes_on_after_a_resume(tmp_path: Path) -> None:
    source = prompts(tmp_path, "left")
    source()
    state = json.loads(json.dumps(source.state_dict()))
    again = prompts(tmp_path, "left")
    again.load_state_dict(state)
    assert texts(again) == ["abc", "6789!", "abcd"] and again.num_truncated == 2
    del state["num_truncated"]  # of an older version
    again.load_state_dict(state)
    assert again.num_truncated == 0


@pytest.mark.parametrize(("truncation", "expected"), [("skip", [SHORT]), ("right", ["01234", SHORT])])
def test_held_out_prompts_are_dealt_with_alike(truncation: Truncation, expected: list[str]) -> None:
    tasks = [Task(str(i), "s", "r", prompt=text) for i, text in enumerate((LONG, SHORT))]
    found = encode_tasks(tasks, encoder(tiny.tokenizer()), 5, truncation)
    assert [tiny.tokenizer().decode(prompt.ids) for prompt in found.prompts] == expected
    assert len(found.tasks) == len(expected)
    assert found.left_out == 2 - len(expected)


def test_chat_template_arguments_are_passed_everywhere(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "m")
    (file,) = folder.glob("chat_template*")
    plain = file.read_text()
    file.write_text("{% if think is defined and think %}{{ '(think)' }}{% endif %}" + plain)
    task = Task("t", "s", "r", messages=({"role": "user", "content": "hi"},))
    made = Config.model_validate({"model": {"path": str(folder), "chat_template_kwargs": {"think": True}}})
    for loaded in (load_model(made.model), load_outline(made.model)):
        assert str(loaded.tokenizer.decode(encode_prompt(task, loaded.tokenizer).ids)) == "(think)u:hi\na:"
        ids = loaded.tokenizer.apply_chat_template([dict(m) for m in task.messages or ()], tokenize=False, think=False)
        assert ids == "u:hi\n"
    loaded = load_model(ModelConfig(path=str(folder)))
    assert str(loaded.tokenizer.decode(encode_prompt(task, loaded.tokenizer).ids)) == "u:hi\na:"
