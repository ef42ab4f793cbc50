"""Custom functions: loading, their errors in one line, and live objects."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from fake_engine import FakeEngine
from local_trainer import build_batch
from rollover import registry
from rollover.algorithms.filters import group_filters
from rollover.algorithms.loss import TokenBatch
from rollover.config import AlgorithmConfig, Config, FiltersConfig, TasksConfig, TaskSourceConfig
from rollover.config.backend import BACKENDS
from rollover.config.rollout import ENVIRONMENTS
from rollover.config.schema import leaves
from rollover.config.tasks import SOURCES
from rollover.config.train import ENGINES
from rollover.functions import (
    Causes,
    CustomFunction,
    FunctionError,
    as_json,
    custom_function,
    described,
    explained,
    load_function,
)
from rollover.live_objects import hold, is_live, live_object, name_of, release
from rollover.rollout.order import RolloutView, load_order
from rollover.run.producer import CustomProducer
from rollover.run.step_log import custom_metrics
from rollover.tasks.prompts import TASK_OR_NONE, PromptSource, encoder
from rollover.trainer.objective import Objective
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task

# The user's own functions: a file is run once, and again if it was changed. And the built-in ones, by name


COUNTS = "calls = []\ndef add(x):\n    calls.append(x)\n    return list(calls)\ndef seen():\n    return list(calls)\n"


def test_functions_of_one_file_share_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(COUNTS)
    assert load_function("mine.py:add", str(tmp_path))(1) == [1]
    monkeypatch.chdir(tmp_path)
    assert load_function("mine.py:add", ".")(2) == [1, 2], "the same file by another path"
    assert load_function(f"{tmp_path / 'mine.py'}:seen", "/")() == [1, 2]


@pytest.mark.parametrize("spec", ["mine", "mine.py", "mine.py:", ":f"])
def test_a_name_without_a_function_is_told_so(spec: str) -> None:
    with pytest.raises(ValueError, match=f"^'{spec}' is neither module:function nor path.py:function$"):
        load_function(spec, ".")


def test_a_file_that_was_changed_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(): return 1\n")
    assert load_function("mine.py:f", str(tmp_path))() == 1
    file.write_text("def f(): return 23\n")
    assert load_function("mine.py:f", str(tmp_path))() == 23
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    first, second = (load_function("mine.py:f", str(tmp_path)) for _ in range(2))
    assert first is second


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def f(): return {name!r}\n")
    assert [load_function("mine.py:f", str(tmp_path / name))() for name in ("a", "b", "a")] == ["a", "b", "a"]


def test_a_file_that_failed_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import missing_module_of_mine\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="importing .*mine.py failed: ModuleNotFoundError"):
            load_function("mine.py:f", str(tmp_path))


BUILT_IN = {**ENGINES, **ENVIRONMENTS, **BACKENDS, **{kind: about.make for kind, about in SOURCES.items()}}


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_built_in_name_stands_for_is_there(name: str) -> None:
    assert callable(load_function(BUILT_IN[name], "."))


def cancels_at_once() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancels_itself() -> None:
    cancels_at_once()
    await asyncio.sleep(60)


@pytest.mark.parametrize("function", [cancels_at_once, cancels_itself])
def test_a_function_that_cancels_itself_failed_and_who_awaits_it_goes_on(function) -> None:
    async def run() -> str:
        with pytest.raises(FunctionError, match="run.hooks = 'mine' failed: CancelledError"):
            await CustomFunction(function, "run.hooks", "mine", "nothing").awaited()
        await asyncio.sleep(0)
        return "goes on"

    assert asyncio.run(run()) == "goes on"


def test_who_awaits_a_function_can_be_cancelled_with_it() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")

    async def run() -> None:
        task = asyncio.ensure_future(CustomFunction(waits, "run.hooks", "mine", "nothing").awaited())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and ended == ["waits"]

    asyncio.run(run())


class Speechless(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


def test_an_error_or_a_value_that_cannot_be_shown_exits_nobody() -> None:
    assert explained(Speechless()) == "Speechless"
    assert described(Speechless()) == "(which cannot be shown) (Speechless)"


def test_of_an_error_of_megabytes_only_the_beginning_is_looked_at() -> None:
    class Text(str):
        def split(self, *args: Any) -> Any:
            assert len(self) < 10_000
            return super().split(*args)

        def __getitem__(self, at: Any) -> Any:
            return Text(super().__getitem__(at))

        def __format__(self, how: str) -> Any:
            assert len(self) < 10_000
            return super().__format__(how)

    class Long(Exception):
        def __str__(self) -> str:
            return Text("x y\n" * 10**6)

    assert explained(Long()).startswith("Long: x y x y") and len(explained(Long())) == 500


def test_a_cause_is_new_once_and_random_texts_come_to_an_end() -> None:
    causes = Causes()
    assert [causes.is_new(text) for text in ("at 3 s", "at 12 s", "at sea", "at sea")] == [True, False, True, False]
    assert sum(causes.is_new("x" * num) for num in range(1, 500)) < 30


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def taken(levels: int) -> bool:
    try:
        as_json(nested(levels), "it")
    except ValueError:
        return False
    return True


def written_in(num_calls: int, text: str) -> str:
    """Read and written again, as part of more, by a program that is in so many calls."""
    return written_in(num_calls - 1, text) if num_calls else json.dumps({"groups": [{"kept": json.loads(text)}]})


def test_what_is_only_just_taken_can_be_written_and_read_deeper_in_the_program() -> None:
    most = bisect.bisect_left(range(5001), True, key=lambda levels: not taken(levels)) - 1
    assert most > 200
    assert written_in(50, json.dumps(nested(most)))


# A function of the user's own that raises or returns the wrong thing: one line that says which, where, and what was
# expected; the same for every kind of function


TASK = Task("t0", "test", "reward", prompt="1 + 1 =")
HEAD = "import torch\ndef helper(x):\n    raise KeyError('absent')\n"


def group() -> Group:
    def segment() -> Segment:
        ids = torch.tensor([5, 6], dtype=torch.int32).numpy()
        return Segment(ids, torch.tensor([-1.0, -1.0]).numpy(), 0, SamplingParams(), StopReason.EOS)

    rollouts = [Rollout(0, i, TASK, [segment()], RolloutState.READY) for i in range(2)]
    for i, rollout in enumerate(rollouts):
        rollout.reward = Reward(float(i))
    return Group(0, TASK, Prompt((1, 2)), rollouts)


class Stream:
    def next(self) -> Task:
        return TASK

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def producer(spec: str) -> Any:
    config = Config(tasks=TasksConfig(producer=spec))
    return asyncio.run(CustomProducer(config, tiny.tokenizer(), FakeEngine({})).produce(1, 0))


# option -> (parameters, a caller of what it names, what is expected, bodies that are wrong and what is said of them)
VIEW = RolloutView("0-0", 0, 0, 1, 2, 0, 0)
SCALAR, SHORT = "return 0.5", "return torch.zeros(1)"
KINDS: dict[str, tuple[str, Callable[[str], Any], str, dict[str, str]]] = {
    "algorithm.advantage": (
        "rewards, groups",
        lambda spec: build_batch([group()], AlgorithmConfig(advantage=spec)),
        "one finite advantage for each reward",
        {
            "return None": "returned None",
            SCALAR: "returned 0.5 (float) for 2 rollouts",
            "return rewards.sum()": "returned a single number, 1.0 for 2 rollouts",
            SHORT: "of the shape [1] for 2 rollouts",
            "return rewards * float('nan')": "returned nan at 2 of 2 rollouts",
            "return 'high'": "returned 'high' (str)",
        },
    ),
    "algorithm.after_scoring": (
        "rollouts, advantages",
        lambda spec: build_batch([group()], AlgorithmConfig(after_scoring=spec)),
        "None, or one finite advantage for each of the rollouts",
        {
            SHORT: "of the shape [1] for 2 rollouts",
            "advantages[0] = float('inf')": "returned inf at 1 of 2 rollouts",
        },
    ),
    "algorithm.loss": (
        "t",
        lambda spec: Objective(AlgorithmConfig(loss=spec), 16),
        "two tensors of the shape of t.mask_BT: the loss of each token",
        {
            "return None": "returned None",
            "return t.logprobs_BT": "returned a Tensor of the shape [2, 3]",
            "return t.logprobs_BT.sum(), t.mask_BT": "returned a loss of the shape []",
            "return (t.logprobs_BT,)": "returned 1 values",
            "return t.logprobs_BT.log(), t.mask_BT": "returned a loss that is nan at 5 of 5 tokens",
            "return t.logprobs_BT.detach(), t.mask_BT": "returned a loss without a gradient",
            "return t.logprobs_BT, 0.0": "2 values: a Tensor of the shape [2, 3], 0.0 (float)",
            "return None, t.mask_BT": "2 values: None, a Tensor of the shape [2, 3]",
            "return t.logprobs_BT, t.mask_BT[0]": "returned the clipped tokens of the shape [3]",
        },
    ),
    "filters.custom": (
        "group",
        lambda spec: group_filters(FiltersConfig(custom=spec))[0].why(group()),
        "a text that says why to drop the group, or None",
        {
            "return True": "returned True (bool)",
            "return float('nan')": "returned nan (float)",
            "import asyncio; raise asyncio.CancelledError": "failed: CancelledError",
        },
    ),
    "track.metrics": (
        "groups",
        lambda spec: custom_metrics(spec)([group()]),
        "a number for each name",
        {
            "return None": "returned None",
            "return {'a': 'high'}": "returned 'high' (str) for 'a'",
            "return {'a': True}": "returned True (bool) for 'a'",
            "return {1: 2.0}": "returned 2.0 (float) for 1",
            "return {'a\\nb': 2.0}": "returned 2.0 (float) for 'a\\nb'",
            "return {'a': 10**400}": "failed: OverflowError",
        },
    ),
    "rollout.order": (
        "view",
        lambda spec: load_order(spec)(VIEW),
        "a tuple of integers",
        {
            "return None": "returned None",
            "return 3": "returned 3 (int)",
            "return (1, 'a')": "returned (1, 'a')",
        },
    ),
    "tasks.before_produce": (
        "task, version",
        lambda spec: PromptSource(
            Stream(),  # type: ignore[arg-type]
            encoder(tiny.tokenizer()),
            100,
            custom_function("tasks.before_produce", spec, TASK_OR_NONE),
        )(),
        "the Task to use, or None",
        {"return 'task'": "returned 'task' (str) for t0"},
    ),
}
CASES = [
    pytest.param(option, body, said, id=f"{option}: {body}")
    for option, (*_, wrong) in KINDS.items()
    for body, said in {"helper(1)": "failed: KeyError: 'absent' (mine.py:3)", **wrong}.items()
]


@pytest.mark.parametrize(("option", "body", "said"), CASES)
def test_one_line_says_which_where_and_what_expected(option: str, body: str, said: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters, call, expected, _ = KINDS[option]
    (tmp_path / "mine.py").write_text(f"{HEAD}def own({parameters}):\n    {body}\n")
    with pytest.raises(FunctionError) as caught:
        call("mine.py:own")
    message = str(caught.value)
    assert message.startswith(f"{option} = 'mine.py:own'") and "\n" not in message
    assert said in message and f"; it must return {expected}" in message, message
    assert "(mine.py:4)" in message or said.startswith("failed"), "where it is defined"


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("return -t.logprobs_BT, t.mask_BT.logical_not_()", "mask_BT"),
        ("return t.logprobs_BT.clamp_(min=-1) * t.advantages_BT, t.mask_BT", "logprobs_BT"),
        ("t.advantages_BT[t.advantages_BT < 0] = 0; return -t.ratio_BT * t.advantages_BT, t.mask_BT", "advantages_BT"),
        ("return -t.logprobs_BT + behavior_logprobs_BT.mul_(2), t.mask_BT", "behavior_logprobs_BT"),
        (
            "t.old_logprobs_BT.sub_(1); t.mask_BT[:, -1] = False; return -t.logprobs_BT, t.mask_BT",
            "old_logprobs_BT and mask_BT",
        ),
    ],
)
def test_loss_that_changes_its_argument_is_named(body: str, names: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"{HEAD}def own(t, behavior_logprobs_BT):\n    {body}\n")
    with pytest.raises(FunctionError) as caught:
        Objective(AlgorithmConfig(loss="mine.py:own"), 16)
    said = f"algorithm.loss = 'mine.py:own' (mine.py:4) changed {names} in place, but others read that after it: change"
    assert str(caught.value) == f"{said} a copy (.clone())"


@pytest.mark.parametrize("attribute", ["token_ids", "logprobs"])
@pytest.mark.parametrize(
    ("option", "rollouts"), [("filters.custom", "group.rollouts"), ("algorithm.after_scoring", "rollouts")]
)
def test_no_function_can_change_tokens(option: str, rollouts: str, attribute: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters, call, *_ = KINDS[option]
    (tmp_path / "mine.py").write_text(f"def own({parameters}):\n    {rollouts}[0].segments[0].{attribute}[0] = 0\n")
    with pytest.raises(FunctionError, match=r"failed: ValueError: assignment destination is read-only \(mine.py:2\)"):
        call("mine.py:own")


def test_functions_have_lists_of_their_own_to_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best first: the order of the group's rollouts, and whose advantage is whose, stay as they were."""
    monkeypatch.chdir(tmp_path)
    sort = ".sort(key=lambda r: -r.reward.score)"
    (tmp_path / "mine.py").write_text(
        f"def why(group): group.rollouts{sort}\ndef scored(rollouts, advantages): rollouts{sort}\n"
    )
    both = group()
    assert group_filters(FiltersConfig(custom="mine.py:why"))[0].why(both) is None
    assert [r.sibling for r in both.rollouts] == [0, 1]
    samples = build_batch([both], AlgorithmConfig(after_scoring="mine.py:scored")).samples
    assert {s.rollout_id: bool(s.advantages[0] > 0) for s in samples} == {"0-0": False, "0-1": True}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def produce(self, step, version): helper(1)", "failed: KeyError: 'absent' (mine.py:3)"),
        ("async def produce(self, step, version): helper(1)", "failed: KeyError: 'absent' (mine.py:3)"),
        (
            "async def produce(self, step, version): import asyncio; raise asyncio.CancelledError",
            "failed: CancelledError",
        ),
        ("def produce(self, step, version): return 3", "returned 3 (int); it must return a list of Groups"),
        ("def produce(self, step, version): return [1]", "returned [1] (list); it must return a list of Groups"),
        ("produce = 3", "which has no method produce; it must return an object with a method produce"),
    ],
)
def test_a_producer_too(body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = f"class Own:\n    def __init__(self, config, tokenizer, engine): pass\n    {body}\n"
    (tmp_path / "mine.py").write_text(HEAD + lines)
    with pytest.raises(FunctionError) as caught:
        producer("mine.py:Own")
    assert str(caught.value).startswith("tasks.producer = 'mine.py:Own'") and said in str(caught.value)


@pytest.mark.parametrize("option", KINDS)
def test_a_name_that_is_not_there_is_said_with_its_option(option: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def own(*values): pass\n")
    with pytest.raises(ValueError, match=f"{option} = 'mine.py:owm': .*did you mean own"):
        KINDS[option][1]("mine.py:owm")


def test_the_place_is_the_users_line_and_not_that_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\ndef own(text):\n    return json.loads(text)\n")
    own = custom_function("filters.custom", f"{tmp_path / 'mine.py'}:own", "nothing")
    with pytest.raises(FunctionError, match=r"JSONDecodeError: .* \(.*mine\.py:3\)"):
        own("{")


def test_an_error_of_ours_names_no_place_and_is_one_line() -> None:
    try:
        AlgorithmConfig.model_validate({"clip_high": "a"})
    except ValueError as error:
        assert "\n" in str(error) and "\n" not in explained(error)
    assert explained(RuntimeError()) == "RuntimeError"


def test_the_page_lists_what_each_function_may_look_at_and_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-functions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    properties = {name for name, value in vars(TokenBatch).items() if isinstance(value, property)}
    assert {f.name for f in dataclasses.fields(TokenBatch)} | properties | set(RolloutView._fields) <= named
    groups = {f"rollover.{kind}" for kind in registry.KINDS}
    assert groups <= named, "every kind of entry point"
    options = {key for key in named if "." in key} - groups
    # Every option whose description speaks of the user's own function or class has its row.
    own = {name for name, info in leaves() if re.search(r"[Cc]ustom (async )?(function|class)", info.description or "")}
    sources = {
        name for name, info in leaves(TaskSourceConfig, "tasks.sources.") if "path.py:" in (info.description or "")
    }
    assert options == own | sources | {"rewards.function"}


# Objects that a program handed over, and the names that a configuration has of them


SRC = Path(__file__).parents[2] / "src"


def test_an_object_is_held_until_everyone_has_released_it() -> None:
    value = object()
    spec = hold(value, "thing")
    assert spec == "<python>:thing" and is_live(spec) and hold(value, "thing") == spec
    assert live_object(spec) is value
    release(spec)
    assert live_object(spec) is value
    release(spec)
    with pytest.raises(ValueError, match="went with its process.*rollover.train\\(resume="):
        live_object(spec)


def test_another_object_of_a_taken_name_gets_a_number() -> None:
    one, other = object(), object()
    specs = hold(one, "taken"), hold(other, "taken")
    assert specs == ("<python>:taken", "<python>:taken.2")
    assert live_object(specs[1]) is other
    for spec in specs:
        release(spec)


def test_a_live_function_is_loaded_as_any_other() -> None:
    spec = hold(lambda x: x + 1, "plus")
    try:
        assert load_function(spec, ".")(1) == 2
        assert custom_function("rollout.order", spec, "a number")(2) == 3
    finally:
        release(spec)
    with pytest.raises(ValueError, match="^rollout.order = '<python>:plus': .*Hand it over again"):
        custom_function("rollout.order", spec, "a number")


def test_what_is_no_function_is_refused() -> None:
    spec = hold([1], "rows")
    with pytest.raises(ValueError, match="not a function"):
        load_function(spec, ".")
    release(spec)


def test_the_name_is_that_of_the_code() -> None:
    def reward(completions, limit=3):
        return [len(c) > limit for c in completions]

    first = name_of(reward)
    assert first.startswith("reward-") and name_of(lambda: 1).startswith("lambda-")

    def reward(completions, limit=4):
        return [len(c) > limit for c in completions]

    assert name_of(reward) != first, "another default is another function"
    assert name_of(lambda c: c in {"a", "b"}) != name_of(lambda c: c in {"a", "c"})
    assert name_of(functools.partial(reward, limit=3)).startswith("reward-")
    assert name_of(Counting).startswith("Counting-") and name_of(Counting()) == name_of(Counting)


class Counting:
    def __call__(self, x: int) -> int:
        return x + 1


def test_the_name_is_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollover.live_objects import name_of\n"
        "f = lambda c, b=None: [x in {'one', 'two', 'three'} for x in c if x not in ('a', 1.5)]\n"
        "print(name_of(f))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    told = {
        subprocess.run(
            [sys.executable, "mine.py"],
            env=environment | {"PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1 and told.pop().startswith("lambda-")
