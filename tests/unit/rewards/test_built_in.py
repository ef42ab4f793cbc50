"""The built-in rewards: what each reads, how they are named, and which a task gets."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT
from rollover.config import RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.config.load import load_config
from rollover.plugins.sandbox.cases import extract_code
from rollover.rewards.answers import RULES, answer_of
from rollover.rewards.built_in import BUILT_IN, BY_DATA_SOURCE, NOT_BUILT_IN, display_name, make_spec, parse_spec
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import CompositeReward, load, load_reward
from rollover.rewards.routing import choose_reward
from rollover.tasks.stream import TaskStream
from rollover.types import Reward


def item(completion: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": "p", "completion": completion, "completion_ids": [1], "columns": columns, "source": "file"}


def score(spec: str, completion: str, **columns: Any) -> float:
    return load_reward(spec, ".").score_one(item(completion, **columns))["score"]


@pytest.mark.parametrize(
    ("spec", "completion", "answer", "expected"),
    [
        ("last_number", "It is 3, no: 4", "4", 1),
        ("exact_match/last_number", "so it is 1,000", "1000", 1),
        ("exact_match/last_number", "no idea", "1000", 0),
        ("boxed", r"so \boxed{\dfrac12}", r"\frac{1}{2}", 1),
        ("boxed", r"so \boxed{\dfrac12}", r"Thus \boxed{1/2}.", 1),
        ("boxed", r"\frac12", r"\frac12", 0),
        ("gsm8k", "#### 1,234", "9 * x\n#### 1,234", 1),
        ("gsm8k", "It is 72", "72", 0),
        ('gsm8k/{"method": "flexible"}', "It is 72", "72", 1),
        ('gsm8k/{"format_score": 0.1}', "#### 71", "72", 0.1),
        ("math_dapo", "Answer: $72$", "72", 1),
        ("math_dapo", "It is 72", "72", -1),
        ('math_dapo/{"wrong": 0}', "It is 72", "72", 0),
        ('math_dapo/{"strict_box": true}', "Answer: 72", "72", -1),
        ("search_qa", "<answer>The Beatles!</answer>", {"target": ["Queen", "beatles"]}, 1),
        ("search_qa", "The Beatles", "beatles", 0),
    ],
)
def test_rules(spec: str, completion: str, answer: Any, expected: float) -> None:
    assert score(spec, completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("The answer is (B).", 1),
        ("The answer is B", 1),
        ("the answer is A. No, the answer is B.", 1),
        ("**Answer: B**", 1),
        ("Answer:\n\n**B**", 1),
        (r"Answer: A, hence \boxed{B}", 1),
        (r"\boxed{\text{B}}", 1),
        ("I think\nB) Paris", 1),
        ("b", 1),
        ("(B)", 1),
        ("The answer is A.", 0),
        ("The answer is Berlin.", 0),
        ("Because of it", 0),
        ("B is what I first thought of, but it is not so.", 0),
        ("I like vitamin B", 0),
        ("  **B**: Paris", 1),
        ("", 0),
    ],
)
def test_multiple_choice(completion: str, expected: float) -> None:
    for reference in ("B", "(b)", "B) Paris", 1):
        assert score("multiple_choice", completion, answer=reference) == expected


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "answer", "answer ", "<answer>", "```", "``` ", " ", "\n", "1", "1/", "A ", "$"]
)
def test_what_a_policy_repeats_for_ever_is_scored_in_time(unit: str) -> None:
    """A degenerate completion is worth 0. In a time of its length squared it would be missing, and its task barred."""
    names = [
        "boxed",
        "gsm8k",
        "math_dapo",
        "multiple_choice",
        "search_qa",
        "json",
        *map("exact_match/{}".format, RULES),
    ]
    begun = time.process_time()
    for text in (unit * (60_000 // len(unit)), "answer" + unit * (60_000 // len(unit)) + "!"):
        for name in names:
            assert score(name, text, answer="C") <= 0, name
        assert extract_code("```python\nx = 1\n```" + text) is not None
    assert time.process_time() - begun < 20


def test_a_fraction_of_thousands_of_digits_is_wrong_and_no_error() -> None:
    assert score("boxed", f"\\boxed{{{'1' * 5000}/2}}", answer="C") == 0


def test_a_missing_or_useless_reference_is_an_error() -> None:
    for reference in ("Paris", 30, "Berlin"):
        with pytest.raises(ValueError, match="begins with none of the letters"):
            score("multiple_choice", "B", answer=reference)
    with pytest.raises(ValueError, match="needs an answer"):
        score("exact_match/last_number", "1", label="x")


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("completion", "valid", "fits"),
    [
        ('{"n": 1}', 1, 1),
        ('```json\n{"n": 1}\n```', 1, 1),
        ('Here it is:\n```\n{"n": 1}\n```\nDone.', 1, 1),
        ('{"n": "1"}', 1, 0),
        ("[]", 1, 0),
        ('{"n": 1} and more', 0, 0),
        ("{'n': 1}", 0, 0),
        ('{"n": NaN}', 0, 0),
        ('```\n{"n": 1}\n```\n```\n{"n": 2}\n```', 0, 0),
        ("[" * 100_000, 0, 0),
        ("", 0, 0),
    ],
)
def test_json(tmp_path: Path, completion: str, valid: float, fits: float) -> None:
    pytest.importorskip("jsonschema")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    by_file = load_reward('json/{"schema": "schema.json"}', str(tmp_path))
    assert score("json", completion) == valid
    assert score(make_spec("json", {"schema": SCHEMA}), completion) == fits
    assert by_file.score_one(item(completion))["score"] == fits


def test_a_schema_fetches_nothing() -> None:
    """jsonschema by itself would ask the network for a reference to another document."""
    pytest.importorskip("jsonschema")
    with pytest.raises(Exception, match="(?i)unresolvable"):
        score(make_spec("json", {"schema": {"$ref": "http://127.0.0.1:9/x.json"}}), "{}")


@pytest.mark.parametrize(
    ("match", "completion", "expected"),
    [("full", "<t>a</t>", 1), ("full", "<t>a</t>!", 0), ("start", "<t>a</t>!", 1), ("start", "!<t>a</t>", 0),
     ("search", "!<t>a</t>!", 1), ("search", "<t>", 0)],
)  # fmt: skip
def test_format(match: str, completion: str, expected: float) -> None:
    assert score(make_spec("format", {"pattern": "<t>.*</t>", "match": match}), completion) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('gsm8k/{"methud": "strict"}', "no parameter 'methud': it has method, format_score. Did you mean \"method\""),
        ('gsm8k/{"method": "loose"}', "method = 'loose' is none of strict, flexible"),
        ('last_number/{"rule": "boxed"}', "no parameter 'rule': it has none"),
        ("format", "missing 1 required positional argument: 'pattern'"),
        ('format/{"pattern": "("}', "no regular expression"),
        ('format/{"pattern": "a", "match": "all"}', "none of full, start, search"),
        ('multiple_choice/{"letters": "AA"}', "give different letters"),
        ('json/{"schema": "nowhere.json"}', "cannot be read"),
        ('json/{"schema": {"type": 5}}', "no JSON schema"),
        ("gsm8k/{x}", "parameters are no JSON"),
        ("exact_match/last_word", "rule = 'last_word' is none of last_number"),
    ],
)
def test_wrong_parameters_are_told(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_reward(spec, ".")


def test_a_spec_is_read_as_it_is_written() -> None:
    for name, params in (("gsm8k", {}), ("gsm8k", {"method": "flexible"}), ("exact_match", {"rule": "boxed"})):
        assert parse_spec(make_spec(name, params)) == (name, params)
    assert make_spec("exact_match", {}, "boxed") == "exact_match/boxed" and make_spec("gsm8k", {}, "boxed") == "gsm8k"
    assert parse_spec("mine.py:f") is None and parse_spec("gsm8k/strict") is None
    assert display_name("exact_match/boxed") == "exact_match" and display_name("a/b.py:f") == "a/b.py:f"


def test_every_built_in_is_documented_with_what_it_cannot_see() -> None:
    text = (ROOT / "docs/rewards.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for name in BUILT_IN:
        assert any(row.startswith(f"| `{name}` |") and row.count("|") == 5 for row in rows), name
    for name in (*BY_DATA_SOURCE, *NOT_BUILT_IN):
        assert f"`{name}`" in text, name


def test_column_returns_the_number_of_the_task() -> None:
    nested = 'column/{"name": "extra_info.rank"}'
    assert score("column", "x", score=0.5) == 0.5 and score(nested, "x", extra_info={"rank": 3}) == 3.0
    with pytest.raises(ValueError, match="the task has no column 'extra_info.rank'. Set its parameter name"):
        score(nested, "x", extra_info={})


# Several


def several(*rows: dict[str, Any], folder: str = ".") -> CompositeReward:
    source = TaskSourceConfig(kind="dataset", path="x.jsonl")
    reward = load(choose_reward(source, RewardsConfig(functions=rows)).spec, folder)  # type: ignore[arg-type]
    assert isinstance(reward, CompositeReward)
    return reward


def test_several_are_weighed_and_told_apart() -> None:
    reward = several(
        {"function": "math_dapo", "name": "right", "params": {"wrong": 0.0}},
        {"function": "format", "weight": 0.25, "params": {"pattern": "(?s).*Answer:.*"}},
        {"function": "json", "weight": 0.0},
        {"function": "json", "weight": -1.0},
    )
    assert reward.mode == "each", "one sample at a time, so that a time-out costs one"
    assert reward.score_one(item("Answer: 7", answer="8")) == {
        "score": 0.25,
        "extras": {"right": 0.0, "right.acc": 0.0, "format": 1.0, "json": 0.0, "json.2": 0.0},
        "texts": {"right.pred": "7"},
    }
    assert reward.score_one(item("8", answer="8"))["score"] == -1.0
    assert "right: ValueError: math_dapo needs an answer" in reward.score_one(item("8"))["error"]


def test_shaping_function_is_not_part_of_the_score() -> None:
    reward = several(
        {"function": "math_dapo", "params": {"wrong": 0.0}},
        {"function": "format", "weight": -0.5, "params": {"pattern": ".*!"}, "shaping": True, "name": "shouts"},
    )
    assert reward.score_one(item("Answer: 7!", answer="7!")) == {
        "score": 1.0,
        "extras": {"math_dapo": 1.0, "math_dapo.acc": 1.0},
        "shaping": {"shouts": -0.5},
        "texts": {"math_dapo.pred": "7!"},
    }
    assert reward.score_one(item("Answer: 7", answer="7"))["shaping"] == {"shouts": 0.0}


def test_a_row_gives_arguments_to_a_function_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def verl(solution_str, extra_info, bonus=0): return len(solution_str) + bonus\n"
        "def trl(completions, bonus, **_): return [bonus for _ in completions]\n"
    )
    rows = [{"function": f"r.py:{name}", "params": {"bonus": 10}} for name in ("verl", "trl")]
    reward = several(*rows, folder=str(tmp_path))
    assert reward.mode == "batch", "TRL's function sees whole groups"
    assert [r["extras"] for r in reward.score_all([item("abc")] * 2)] == [{"verl": 13.0, "trl": 10.0}] * 2
    with pytest.raises(ValueError, match="no parameter 'bonnus'"):
        several({"function": "r.py:verl", "params": {"bonnus": 1}}, folder=str(tmp_path))


def test_a_sum_that_is_too_large_is_no_score(tmp_path: Path) -> None:
    """What goes to the run has to be finite: the worker would be ended as one that answers nonsense."""
    (tmp_path / "r.py").write_text("def f(solution_str): return float(solution_str)\ndef g(solution_str): return 1e30")
    rows = [{"function": "r.py:f"}, {"function": "r.py:g"}]
    for more in ({}, {"weight": 1e29}, {"weight": 1e29, "shaping": True}):
        reward = several(rows[0] | more, rows[1], folder=str(tmp_path))
        assert "beyond 1e+30" in reward.score_one(item("5e29"))["error"], more
        assert "score" in reward.score_one(item("-1.0")), more


def test_none_of_several_sees_what_another_did_to_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def one(solution_str, extra_info): return extra_info.pop('n')\n"
        "def group(completions, extra_info): return [info.pop('n') for info in extra_info]\n"
        "async def asked(solution_str, extra_info): return extra_info.pop('n')\n"
    )
    for names in (("one", "one"), ("one", "group", "group"), ("asked", "one", "asked")):
        reward = several(*({"function": f"r.py:{name}"} for name in names), folder=str(tmp_path))
        results = reward.score_all([item("x", extra_info={"n": 2}), item("x", extra_info={"n": 3})])
        assert [result.get("score") for result in results] == [2.0 * len(names), 3.0 * len(names)], results


def test_a_coroutine_of_several_without_memory_is_told_as_any(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("async def f(solution_str): raise MemoryError\ndef g(solution_str): return 1")
    reward = several({"function": "r.py:f"}, {"function": "r.py:g"}, folder=str(tmp_path))
    with pytest.raises(MemoryError):
        reward.score_all([item("x")])


# By data_source


def rewards_of(folder: Path, *data_sources: Any, reward: str = "", **rewards: Any) -> list[str]:
    rows = [
        {"prompt": f"q {i}", "data_source": s, "reward_model": {"ground_truth": "7"}}
        for i, s in enumerate(data_sources)
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = TaskSourceConfig(
        kind="dataset", path=str(folder / "d.jsonl"), eval_path=str(folder / "e.jsonl"), reward=reward
    )
    (folder / "e.jsonl").write_text('{"prompt": "held out", "answer": "7"}\n')
    tasks = TasksConfig(sources=[source], shuffle=False, epochs=1)
    stream = TaskStream(tasks, 0, "train", rewards=RewardsConfig(**rewards))
    return [task.reward for task in iter(stream.next, None)]


def test_a_file_of_verls_is_scored_as_its_data_sources_say(tmp_path: Path) -> None:
    assert rewards_of(tmp_path, "openai/gsm8k", "aime2024", "numina_cn_k12", None) == [
        "gsm8k", "math_dapo", "math", "exact_match/last_number",
    ]  # fmt: skip


def test_a_data_source_that_nobody_knows_is_refused_as_verl_does(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data_source 'mine': .* rewards.by_data_source = \{ \"mine\" = "):
        rewards_of(tmp_path, "openai/gsm8k", "mine")
    assert rewards_of(tmp_path, "mine", function="exact_match") == ["exact_match/last_number"]


@pytest.mark.parametrize("value", [1, False, ["openai/gsm8k"]])
def test_a_data_source_that_is_no_text_is_refused(tmp_path: Path, value: Any) -> None:
    """It would be compared exactly, whatever rewards.by_data_source has for it."""
    with pytest.raises(ValueError, match="task d/0: its data_source, which chooses its reward, is .* and no text"):
        rewards_of(tmp_path, value, by_data_source={"1": "json"})
    assert rewards_of(tmp_path, value, function="exact_match") == ["exact_match/last_number"]


def test_a_parquet_file_of_verls_layout_is_scored_in_the_pool(tmp_path: Path) -> None:
    """From a configuration that names no reward."""
    datasets = pytest.importorskip("datasets")
    layout = {"ability": "math", "extra_info": {"index": 0, "split": "train"}}
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} + {i}?"}], "data_source": name,
         "reward_model": {"style": "rule", "ground_truth": str(2 * i)}, **layout}
        for i, name in enumerate(["openai/gsm8k", "math_dapo", "DigitalLearningGmbH/MATH-lighteval"] * 4)
    ]  # fmt: skip
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    source = {"kind": "dataset", "path": str(tmp_path / "train.parquet")}
    config = load_config([{"tasks": {"sources": [source], "shuffle": False}, "rewards": {"num_workers": 1}}]).config
    tasks = TaskStream(config.tasks, 0, "train", rewards=config.rewards).take(6)

    async def scored() -> list[Reward]:
        pool = RewardPool(config.rewards)
        try:
            answers = [answer_of(task.columns) for task in tasks]
            right = [f"#### {a}\nAnswer: {a}\n\\boxed{{{a}}}" for a in answers]
            requests = [ScoreRequest(task, text) for task, text in zip(tasks, right, strict=True)]
            return await pool.score([*requests, *(ScoreRequest(task, "no") for task in tasks)])
        finally:
            await pool.close()

    rewards = asyncio.run(scored())
    assert [r.score for r in rewards[:6]] == [1.0] * 6 and {task.reward for task in tasks} > {"gsm8k"}
    wrong = {"gsm8k": 0.0, "math_dapo": -1.0, "boxed": 0.0}
    assert [r.score for r in rewards[6:]] == [wrong[task.reward] for task in tasks]


def test_the_own_table_comes_before_verls_and_names_all(tmp_path: Path) -> None:
    own = {"openai/gsm8k": "exact_match", "my_*": "a.py:f", "apps": "a.py:code"}
    assert rewards_of(tmp_path, "openai/gsm8k", "my_set", "apps", "aime", by_data_source=own) == [
        "exact_match/last_number", "a.py:f", "a.py:code", "math_dapo",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no reward for data_source 'other': .* rewards.by_data_source"):
        rewards_of(tmp_path, "other", by_data_source=own)
    assert rewards_of(tmp_path, "other", by_data_source={"*": "json"}) == ["json"]
    with pytest.raises(ValueError, match="rewards.by_data_source: 'jsson' is neither built in .*did you mean 'json'"):
        rewards_of(tmp_path, "other", by_data_source={"*": "jsson"})


def test_data_source_of_images_needs_a_reward(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'hiyouga/geometry3k' .it is of answers about images.*rewards.by_data_source"):
        rewards_of(tmp_path, "hiyouga/geometry3k")
