"""What makes two problems the same, by kind of source; and that no problem is on both sides of the split."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollover.config import RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.functions import FunctionError
from rollover.tasks.split import UNORDERED, comparison_by, generator_comparison, key_of, problem_text
from rollover.tasks.stream import TaskStream
from rollover.types import Task

ALL_SUMS = TaskSourceConfig(
    kind="reasoning_gym", name="chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
)  # 200 problems


def problem(text: str, **columns: Any) -> Task:
    return Task("rows/3", "rows", "r", prompt=text, columns=columns)


def gym(name: str, **options: Any) -> TaskSourceConfig:
    return TaskSourceConfig(kind="reasoning_gym", name=name, **options)


def file(path: Path | str = "rows.jsonl", **options: Any) -> TaskSourceConfig:
    return TaskSourceConfig(kind="dataset", path=str(path), **options)


def test_the_text_of_a_problem_has_no_case_and_no_layout() -> None:
    chat = Task("t", "s", "r", messages=({"role": "system", "content": "x"}, {"role": "user", "content": "Two  + 2\n"}))
    assert problem_text(chat) == problem_text(problem("two + 2")) == "two + 2"
    turns = ({"role": "user", "content": "2"}, {"role": "assistant", "content": "+ 2"})
    assert problem_text(Task("t", "s", "r", messages=turns)) != problem_text(problem("2\n+ 2"))
    assert problem_text(problem("2 + 3")) != problem_text(problem("3 + 2")), "a file's texts are taken as they are"


@pytest.mark.parametrize(
    ("generator", "same", "other"),
    [
        ("chain_sum", ["What is 3 + 4 =", "What is 4 + 3 ="], "What is 3 - 4 ="),
        ("chain_sum", ["7 - 2 + 5 - 3", "5 - 3 + 7 - 2", "7 - 3 - 2 + 5"], "7 - 2 - 5 + 3"),
        ("chain_sum", ["-3 + 4", "4 - 3"], "3 - 4"),
        ("chain_sum", ["-5 + 3 - -2", "3 + 2 + -5", "2 - -3 - 5"], "-5 - 3 - -2"),
        ("chain_sum", ["What is 5 - 0 =", "What is 0 + 5 ="], "What is 0 - 5 ="),
        ("decimal_chain_sum", ["1.5 + 2.25", "2.25 + 1.5"], "15 + 2.25"),
        ("products", ["5 * 9. Give", "9 * 5. Give"], "5 * 8. Give"),
        ("products", ["5 * -9 * 2", "2 * 5 * -9"], "5 * 9 * 2"),
        (
            "gcd",
            ["of these numbers: 641, 595. Give", "of these numbers: 595, 641. Give"],
            "of these numbers: 641, 59. Give",
        ),
        ("sentence_reordering", ["sentence: too, This, is", "sentence: is This, too,"], "sentence: is This, two,"),
        (
            "propositional_logic",
            [
                "Given:\n1. ((P ∧ Q) ∨ ¬(R ↔ P))\n.2. ¬R\n.What",
                "Given:\n1. ¬R\n.2. (¬(P ↔ R) ∨ (Q ∧ P))\n.What",
            ],
            "Given:\n1. ¬R\n.2. (¬(P ↔ R) ∧ (Q ∨ P))\n.What",
        ),
        ("propositional_logic", ["1. ((P ∧ Q) → R)\n.W", "1. ((Q ∧ P) → R)\n.W"], "1. (R → (P ∧ Q))\n.W"),
        ("countdown", ["make 119 of: 67, 50, 20", "make 119 of: 20, 67, 50"], "make 118 of: 67, 50, 20"),
    ],
)
def test_operands_have_no_order(generator: str, same: list[str], other: str) -> None:
    key = generator_comparison(generator)
    assert len({key(problem(text)) for text in same}) == 1
    assert key(problem(other)) != key(problem(same[0]))


@pytest.mark.parametrize("name", UNORDERED)
def test_generated_problems_of_one_key_have_one_answer(name: str) -> None:
    """Otherwise a key would be too coarse; and permuted operands have one key, or the rule would do nothing."""
    params = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    params["products"] = params["chain_sum"]
    source = gym(name, params=params.get(name, {}))
    stream = TaskStream(TasksConfig(sources=[source]), 0, "train", rewards=RewardsConfig())
    key, answers = generator_comparison(name), {}
    for task in itertools.islice(iter(stream.next, None), 20 if name == "countdown" else 100):
        text = key(Task("t", "s", "r", prompt=task.reward_prompt))  # type: ignore[arg-type]
        answer = task.columns["answer"]
        if name != "countdown":  # many expressions give its target
            assert answers.setdefault(text, answer) == answer
        assert sorted(re.findall(r"\d", text)) == sorted(
            re.findall(r"\d", problem_text(problem(str(task.reward_prompt))))
        )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return path


def both_sides(*sources: TaskSourceConfig, **options: Any) -> tuple[list[Task], list[Task]]:
    config = TasksConfig(sources=list(sources), epochs=1, **options)
    train, held = (TaskStream(config, 0, side, rewards=RewardsConfig()) for side in ("train", "eval"))
    return list(iter(train.next, None)), list(iter(held.next, None))


def test_rows_with_one_value_of_a_column_are_on_one_side(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"prompt": f"text {i}", "family": i // 5} for i in range(100)])
    trained, held = both_sides(file(rows, problem_key="family"), eval_fraction=0.3)
    families = [{t.columns["family"] for t in side} for side in (trained, held)]
    assert not families[0] & families[1] and len(trained) + len(held) == 100
    assert len(held) == 5 * len(families[1]) > 0, "every row of a held-out family is evaluated"
    plain, _ = both_sides(file(rows), eval_fraction=0.3)
    assert len({t.columns["family"] for t in plain}) == 20, "without the key families are on both sides"


@pytest.mark.parametrize("held_out_file", [False, True])
def test_a_text_with_several_keys_is_on_one_side_all_the_same(tmp_path: Path, held_out_file: bool) -> None:
    """Every text comes twice, as a row of its own family each time."""
    rows = write(tmp_path / "rows.jsonl", [{"prompt": f"text {i // 2}", "family": i} for i in range(200)])
    first = write(tmp_path / "held.jsonl", [{"prompt": f"Text {i}", "family": 1000 + i} for i in range(20)])
    # A source that is compared by its texts is mixed with one that has keys.
    texts = write(tmp_path / "texts.jsonl", [{"prompt": f"text {i}"} for i in range(100)])
    source = file(rows, problem_key="family", eval_path=str(first) if held_out_file else "")
    trained, held = both_sides(source, file(texts), eval_fraction=0.3)
    of_text = [{t.reward_prompt.casefold() for t in side} for side in (trained, held)]  # type: ignore[union-attr]
    families = [{t.columns["family"] for t in side if "family" in t.columns} for side in (trained, held)]
    assert not of_text[0] & of_text[1] and not families[0] & families[1]
    assert len(of_text[0]) > 20 and len(of_text[1]) >= 20
    assert held_out_file or len(families[1]) > 25


def test_a_row_without_a_value_is_compared_by_its_text() -> None:
    key = comparison_by("family")
    assert key(problem("A  b", family=None)) == key(problem("a b")) == "a b"
    assert key(problem("a", family=3)) == key(problem("b", family=3)) != key(problem("a", family=4))


def test_a_function_of_ones_own_says_what_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def length(task): return str(len(task.prompt))\ndef number(task): return len(task.prompt)\n"
    )
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "x" * (1 + i // 5) + str(i % 5)} for i in range(50)])
    spec = f"{tmp_path / 'mine.py'}:length"
    trained, held = both_sides(file(rows, problem_key=spec), eval_fraction=0.3, chat=False)
    lengths = [{len(t.prompt or "") for t in side} for side in (trained, held)]
    assert not lengths[0] & lengths[1] and len(held) == 5 * len(lengths[1]) > 0
    with pytest.raises(FunctionError, match="problem_key = .*returned 4 .int. for rows/3; it must return a text"):
        comparison_by(f"{tmp_path / 'mine.py'}:number")(problem("four"))


def test_a_key_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "a", "family": 1}])
    with pytest.raises(ValueError, match="has no column 'famly'; .*family.* correct tasks.sources.problem_key"):
        both_sides(file(rows, problem_key="famly"))
    with pytest.raises(ValueError, match="problem_key = 'answer': a generator has no columns"):
        both_sides(gym("chain_sum", problem_key="answer"))


@pytest.mark.parametrize(("operands_ordered", "key"), [(False, ""), (True, "id")])
def test_generated_problem_and_equal_row_are_on_one_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operands_ordered: bool, key: str
) -> None:
    """Though the hash puts the two on sides of their own, by what makes each the same as others."""
    if operands_ordered:
        monkeypatch.delitem(UNORDERED, "chain_sum")  # its problems are compared by their texts, then
    every = TaskStream(TasksConfig(sources=[ALL_SUMS], chat=False), 0, "train", rewards=RewardsConfig())
    texts = sorted({str(task.prompt) for task in itertools.islice(iter(every.next, None), 1000)})
    rows = [{"prompt": text.upper(), "id": i} for i, text in enumerate(texts) if i % 3]
    sources = [ALL_SUMS, file(write(tmp_path / "rows.jsonl", rows), problem_key=key)]
    config = TasksConfig(sources=sources, epochs=1, eval_fraction=0.3, chat=False)
    train, held = (TaskStream(config, 0, side, rewards=RewardsConfig()) for side in ("train", "eval"))
    trained, evaluated = list(itertools.islice(iter(train.next, None), 1500)), list(iter(held.next, None))
    assert not {problem_text(task) for task in trained} & {problem_text(task) for task in evaluated}
    for side in trained, evaluated:
        assert min(sum(task.source == source for task in side) for source in ("chain_sum", "rows")) > 5
    same = {key_of(generator_comparison("chain_sum")(row)) for row in trained if row.source == "rows"}
    assert held.num_on_neither_side == sum(key / 2**64 < 0.3 for key in same) > 5


def test_what_a_function_does_to_the_columns_stays_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def own(task): return str(task.columns.pop('id'))\n")
    key = comparison_by(f"{tmp_path / 'mine.py'}:own")
    task = problem("one", id=3)
    assert key(task) == key(task) == "3" and task.columns == {"id": 3}
