import collections
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

from heard import hear
from rollover.config import RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.config.load import load_config
from rollover.config.selection import RerollConfig
from rollover.tasks import stream as stream_module
from rollover.tasks.prompts import PromptSource, build_prompts
from rollover.tasks.reroll import Reroll
from rollover.tasks.source import rewarded_by
from rollover.tasks.split import generator_comparison, key_of
from rollover.tasks.stream import TaskStream
from rollover.types import Prompt

TINY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 problems


def gym(name="chain_sum", params=TINY, **options):
    return TaskSourceConfig(kind="reasoning_gym", name=name, params=params, **options)


def file(path, **options):
    return TaskSourceConfig(kind="dataset", path=str(path), **options)


def write(path, texts):
    path.write_text("".join(json.dumps({"prompt": t, "answer": "1"}) + "\n" for t in texts))
    return path


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "numbers.jsonl", [f"problem {i}" for i in range(100)])


def stream(*sources, seed=0, split="train", rewards=None, **options):
    config = TasksConfig(sources=list(sources), **options)
    return TaskStream(config, seed, split, rewards=rewards or RewardsConfig())


def draw(tasks, count):
    return list(itertools.islice(iter(tasks.next, None), count))


def texts(tasks):
    return {task.content for task in tasks}


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.9])
def test_sides_of_a_tiny_space_are_disjoint_and_all_of_it(fraction):
    held = stream(gym(), seed=3, split="eval", eval_fraction=fraction).take(1000)
    trained = texts(draw(stream(gym(), seed=4, eval_fraction=fraction), 2000))
    assert len(held) == len(texts(held)), "as many as there are"
    assert not trained & texts(held) and len(trained | texts(held)) == 200


def test_the_sides_do_not_depend_on_what_is_added_to_the_prompt(numbers):
    plain = texts(stream(file(numbers), split="eval", chat=False).take(100))
    decorated = stream(file(numbers), split="eval", system_prompt="Be brief.", instruction="Think.").take(100)
    assert {t.messages[-1]["content"].partition("\n")[0] for t in decorated} == plain


def test_prompts_are_decorated(numbers):
    task = stream(file(numbers), system_prompt="Be brief.", instruction="Think.").next()
    roles = [m["role"] for m in task.messages]
    assert roles == ["system", "user"] and task.messages[0]["content"] == "Be brief."
    assert task.messages[1]["content"].endswith("\nThink.") and task.prompt is None
    plain = stream(file(numbers), chat=False, instruction="Think.").next()
    assert plain.messages is None and plain.prompt.endswith("\nThink.")


def test_a_row_keeps_its_own_system_message(tmp_path):
    messages = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user", "assistant")]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": messages, "answer": "1"}) + "\n")
    task = stream(file(tmp_path / "chat.jsonl"), system_prompt="mine", instruction="Go.", eval_fraction=1e-9).next()
    assert [m["content"] for m in task.messages] == ["system", "user", "assistant", "user\nGo.", "assistant"]


def test_epochs_end_and_count_attempts(numbers):
    tasks = draw(stream(file(numbers), epochs=3), 10_000)
    by_attempt = collections.Counter(t.attempt for t in tasks)
    assert set(by_attempt) == {0, 1, 2} and len(set(by_attempt.values())) == 1
    assert len({(t.task_id, t.attempt) for t in tasks}) == len(tasks)
    orders = [[t.task_id for t in tasks if t.attempt == e] for e in range(3)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    held = stream(file(numbers), split="eval").take(100)
    assert len(held) + by_attempt[0] == 100 and not texts(held) & texts(tasks)


def test_sources_mix_by_weight_until_each_ends(numbers):
    tasks = draw(stream(file(numbers, weight=1), gym(weight=3)), 1000)
    assert abs(sum(t.source == "chain_sum" for t in tasks) / 1000 - 0.75) < 0.05
    ended = draw(stream(file(numbers), gym(), epochs=1), 1000)
    assert {t.source for t in ended[-500:]} == {"chain_sum"}


def test_sources_of_one_name_keep_apart(numbers):
    tasks = draw(stream(gym(), gym(params={}), file(numbers, name="chain_sum")), 300)
    assert {t.source for t in tasks} == {"chain_sum", "chain_sum#2", "chain_sum#3"}
    assert len({t.task_id for t in tasks}) == len({(t.task_id, t.content) for t in tasks})


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 99), taken=st.integers(0, 80), split=st.sampled_from(["train", "eval"]))
def test_a_restored_stream_goes_on_exactly(numbers, seed, taken, split):
    def make():
        return stream(file(numbers, weight=2), gym(), seed=seed, split=split, epochs=2, eval_fraction=0.3)

    whole = draw(make(), 150)
    first = make()
    assert draw(first, taken) == whole[:taken]
    state = json.loads(json.dumps(first.state_dict()))
    second = make()
    second.load_state_dict(state)
    assert draw(second, 150 - taken) == draw(first, 150 - taken) == whole[taken:]


def test_the_train_state_stays_small():
    tasks = stream(gym())
    draw(tasks, 500)
    assert len(json.dumps(tasks.state_dict())) < 250


def test_a_state_of_other_sources_is_refused(numbers):
    with pytest.raises(ValueError, match="chain_sum.*numbers.*use the same"):
        stream(gym()).load_state_dict(stream(file(numbers)).state_dict())


def test_problems_of_an_eval_file_are_not_trained(tmp_path):
    train = write(tmp_path / "train.jsonl", [f"problem {i}" for i in range(50)])
    held = write(tmp_path / "held.jsonl", [f"problem {i}" for i in range(40, 60)] + ["problem 41"])
    source = file(train, eval_path=str(held))
    trained, evaluated = draw(stream(source, epochs=1), 100), stream(source, split="eval").take(100)
    assert texts(trained) == {f"user: problem {i}" for i in range(40)}
    assert len(evaluated) == 20 and texts(evaluated) == {f"user: problem {i}" for i in range(40, 60)}
    assert not {t.task_id for t in trained} & {t.task_id for t in evaluated}


def test_held_out_file_with_all_problems_is_named(tmp_path):
    one = write(tmp_path / "one.jsonl", ["problem 0", "problem 1"])
    with pytest.raises(ValueError, match=r"eval_path = '.*one.jsonl' has every problem of 'one'") as error:
        stream(file(one, eval_path=str(one)), eval_fraction=0.0).next()
    assert "Lower it" not in str(error.value)


def test_an_empty_side_is_an_error_that_names_the_keys(tmp_path):
    one = write(tmp_path / "one.jsonl", ["problem 0"])
    with pytest.raises(ValueError, match="tasks.eval_fraction = 1e-09 holds no problem out.*eval.num_tasks"):
        stream(file(one), split="eval", eval_fraction=1e-9).take(5)
    with pytest.raises(ValueError, match="tasks.eval_fraction = 0.999999 leaves no problem of 'one'"):
        stream(file(one), eval_fraction=0.999999).next()
    with pytest.raises(ValueError, match="leaves no problem of 'chain_sum'.*10000 in a row"):
        stream(gym(), eval_fraction=1 - 1e-9).next()


def test_sources_are_checked():
    for sources, error in [
        ([], "tasks.sources is empty"),
        ([TaskSourceConfig(kind="dataset")], r"tasks.sources\[0\].path is not set"),
        ([TaskSourceConfig(kind="reasoning_gym")], r"tasks.sources\[0\].name is not set"),
    ]:
        with pytest.raises(ValueError, match=error):
            stream(*sources)


def test_tasks_carry_their_reward(numbers):
    assert stream(gym(answer_rule="boxed")).next().reward == "reasoning_gym/boxed"
    assert stream(file(numbers), answer_rule="last_line").next().reward == "exact_match/last_line"
    assert stream(file(numbers), rewards=RewardsConfig(function="my:f")).next().reward == "my:f"


def test_saved_task_gets_the_configured_reward(numbers):
    """A checkpoint may come from somebody else: what it says of rewards is not run."""
    own = stream(file(numbers, reward="mine.py:f"))
    task = own.next()
    assert task.reward == "mine.py:f" and rewarded_by(task, own.setups) == task
    for forged in ("evil.py:f", 'functions/[{"function": "evil.py:f"}]', 'llm_judge/{"url": "http://evil"}'):
        assert rewarded_by(replace(task, reward=forged), own.setups) == task
        with pytest.raises(ValueError, match="no source has the reward"):
            rewarded_by(replace(task, source="other", reward=forged), own.setups)
    assert rewarded_by(replace(task, source="other"), own.setups).reward == "mine.py:f"


def test_saved_tasks_are_rewarded_again_but_for_before_produce(numbers):
    own = stream(file(numbers, reward="mine.py:f"))
    task = own.next()
    forged = replace(task, reward="evil.py:f")
    assert PromptSource(own, lambda of: Prompt((1,)), 9).rewarded(forged) == task
    assert PromptSource(own, lambda of: Prompt((1,)), 9, lambda of, version: of).rewarded(forged) == forged
    reroll = Reroll(RerollConfig(max_groups=1, size=4), 9, lambda: None)
    reroll.load_state_dict({**reroll.state_dict(), "queue": [[forged.to_json(), [1]]]}, 9)
    reroll.change_tasks(PromptSource(own, lambda of: Prompt((1,)), 9).rewarded)
    assert reroll.state_dict()["queue"][0][0]["reward"] == "mine.py:f"


def test_the_split_is_the_documented_hash():
    same = generator_comparison("chain_sum")
    for task in stream(gym(), split="eval", chat=False, eval_fraction=0.25).take(30):
        assert key_of(same(task)) / 2**64 < 0.25


# Generators that fail


@pytest.fixture
def failing(monkeypatch):
    """Offsets for which the generator fails, as a function that may be changed."""
    which = [lambda offset: offset % 3 == 1]
    plain = ChainSumDataset.__getitem__

    def fails(self, idx):
        if which[0](idx):
            raise RuntimeError("no sum found")
        return plain(self, idx)

    monkeypatch.setattr(ChainSumDataset, "__getitem__", fails)
    return which


@pytest.mark.parametrize("split", ["train", "eval"])
def test_failed_problem_is_skipped_counted_and_logged(failing, split):
    whole, said = stream(gym(params={}), split=split), hear([])
    tasks = draw(whole, 30)
    indices = [int(task.task_id.rpartition("/")[2]) for task in tasks]
    assert len(tasks) == 30 and all(index % 3 != 1 for index in indices)
    assert whole.num_failed == sum(index % 3 == 1 for index in range(indices[-1]))
    first = tasks[0].task_id.rpartition("/")[0] + "/1"
    told = f"task {first}: the generator chain_sum with {{}} raised RuntimeError: no sum found: it is left out"
    assert said[0] == told and len(said) == 10 and said[-1].endswith("more of them are only counted, in tasks/failed")
    again = stream(gym(params={}), split=split)
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert draw(again, 10) == draw(whole, 10) and again.num_failed == whole.num_failed


def test_generator_that_only_fails_ends_the_stream(failing, monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_FAILED", 30)
    tasks = stream(gym(params={}))
    draw(tasks, 5)
    failing[0] = lambda offset: True
    with pytest.raises(
        ValueError, match=r"chain_sum with \{\} raised RuntimeError: no sum found. So did the 29 problems"
    ):
        tasks.next()


FAILING = """
from rollover.tasks.source import FailedProblem
from rollover.types import Task

class Source:
    def __init__(self, setup):
        self.setup = setup

    def __len__(self):
        return 5

    def problem(self, index):
        if index not in self.setup.config.params["whole"]:
            raise FailedProblem(f"number {index} has no text")
        return Task(f"own/{index}", self.setup.label, self.setup.reward, prompt="the only one")
"""


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_source_whose_problems_all_fail_is_told_so(tmp_path, split):
    (tmp_path / "own.py").write_text(FAILING)
    source = TaskSourceConfig(kind=f"{tmp_path}/own.py:Source", name="own", params={"whole": []})
    with pytest.raises(ValueError) as error:
        stream(source, split=split).take(1)
    assert str(error.value).startswith("tasks.sources: no problem of 'own' can be used: all of 5 in a row failed, the")
    assert "has no text. Fix the source" in str(error.value) and "held out" not in str(error.value)


def test_failed_problems_are_not_said_to_be_held_out(tmp_path):
    (tmp_path / "own.py").write_text(FAILING)
    source = TaskSourceConfig(kind=f"{tmp_path}/own.py:Source", name="own", params={"whole": [2]})
    with pytest.raises(ValueError, match="of 5 in a row 4 failed, and all others are held out. Lower it"):
        stream(source, eval_fraction=0.999999).take(1)


def test_source_of_weight_0_is_only_evaluated(tmp_path, numbers):
    bench = write(tmp_path / "bench.jsonl", ["problem 3", "PROBLEM  4", "problem of its own"])
    sources = [file(numbers), file(bench, weight=0.0), gym(weight=0.0)]
    held = stream(*sources, split="eval", chat=False).take(1000)
    of_bench = [task for task in held if task.source == "bench"]
    assert {t.content for t in of_bench} == {"problem 3", "PROBLEM  4", "problem of its own"}
    assert {task.source for task in held} == {"bench", "numbers", "chain_sum"}
    tasks = stream(*sources, epochs=1, chat=False)
    trained = draw(tasks, 1000)
    assert {task.source for task in trained} == {"numbers"}, "and it comes to its end"
    assert not {"problem 3", "problem 4"} & {task.content for task in trained}
    others = {task.content for task in held if task.source == "numbers"}
    assert len(trained) == 100 - 2 - len(others - {"problem 3", "problem 4"})
    again = stream(*sources, epochs=1)
    again.load_state_dict(tasks.state_dict())
    assert again.next() is None


def test_a_run_that_trains_no_source_is_refused(tmp_path, numbers):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[[tasks.sources]]\nkind = "dataset"\npath = "{numbers}"\nweight = 0.0\n')
    with pytest.raises(ValueError, match="every source has weight = 0"):
        build_prompts(load_config([recipe], []).config)
