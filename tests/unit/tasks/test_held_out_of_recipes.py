"""Of every recipe that comes with the package: what is held out is not trained, whatever the order of its operands."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from rollover.config import Config
from rollover.config.load import load_config
from rollover.config.recipes import recipes
from rollover.rewards.answers import answer_of
from rollover.tasks.split import SplitName, problem_text
from rollover.tasks.stream import TaskStream
from rollover.types import Task

NUM_TRAINED, NUM_HELD_OUT = 200, 64


def of_the_hub(config: Config) -> list[str]:
    """Data sets whose rows are not on this machine."""
    named = [path for s in config.tasks.sources if s.kind == "dataset" for path in (s.path, s.eval_path)]
    return [path for path in named if path and not Path(path).exists()]


# Their tasks cannot be made here: they are data sets of the hub.
NOT_CHECKED = {
    "apr_qwen3_4b_2node": ["open-r1/DAPO-Math-17k-Processed"],
    "dapo_qwen2.5_32b": ["BytedTsinghua-SIA/DAPO-Math-17k", "BytedTsinghua-SIA/AIME-2024"],
}
CHECKED = {}
for _name, _path in recipes().items():
    _config = load_config([_path]).config
    if not of_the_hub(_config):
        CHECKED.setdefault(_config.tasks.model_dump_json(), (_config, []))[1].append(_name)
ids = [" ".join(names) for _, names in CHECKED.values()]


def looks(task: Task) -> tuple[str, ...]:
    """The answer and the words, in no order: another comparison than the split's own."""
    return (str(answer_of(task.columns)), *sorted(re.findall(r"\w+|[^\w\s]", problem_text(task))))


def drawn(config: Config, side: SplitName) -> list[Task]:
    seed = config.run.seed if side == "train" else config.eval.seed
    stream = TaskStream(config.tasks, seed, side, rewards=config.rewards)
    return list(itertools.islice(iter(stream.next, None), NUM_TRAINED if side == "train" else NUM_HELD_OUT))


def test_every_recipe_is_checked_or_its_data_sets_are_named() -> None:
    checked = {name for _, names in CHECKED.values() for name in names}
    left = {name: of_the_hub(load_config([path]).config) for name, path in recipes().items() if name not in checked}
    assert left == NOT_CHECKED


@pytest.mark.parametrize(("config", "names"), CHECKED.values(), ids=ids)
def test_no_held_out_problem_is_trained(config: Config, names: list[str]) -> None:
    trained, held_out = drawn(config, "train"), drawn(config, "eval")
    assert len(trained) == NUM_TRAINED and len(held_out) > 8, names
    seen = {looks(task) for task in trained}
    assert [task.content for task in held_out if looks(task) in seen] == []


def test_the_comparison_sees_a_twin() -> None:
    one, other = (
        Task("a", "chain_sum", "exact_match", prompt=text, columns={"answer": "7"}) for text in ("3 + 4 =", "4 + 3 =")
    )
    assert looks(one) == looks(other)
