import builtins
import json

import pytest
from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

from rollover.rewards.registry import load_reward
from rollover.tasks.generators import CHUNK_SIZE, ReasoningGymSource
from rollover.tasks.source import FailedProblem

TINY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def make(name="chain_sum", params=TINY, seed=7):
    return ReasoningGymSource(name, params, seed, name, "reasoning_gym/last_number")


@pytest.mark.parametrize("index", [0, 3, CHUNK_SIZE - 1, CHUNK_SIZE, 10**7])
def test_a_problem_depends_on_its_index_only(index):
    first, again = make().problem(index), make().problem(index)
    assert first == again and first.task_id == f"chain_sum/7/{index}"
    assert first.prompt.startswith("State the final answer")


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic", "countdown", "list_functions"])
def test_generator_columns_are_json_and_identify_the_entry(name):
    problem = make(name, {}).problem(CHUNK_SIZE + 2)
    columns = json.loads(json.dumps(problem.columns))
    item = {"prompt": "", "completion": columns["answer"], "columns": columns, "source": name}
    reward = load_reward("reasoning_gym/full_text", ".")
    assert reward.score_one(item)["score"] == 1
    assert reward.score_one({**item, "completion": ""})["score"] < 1


def test_an_unknown_generator_suggests_names():
    with pytest.raises(ValueError, match="no generator 'chain_sums'; did you mean chain_sum"):
        make("chain_sums")


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"min_term": 2}, "min_term.*Its parameters are .*min_terms"),
        ({"min_terms": 5, "max_terms": 2}, "'chain_sum'.*refused"),
        ({"seed": 1}, "seed is set by Rollover"),
    ],
)
def test_bad_parameters_name_the_source(params, error):
    with pytest.raises(ValueError, match=f"tasks.sources.params.*{error}"):
        make(params=params)


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "reasoning_gym":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        make()


def test_parameters_whose_problems_all_fail_are_refused(monkeypatch):
    def fails(self, idx):
        raise StopIteration("no sum found")  # whatever it is, no stream may take it for its end

    monkeypatch.setattr(ChainSumDataset, "__getitem__", fails)
    with pytest.raises(ValueError, match="'chain_sum': the generator chain_sum fails with {'min_terms': 2, .* each of"):
        make()


def test_a_problem_that_cannot_be_made_is_told_by_its_name(monkeypatch):
    plain = ChainSumDataset.__getitem__

    def fails(self, idx):
        if idx == 3:
            raise RuntimeError("no sum found")
        return plain(self, idx)

    monkeypatch.setattr(ChainSumDataset, "__getitem__", fails)
    source = make()
    assert source.problem(4).task_id == "chain_sum/7/4"
    with pytest.raises(FailedProblem) as failed:
        source.problem(CHUNK_SIZE + 3)
    told = f"task chain_sum/7/{CHUNK_SIZE + 3}: the generator chain_sum with {TINY} raised RuntimeError: no sum found"
    assert str(failed.value) == told
