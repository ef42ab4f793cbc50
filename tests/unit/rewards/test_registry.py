import asyncio
import math
from typing import Any

import numpy as np
import pytest

from rollover.config import RewardsConfig, TaskSourceConfig
from rollover.rewards.answers import answer_of
from rollover.rewards.registry import load_reward, to_result, with_signature
from rollover.rewards.routing import choose_reward
from rollover.track.metrics import validate


def item(completion="4", prompt="2 + 2", source="file", **columns):
    return {"prompt": prompt, "completion": completion, "completion_ids": [1], "columns": columns, "source": source}


def load(tmp_path, code, name="f"):
    (tmp_path / "r.py").write_text(code)
    return load_reward(f"r.py:{name}", str(tmp_path))


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (1, {"score": 1.0, "extras": {}}),
        (True, {"score": 1.0, "extras": {}}),
        (np.float32(0.5), {"score": 0.5, "extras": {}}),
        (np.array(2), {"score": 2.0, "extras": {}}),
        (
            {"score": 0.5, "acc": True, "n": 2, "pred": "x", "bad": math.inf, "large": 10**400},
            {"score": 0.5, "extras": {"acc": 1, "n": 2}, "texts": {"pred": "x"}},
        ),
    ],
)
def test_scores(value, result):
    assert to_result(value) == result


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "returned None"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        (10**400, "not finite"),
        ({"score": -(10**400)}, "not finite"),
        ("1.0", "str '1.0', expected a number"),
        ({"acc": 1}, "without 'score'"),
        ({"score": None}, "returned None"),
        ([1.0], "expected a number"),
    ],
)
def test_what_is_not_a_score_is_an_error(value, error):
    assert set(to_result(value)) == {"error"}
    assert error in to_result(value)["error"]


def test_reward_of_source_then_table_then_kind():
    gym, file = TaskSourceConfig(kind="reasoning_gym", name="chain_sum"), TaskSourceConfig(kind="dataset", path="a.csv")
    none, some = RewardsConfig(), RewardsConfig(function="a:b")
    assert choose_reward(gym, none, "boxed").spec == "reasoning_gym/boxed"
    assert choose_reward(file, none).spec == "exact_match/last_number"
    assert choose_reward(gym, some).spec == "a:b"
    assert choose_reward(gym.model_copy(update={"reward": "exact_match", "answer_rule": "full_text"}), some).spec == (
        "exact_match/full_text"
    )
    assert choose_reward(file.model_copy(update={"reward": "x.py:f"}), some).spec == "x.py:f"
    with pytest.raises(ValueError, match="did you mean 'exact_match'"):
        choose_reward(file.model_copy(update={"reward": "exactmatch"}), none)
    with pytest.raises(ValueError, match="cannot score the dataset"):
        choose_reward(file.model_copy(update={"reward": "reasoning_gym"}), none)


def test_trl_gets_lists_and_messages_for_chat(tmp_path):
    reward = load(
        tmp_path,
        "def f(prompts, completions, answer, **columns):\n"
        "    assert prompts == ['2 + 2', [{'role': 'user', 'content': 'q'}]], prompts\n"
        "    assert completions == ['4', [{'role': 'assistant', 'content': '5'}]], completions\n"
        "    assert columns['extra'] == [None, 'e'] and columns['completion_ids'] == [[1], [1]], columns\n"
        "    return [float(a) for a in answer]\n",
    )
    assert reward.kind == "trl" and reward.whole_groups
    chat = item("5", prompt=[{"role": "user", "content": "q"}], answer="9", extra="e")
    assert [r["score"] for r in reward.score_all([item("4", answer="8"), chat])] == [8, 9]


def test_trl_scores_may_be_an_array_or_dicts_and_none_is_missing(tmp_path):
    reward = load(tmp_path, "import numpy\ndef f(completions, **_): return numpy.arange(len(completions))")
    assert [r["score"] for r in reward.score_all([item(), item()])] == [0, 1]
    reward = load(tmp_path, "def f(completions, **_): return [{'score': 1, 'x': 2}, None]")
    scored, missing = reward.score_all([item(), item()])
    assert scored == {"score": 1.0, "extras": {"x": 2.0}} and "None" in missing["error"]


@pytest.mark.parametrize("parameter", ["trainer_state", "trainer_state=None", "log_metric=None, **columns"])
def test_trl_arguments_reach_required_and_optional(tmp_path, parameter):
    name = parameter.partition("=")[0]
    reward = load(tmp_path, f"def f(completions, {parameter}): return [{name} is not None for _ in completions]")
    assert reward.score_all([item()])[0]["score"] == 1


def test_trl_state_is_the_newest_of_the_group(tmp_path):
    code = (
        "def f(completions, trainer_state):\n"
        "    s = trainer_state\n"
        "    assert s.log_history == []\n"
        "    return [s.global_step + s.max_steps / 100 + s.epoch / 1000] * len(completions)\n"
    )
    items = [item() | {"trainer_state": {"global_step": n, "max_steps": 20, "epoch": 1.0}} for n in (3, 4)]
    assert [r["score"] for r in load(tmp_path, code).score_all(items)] == [pytest.approx(4.201)] * 2


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_trl_logged_numbers_become_extras(tmp_path, kind):
    code = (
        f"{kind} f(completions, log_metric, log_extra):\n"
        "    log_metric('m', 3)\n"
        "    log_extra('read', [5, 'five'])\n"
        "    return [1.0, {'score': 0.5, 'm': 9, 'x': 2}]\n"
    )
    scored = load(tmp_path, code).score_all([item(), item()])
    assert [r["extras"] for r in scored] == [{"m": 3.0, "read": 5.0}, {"m": 3.0, "x": 2.0}]
    with pytest.raises(ValueError, match=r"log_extra\('read'\): 2 values for 1 completions"):
        load(tmp_path, code).score_all([item()])


@pytest.mark.parametrize(("body", "error"), [("[1.0]", "1 scores for 2"), ("1.0", "expected a list of 2 scores")])
def test_trl_wrong_length_or_type(tmp_path, body, error):
    with pytest.raises(ValueError, match=error):
        load(tmp_path, f"def f(prompts, completions, **_): return {body}").score_all([item(), item()])


def test_verl_gets_its_four_arguments(tmp_path):
    reward = load(
        tmp_path,
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, solution_str, ground_truth) == ('gsm', '4', '8')\n"
        "    assert extra_info == {'split': 't', 'num_turns': 2, 'rollout_reward_scores': {}}\n"
        "    return {'score': 1, 'acc': True}\n",
    )
    columns = {"data_source": "gsm", "reward_model": {"ground_truth": "8"}, "extra_info": {"split": "t"}}
    assert reward.kind == "verl" and not reward.whole_groups
    assert reward.score_one(item(**columns)) == {"score": 1.0, "extras": {"acc": 1.0}}


def test_verl_without_a_ground_truth_says_what_to_set(tmp_path):
    reward = load(tmp_path, "def f(data_source, solution_str, ground_truth, extra_info): return 1")
    with pytest.raises(ValueError, match="tasks.sources.answer_column"):
        reward.score_one(item(label="x"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def f(prompts, completions, anwser, **columns): return [1.0] * len(completions)",
            "the function takes anwser, but the data has no such column: it is given completion_ids, answer, level,"
            " prompts, completions, trainer_state, log_metric, log_extra. Did you mean answer?",
        ),
        (
            "async def f(solution_str, ground_truth, tolerance): return 1.0",
            "the function takes tolerance, but the data has no such column: it is given data_source, solution_str,"
            " ground_truth, extra_info",
        ),
    ],
)
def test_missing_column_is_named_beside_existing_ones(tmp_path, code, message):
    reward = load(tmp_path, code)
    with pytest.raises(ValueError) as error:
        if not reward.whole_groups:
            asyncio.run(reward.score_async(item(answer="8", level=1)))
        else:
            reward.score_all([item(answer="8", level=1)])
    assert str(error.value) == message
    assert load(tmp_path, "def f(completions, gold=None): return [1.0]").score_all([item()])[0]["score"] == 1


def test_loading_says_what_is_wrong(tmp_path):
    (tmp_path / "rewards.py").write_text("def accuracy(completions, **_): return []\ndef odd(x, y): pass\nnumber = 3\n")
    (tmp_path / "broken.py").write_text("import not_a_module_of_anyone\n")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)\n")
    for spec, error in {
        "reward.py:f": r"there is no file .*reward.py; did you mean rewards.py",
        "rewards.py:acuracy": r"no function 'acuracy'; did you mean accuracy",
        "rewards.py:odd": r"parameters \(x, y\); expected TRL's",
        "rewards.py:number": "not a function",
        "broken.py:f": "importing .*broken.py failed: ModuleNotFoundError",
        "exits.py:f": "importing .*exits.py failed: SystemExit",
        "no.such.module:f": "there is no module 'no'",
    }.items():
        with pytest.raises(ValueError, match=error):
            load_reward(spec, str(tmp_path))


def test_answer_of_prefers_verls_ground_truth():
    assert answer_of({"answer": "long", "reward_model": {"ground_truth": "1"}}) == "1"
    assert answer_of({"solution": "s", "ground_truth": "g"}) == "s"
    assert answer_of({}) is None


def test_reasoning_gym_scores_with_the_generators_own_scorer():
    gym = pytest.importorskip("reasoning_gym")
    params = {"min_terms": 2, "max_terms": 2}
    entry = gym.create_dataset("chain_sum", seed=5, size=10, **params)[3]
    columns = {"generator": "chain_sum", "params": params, "seed": 5, "size": 10, "index": 3, "answer": entry["answer"]}
    reward = load_reward("reasoning_gym/last_number", ".")
    assert reward.score_one(item(f"It is {entry['answer']}.", **columns))["score"] == 1
    assert reward.score_one(item("It is 123456789.", **columns))["score"] < 0.5
    assert reward.score_one(item("no number", **columns))["score"] == 0


@pytest.mark.parametrize("name", ["", "two\nlines", "half a pair \ud800", "x" * 5000, "a/b c", 7, None])
def test_the_name_of_an_extra_can_be_that_of_a_metric(name: object) -> None:
    (extra,) = to_result({"score": 1.0, name: 0.5})["extras"]
    assert extra == extra.encode().decode() and len(extra) <= 100
    validate({f"reward/extra/{extra}": 0.5})


def test_what_cannot_be_shown_is_an_error_all_the_same() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("an error in an error")

    assert to_result(Mute()) == {"error": "the function returned Mute (which cannot be shown), expected a number"}


# What verl gives, and functions that say little of what they take


def rewarded(function: Any, *columns: dict[str, Any]) -> list[Any]:
    items: list[Any] = [
        {"source": "s", "prompt": "p", "completion": f"c{i}", "completion_ids": [i], "columns": of}
        for i, of in enumerate(columns)
    ]
    loaded = with_signature("own.py:f", function)
    if not loaded.whole_groups:
        return [loaded.score_one(item) for item in items]
    return loaded.score_all(items)


def test_verl_s_batch_signature() -> None:
    seen: dict[str, Any] = {}

    def batch(
        data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, **kwargs: Any
    ) -> list[float]:
        seen.update(sources=data_sources, texts=solution_strs, truths=ground_truths, infos=extra_infos, more=kwargs)
        return [1.0, {"score": 0.5, "acc": 1}]  # type: ignore[list-item]

    rows = {"data_source": "gsm8k", "answer": "4", "extra_info": {"index": 3}}, {"answer": "5"}
    assert [result["score"] for result in rewarded(batch, *rows)] == [1.0, 0.5]
    assert seen["sources"] == ["gsm8k", "s"] and seen["texts"] == ["c0", "c1"] and seen["truths"] == ["4", "5"]
    assert seen["infos"][0]["index"] == 3 and seen["infos"][1]["num_turns"] == 2 and seen["more"] == {}


def test_wrappers_are_called_by_what_the_rows_have() -> None:
    def timed(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @timed
    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(solution_str == "c1") + float(ground_truth)

    @timed
    def trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(text == "c1") + float(of) for text, of in zip(completions, answer, strict=True)]

    rows = [{"answer": "4"}, {"answer": "6"}]
    assert [of["score"] for of in rewarded(trl, *rows)] == [4.0, 7.0]
    assert [of["score"] for of in rewarded(verl, *({"data_source": "x", **row} for row in rows))] == [4.0, 7.0]

    def needs(text: str, **kwargs: Any) -> float:
        return 1.0

    with pytest.raises(ValueError, match="expected TRL.*data_sources, solution_strs"):
        with_signature("own.py:needs", needs)


@pytest.mark.parametrize("score", [1e31, -1e308, 1.7e308])
def test_scores_whose_sums_overflow_are_missing(score: float) -> None:
    assert "give scores within 1e+30" in to_result(score)["error"] and to_result(1e30)["score"] == 1e30
    assert to_result({"score": 1.0, "big": score, "small": 2}) == {"score": 1.0, "extras": {"small": 2.0}}
