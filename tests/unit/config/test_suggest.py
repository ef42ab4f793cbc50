"""What a message suggests for a wrong name: the near one, and nothing rather than a far one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.config import Config
from rollover.config.load import ConfigError, load_config
from rollover.config.schema import expected, field_at, names, tables
from rollover.config.suggest import near_keys, unknown_flags, unknown_key, unknown_table

ALL_KEYS = "`rollover config FILE.toml` prints every key with its doc"


@pytest.mark.parametrize(
    ("table", "meant"),
    [
        ("rollouts", "[rollout]"),
        ("rolout", "[rollout]"),
        ("training", "[train]"),
        ("checkpoints", "[checkpoint]"),
        ("lora", "[model.lora]"),
        ("model.lra", "[model.lora]"),
        ("tasks.source", "[[tasks.sources]]"),
        ("sources", "[[tasks.sources]]"),
    ],
)
def test_a_table_is_compared_with_tables(table: str, meant: str) -> None:
    assert unknown_table(table) == f"unknown table [{table}]. Did you mean {meant}?"


@pytest.mark.parametrize("table", ["kubernetes", "vllm", "optimizer"])
def test_a_table_like_no_other_gets_the_list(table: str) -> None:
    listed = ", ".join(f"[{name}]" for name in Config.model_fields)
    assert unknown_table(table) == f"unknown table [{table}]. The tables are {listed}"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.grup_size", "rollout.group_size"),
        ("rolout.group_size", "rollout.group_size"),
        ("group_size", "rollout.group_size"),
        ("train.group_size", "rollout.group_size"),
        ("train.steps", "train.num_steps"),
        ("rollout.temp", "rollout.temperature"),
        ("temperature", "rollout.temperature or eval.temperature"),
        ("tasks.sources.0.pth", "tasks.sources.0.path"),
        ("rollout.size", "rollout.group_size"),
        ("eval.tasks", "eval.num_tasks"),
        ("rewards.timeout", "rewards.timeout_s"),
        ("engine.dtype", "model.dtype"),
        ("train.seed", "run.seed or eval.seed"),
        ("tasks.path", "path in [[tasks.sources]]"),
        ("tasks.answer_column", "answer_column in [[tasks.sources]]"),
    ],
)
def test_a_key_is_compared_with_its_own_table_first(key: str, meant: str) -> None:
    assert unknown_key(key) == f"unknown key {key}. Did you mean {meant}?"


@pytest.mark.parametrize("key", ["kubernetes", "train.xyz", "dataset.path", "a.b.c"])
def test_a_key_like_no_other_gets_no_guess(key: str) -> None:
    assert unknown_key(key) == f"unknown key {key}, and none is like it. {ALL_KEYS}"


@pytest.mark.parametrize("key", ["model.name", "model.size", "model.gpu_memory_utilization"])
def test_a_key_like_none_in_a_small_table_gets_the_keys_of_that(key: str) -> None:
    """run.name, which has nothing but the word, would be worse than none."""
    listed = "[model] has path, revision, dtype, device, chat_template_kwargs, processor_kwargs,"
    listed += " trust_remote_code, vision"
    assert unknown_key(key) == f"unknown key {key}, and none is like it. {listed}"


def test_a_slip_of_one_letter_anywhere_is_found() -> None:
    """Every key of more than four letters, one letter left out: the key itself is suggested, and comes first."""
    for key in names((0,)):
        table, _, name = key.rpartition(".")
        if len(name) > 4:
            slipped = f"{table}.{name[:2]}{name[3:]}"
            if slipped not in names((0,)):
                assert near_keys(slipped, names((0,)))[:1] == [key], slipped


def test_a_slip_in_a_table_is_found() -> None:
    for table, _ in tables():
        if "." not in table:
            assert f"Did you mean [{table}]?" in unknown_table(table[:-2] + table[-1]), table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_steps", "3"], "unknown option --num_steps. Did you mean --train.num_steps?"),
        (["--num-steps=3"], "unknown option --num-steps. Did you mean --train.num_steps?"),
        (["--resme"], "unknown option --resme. Did you mean --resume?"),
        (["--seed", "1"], "unknown option --seed. Did you mean --run.seed or --eval.seed?"),
        (["--zones", "2"], f"unknown option --zones. {ALL_KEYS}; each can be set as --table.key VALUE"),
        (["x", "y"], "unexpected arguments: x y"),
    ],
)
def test_flags_name_the_dotted_key(words: list[str], message: str) -> None:
    assert unknown_flags(words, ["--resume", "--help"]) == message


def test_a_verb_that_takes_no_keys_is_not_told_any() -> None:
    for flag in ("--run.seed", "--seed", "--steps"):
        message = unknown_flags([flag], ["--perfetto", "--svg"], keys=False)
        assert message == f"unknown option {flag}. There are --perfetto, --svg"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("train.num_steps=3", "Did you mean --train.num_steps 3?"),
        ("+num_steps=3", "Did you mean --train.num_steps 3?"),
        ("trainer.total_epochs=3", ALL_KEYS),
    ],
)
def test_an_override_without_dashes_is_no_file(word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([word])
    assert str(error.value) == f"{word}: no such file. {hint}"


@pytest.mark.parametrize("name", ["config.resolved.json", "ppo.yaml"])
def test_another_format_is_told_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"run": {"seed": 1}}')
    with pytest.raises(ConfigError, match=f"{name} is no TOML file. `rollover config FILE.toml > mine.toml` writes"):
        load_config([path])


def test_a_union_of_words_is_words() -> None:
    """tasks.sources.0.answer_rule may be empty as well, and takes no integer."""
    info = field_at("tasks.sources.0.answer_rule")
    assert info is not None and expected(info).startswith('one of "last_number", ')


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[run]\nname = mine # x", 2, 'name = mine has no quotes, which strings need. Write name = "mine"'),
        ("[run]\nname =", 2, "name has no value. Give it one, or remove the line"),
        ("[track]\ntrace = True", 2, "true and false have small letters. Write trace = true"),
        ("[train]\nlearning_rate = .5", 2, "a number begins with a digit. Write learning_rate = 0.5"),
        ("[run]\n[train]\n[run]", 3, "the table [run] is there twice. Write all its keys under one [run]"),
        ("[[tasks.sources]]\n[tasks.sources]", 2, "[tasks.sources] and [[tasks.sources]] are both there. Use one of"),
        ("[tasks.sources]\n[[tasks.sources]]", 2, "[tasks.sources] and [[tasks.sources]] are both there. Use one of"),
        ("[run]\nname = 'a'\nname = 'b'\n\n", 3, "name is there twice. Keep one of them"),
        ("[run", 1, "a bracket is not closed. A table begins with [name], one of several with [[name]]"),
        ("[run]\nname: 'a'", 2, "a line that sets something is: key = value"),
        ("[run]\nname = 'a", 2, "a string is not closed. It ends with the quote that it begins with"),
        ('[run]\nname = "a\nseed = 1', 2, "a string is not closed. It ends with the quote that it begins with"),
        ('[run]\ndir = "C:\\Users"', 2, "a backslash in double quotes needs another one. Use single quotes"),
        ("[rollout]\nstop = ['a',\n", 2, "the list is not closed. Add ] at its end"),
        ("[x]\np = {a = 1,\n b = 2}", 2, "a table in braces stands on one line: p = { a = 1, b = 2 }"),
        ("[run]\nseed = 1 // one", 2, "something is left over after the value of seed. A comment begins with #"),
        ("// a comment", 1, "a line is [table], key = value, or a # comment"),
    ],
)
def test_what_is_not_toml_is_told_as_it_is(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config([path])
    assert str(error.value).startswith(f"{path}, line {line}: not valid TOML: {message}")
