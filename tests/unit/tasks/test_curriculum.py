"""Curricula over a real stream: what is given how often, what is remembered, and that it goes on exactly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from heard import hear
from rollover.algorithms.filters import pass_rate_of
from rollover.config import Config
from rollover.config.load import load_config
from rollover.functions import FunctionError
from rollover.tasks.curriculum import Curriculum, build_curriculum
from rollover.tasks.stream import TaskStream
from rollover.types import Group, Prompt, Task
from samples import group, rollout, segment

ROWS = [{"prompt": f"problem {i}", "answer": "1", "rate": i / 10, "info": {"level": i % 3}} for i in range(11)]


def write(folder: Path, curriculum: str, tasks: str = "", sources: str = "") -> Config:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = f'[[tasks.sources]]\nkind = "dataset"\npath = {json.dumps(str(folder / "rows.jsonl"))}\n'
    head = f"[tasks]\neval_fraction = 1e-9\n{tasks}\n[tasks.curriculum]\n{curriculum}\n"
    (folder / "a.toml").write_text(head + (sources or data))
    return load_config([folder / "a.toml"]).config


def build(config: Config) -> tuple[TaskStream, Curriculum]:
    curriculum = build_curriculum(config)
    assert curriculum is not None
    stream = TaskStream(config.tasks, config.run.seed, "train", rewards=config.rewards, curriculum=curriculum)
    return stream, curriculum


def scored(task: Task, group_id: int = 0) -> Group:
    return Group(group_id, task, Prompt((1,)), [])


def visit(stream: TaskStream, curriculum: Curriculum, rates: dict[int, float], num: int = 11) -> None:
    """A step in which so many tasks are given, and scored with the pass rate of their row, else 0.5."""
    for i, task in enumerate(stream.take(num)):
        curriculum.saw(scored(task, i), rates.get(row(task), 0.5))
    curriculum.on_step(1)


def row(task: Task) -> int:
    return int(task.task_id.rpartition("/")[2])


def counts(stream: TaskStream, num: int) -> Counter[int]:
    return Counter(map(row, stream.take(num)))


EASY_AND_HARD = {**dict.fromkeys((0, 1, 2), 1.0), **dict.fromkeys((3, 4, 5), 0.0)}


@pytest.mark.parametrize(
    ("curriculum", "easy", "hard"),
    [
        ('kind = "buckets"\neasy_weight = 0.25\nhard_weight = 0.5', 0.25, 0.5),
        ('kind = "buckets"\neasy_weight = 0.0\nhard_weight = 1.0', 0.0, 1.0),
        ('kind = "variance"\nmin_weight = 0.2', 0.2, 0.2),
    ],
)
def test_a_task_is_given_with_its_weight(tmp_path: Path, curriculum: str, easy: float, hard: float) -> None:
    stream, of = build(write(tmp_path, curriculum))
    visit(stream, of, EASY_AND_HARD)
    given = counts(stream, 2500)
    usual = sum(given[i] for i in range(6, 11)) / 5
    assert sum(given[i] for i in range(3)) / 3 == pytest.approx(easy * usual, rel=0.12)
    assert sum(given[i] for i in range(3, 6)) / 3 == pytest.approx(hard * usual, rel=0.12)
    assert of.metrics()["curriculum/passed_over"] > 0


def test_variance_weighs_by_p_times_1_minus_p(tmp_path: Path) -> None:
    stream, of = build(write(tmp_path, 'kind = "variance"\nmin_weight = 0.0'))
    visit(stream, of, {0: 0.25, 1: 0.125})
    given = counts(stream, 4000)
    usual = sum(given[i] for i in range(2, 11)) / 9
    assert given[0] / usual == pytest.approx(0.75, rel=0.12)
    assert given[1] / usual == pytest.approx(4 * 0.125 * 0.875, rel=0.12)


def test_thresholds_say_what_is_easy_and_hard(tmp_path: Path) -> None:
    stream, of = build(write(tmp_path, 'kind = "buckets"\neasy_from = 0.75\nhard_to = 0.25'))
    visit(stream, of, {0: 0.75, 1: 0.74, 2: 0.25, 3: 0.26})
    metrics = of.metrics()
    assert [metrics[f"curriculum/{b}"] for b in ("known", "easy", "normal", "hard")] == [11, 1, 9, 1]
    assert metrics["curriculum/pass_rate"] == pytest.approx((0.75 + 0.74 + 0.25 + 0.26 + 7 * 0.5) / 11)


def test_a_task_is_easy_after_so_many_visits_in_a_row(tmp_path: Path) -> None:
    text = 'kind = "buckets"\neasy_weight = 0.0\nvisits_in_row = 3'
    stream, of = build(write(tmp_path, text, tasks="shuffle = false"))
    for rate in (1.0, 1.0, 0.5, 1.0, 1.0):  # it was not three times in a row so far
        visit(stream, of, {0: rate})
        assert of.metrics()["curriculum/easy"] == 0
    visit(stream, of, {0: 1.0})
    assert of.metrics()["curriculum/easy"] == 1 and 0 not in counts(stream, 100)


def test_decay_remembers_earlier_visits(tmp_path: Path) -> None:
    stream, of = build(write(tmp_path, 'kind = "variance"\ndecay = 0.75\nmin_weight = 0.99999'))
    for rate in (1.0, 0.0):
        visit(stream, of, dict.fromkeys(range(11), rate))
    assert of.metrics()["curriculum/pass_rate"] == pytest.approx(0.75)


def test_a_column_gives_pass_rates_before_the_first_visit(tmp_path: Path) -> None:
    """As data sets are filtered before a run: only what is solved now and then is given."""
    text = (
        'kind = "buckets"\nprior_column = "rate"\neasy_from = 0.8\nhard_to = 0.2\neasy_weight = 0.0\nhard_weight = 0.0'
    )
    stream, of = build(write(tmp_path, text))
    assert set(counts(stream, 200)) == {3, 4, 5, 6, 7}
    of.on_step(1)
    assert of.metrics()["curriculum/given_pass_rate"] == pytest.approx(0.5, abs=0.02)
    assert of.metrics()["curriculum/known"] == 0, "nothing was visited"


def test_a_visit_counts_instead_of_the_prior(tmp_path: Path) -> None:
    text = 'kind = "variance"\nprior_column = "rate"\nmin_weight = 0.0\ndecay = 0.9'
    stream, of = build(write(tmp_path, text))
    of.saw(scored(next(t for t in stream.take(99) if row(t) == 9)), 0.5)
    of.on_step(1)
    given = counts(stream, 4000)
    assert given[9] / given[5] == pytest.approx(1.0, rel=0.15) and not given[0] and not given[10]


GENERATOR = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'
GENERATORS = "".join(f"{GENERATOR}params = {{ min_digits = {n}, max_digits = {n} }}\n" for n in (1, 2, 3))


def test_sources_are_mixed_by_their_pass_rates(tmp_path: Path) -> None:
    """Levels of a generator, which never gives a task twice: the one that is solved makes room."""
    text = 'kind = "variance"\nby = "source"\nmin_weight = 0.1\ndecay = 0.5'
    stream, of = build(write(tmp_path, text, sources=GENERATORS))
    tasks = {task.source: task for task in stream.take(50)}
    for i, (label, rate) in enumerate(zip(sorted(tasks), (1.0, 0.5, 0.0), strict=True)):
        of.saw(scored(tasks[label], i), rate)
    of.on_step(1)
    given = Counter(task.source for task in stream.take(2400))
    assert [given[label] / 2400 for label in sorted(tasks)] == pytest.approx([1 / 12, 10 / 12, 1 / 12], abs=0.03)


def test_where_nothing_better_comes_the_best_is_given(tmp_path: Path) -> None:
    text = 'kind = "buckets"\nprior_column = "rate"\neasy_from = 0.05\neasy_weight = 0.001\nhard_weight = 0.0'
    stream, _ = build(write(tmp_path, text))
    assert len(stream.take(30)) == 30 and 0 not in counts(stream, 100)


def test_where_every_weight_is_0_the_tasks_are_used_up(tmp_path: Path) -> None:
    text = 'kind = "buckets"\neasy_weight = 0.0'
    config = write(tmp_path, text)
    stream, of = build(config)
    said: list[str] = hear([])
    visit(stream, of, dict.fromkeys(range(11), 1.0))
    assert stream.next() is None and "no problem of rows is given any more" in said[0]
    same, now = build(config)
    now.load_state_dict(json.loads(json.dumps(of.state_dict())))
    same.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert same.next() is None
    other, now = build(write(tmp_path, 'kind = "buckets"\neasy_weight = 0.5'))
    now.load_state_dict(of.state_dict())
    other.load_state_dict(stream.state_dict())
    assert other.next() is not None, "with another weight there are some again"


def test_pass_rates_change_at_the_end_of_a_step(tmp_path: Path) -> None:
    """However the scores come in: what is given next does not depend on it."""
    config = write(tmp_path, 'kind = "variance"\ndecay = 0.5\nby = "info.level"')
    ends = []
    for order in (range(11), reversed(range(11))):
        stream, of = build(config)
        tasks = stream.take(11)
        for i in order:
            of.saw(scored(tasks[i], i), row(tasks[i]) / 10)
            assert of.metrics()["curriculum/known"] == 0
        of.on_step(1)
        ends.append([t.task_id for t in stream.take(100)])
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "text", ['kind = "variance"\ndecay = 0.3', 'kind = "buckets"\nvisits_in_row = 2', 'kind = "OWN:Learns"']
)
def test_it_goes_on_exactly_from_its_state(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = write(tmp_path, text.replace("OWN", str(tmp_path / "own.py")))
    one, other = build(config), build(config)
    rates = {i: i / 10 for i in range(11)}
    for _ in range(3):
        visit(*one, rates, 7)
    for i, task in enumerate(one[0].take(5)):  # in the middle of a step
        one[1].saw(scored(task, i), 1.0)
    other[0].load_state_dict(json.loads(json.dumps(one[0].state_dict())))
    other[1].load_state_dict(json.loads(json.dumps(one[1].state_dict(), sort_keys=True)))
    for stream, of in (one, other):
        of.on_step(4)
        visit(stream, of, rates, 7)
    assert one[1].metrics() == other[1].metrics()
    assert [t.task_id for t in one[0].take(50)] == [t.task_id for t in other[0].take(50)]
    assert one[1].state_dict() == other[1].state_dict()


OWN = """
class OddOnly:
    def __init__(self, config):
        self.config = config

    def weight(self, task, seen):
        return float(int(task.columns["rate"] * 10) % 2 and (seen is None or seen.pass_rate < 1))


class Learns:
    def __init__(self, config):
        self.solved = 0

    def weight(self, task, seen):
        return 1 / (1 + self.solved * (seen is not None))

    def update(self, visits, version):
        self.solved += sum(visit.pass_rate == 1.0 for visit in visits)

    def state_dict(self):
        return {"solved": self.solved}

    def load_state_dict(self, state):
        self.solved = state["solved"]


class Above(OddOnly):
    def weight(self, task, seen):
        return 2.0


class Nothing:
    def __init__(self, config):
        pass


class Forgets(OddOnly):
    def update(self, visits, version):
        pass
"""


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    stream, of = build(write(tmp_path, f'kind = "{tmp_path}/own.py:OddOnly"'))
    assert set(counts(stream, 50)) == {1, 3, 5, 7, 9}
    visit(stream, of, {1: 1.0})
    assert set(counts(stream, 50)) == {3, 5, 7, 9}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Above", "returned 2.0 \\(float\\) for rows/.*it must return a number from 0 to 1"),
        ("Nothing", "returned a Nothing without a method weight"),
        ("Forgets", "update, state_dict and load_state_dict go together"),
    ],
)
def test_a_class_that_is_none_is_refused(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(FunctionError, match=what):
        build(write(tmp_path, f'kind = "{tmp_path}/own.py:{name}"'))[0].next()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            'prior_column = "nothing"',
            "prior_column = 'nothing': task rows/.* has no such column; its columns are answer,",
        ),
        ('prior_column = "info.level"', "has 2 there; expected a pass rate from 0 to 1"),
        ('by = "info.nothing"', "by = 'info.nothing': task rows/.* has no such column"),
    ],
)
def test_a_column_that_is_not_there_is_named(tmp_path: Path, text: str, what: str) -> None:
    stream, _ = build(write(tmp_path, f'kind = "variance"\n{text}'))
    with pytest.raises(ValueError, match=what):
        stream.take(11)


def test_a_group_whose_step_was_rolled_back_is_a_visit_once(tmp_path: Path) -> None:
    stream, of = build(write(tmp_path, 'kind = "variance"\ndecay = 0.5'))
    first, second = (scored(task, i) for i, task in enumerate(stream.take(2)))
    of.saw(first, 1.0)
    of.on_step(1)
    of.on_roll_back([first.group_id])
    of.saw(first, 1.0)
    of.saw(second, 1.0)
    of.on_step(1)
    assert [visits for _, visits, _, _ in of.state_dict()["seen"].values()] == [1, 1]


def test_tasks_that_never_come_again_are_not_remembered(tmp_path: Path) -> None:
    stream, of = build(write(tmp_path, 'kind = "variance"\nprior_column = "rate"', tasks="epochs = 1"))
    visit(stream, of, {}, 5)
    assert of.metrics()["curriculum/known"] == 0


def test_the_pass_rate_of_a_group() -> None:
    def of(*scores: float | None) -> float | None:
        rollouts = [rollout(0, i, score, [segment([1])]) for i, score in enumerate(scores)]
        return pass_rate_of(group(0, rollouts), threshold=0.5, metric="score")

    found: list[Any] = [of(1.0, 0.5, 0.4, None), of(None, None), of(0.0)]
    assert found == [2 / 3, None, 0.0]
