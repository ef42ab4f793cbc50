"""Every code block of README.md and docs: TOML loads, Python runs and tells right from wrong, JSON is JSON.

Shell blocks are checked by test_commands_in_docs.py, and sessions (>>>) by test_algorithms_doc.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from PIL import Image

import own_functions
import tiny
from documents import PAGES, ROOT, Block, blocks
from recorded_run import write_run
from rollover import Observation
from rollover.config import Config, RewardsConfig
from rollover.config.load import load_config
from rollover.envs.protocol import RunEnvironment
from rollover.functions import load_function
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.rollout.order import RolloutView
from rollover.tasks.prompts import encoder
from rollover.tasks.stream import TaskStream
from rollover.trainer.distill import TeacherPrompts
from rollover.types import Task
from rollover.workflows.distilled import distill_options
from unit.workflows.scripted_host import ScriptedHost

BLOCKS = blocks()


def of(language: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def test_every_block_says_what_it_is() -> None:
    """A block without a language is a picture or what a program printed, and no line of it is a command."""
    for block in BLOCKS:
        assert block.language in ("", "bash", "json", "python", "toml"), block.name
        if not block.language:
            code = r"^(rollover [a-z]+ |make |python |git )|^\[\w+\]$"
            assert not re.search(code, block.text, re.MULTILINE), block.name


@of("toml")
def test_toml_loads(block: Block, tmp_path: Path) -> None:
    """Alone if it has tasks, else over the quickstart; and nothing in it is reset or without effect."""
    text = block.text
    if not re.search(r"^\[", text, re.MULTILINE):
        assert block.page.name == "modes.md", block.name
        text = f"[rollout]\ngroups_per_step = 8\n{text}"
    path = tmp_path / "mine.toml"
    path.write_text(text)
    files = [path] if "[[tasks.sources]]" in text else [ROOT / "configs" / "quickstart.toml", path]
    resolved = load_config(files)
    assert not [notice for notice in resolved.notices if f"({path})" in notice.partition(" was reset")[0]]


@of("json")
def test_json_is_json(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


@of("python")
def test_python_tells_right_from_wrong(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.page.name == "python.md" or "import rollover\n" in block.text:
        return  # they are programs, which test_python_page.py runs
    if "rollover.compat" in block.text:
        return  # a program, which test_trl_compat.py runs
    if "class Demonstrations" in block.text:
        return  # test_running_page.py trains with it
    if ">>>" in block.text:
        assert block.page.name == "algorithms.md", "sessions are run there"
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(block.text)
    names = re.findall(r"^(?:async )?def (\w+)|^class (\w+)", block.text, re.MULTILINE)
    assert names
    for name in map("".join, names):
        CHECKS[block.page.name, name](f"mine.py:{name}")


def scores(spec: str, row: dict[str, object], *completions: str) -> list[float | None]:
    """What the reward `spec` gives for completions of one row of a data set: through the task stream and the pool."""
    Path("problems.jsonl").write_text("".join(json.dumps({**row, "n": i}) + "\n" for i in range(4)))
    toml = next(b.text for b in BLOCKS if b.page.name == "start.md" and 'kind = "dataset"' in b.text)
    Path("mine.toml").write_text(re.sub(r'^reward = "[^"]*"', f'reward = "{spec}"', toml, flags=re.MULTILINE))
    config = load_config(["mine.toml"], [("tasks.eval_fraction", "0.001")]).config
    task = TaskStream(config.tasks, seed=0, split="train", rewards=config.rewards).next()
    assert task is not None

    async def ask() -> list[float | None]:
        pool = RewardPool(RewardsConfig(num_workers=1))
        try:
            rewards = await pool.score([ScoreRequest(task, text, (1,)) for text in completions])
        finally:
            await pool.close()
        assert [r.error for r in rewards if r.error] == []
        return [r.score for r in rewards]

    return asyncio.run(ask())


def check_trl(spec: str) -> None:
    """Plain prompts, for which it is written."""
    assert scores(spec, {"prompt": "2 + 2 =", "answer": "4"}, "It is 4.", "It is 5.") == [1.0, 0.0]


def check_verl(spec: str) -> None:
    for prompt in ("2 + 2 =", [{"role": "user", "content": "2 + 2 ="}]):
        assert scores(spec, {"prompt": prompt, "answer": "4"}, "It is 4.", "It is 5.") == [1.0, 0.0], prompt


def check_order(spec: str) -> None:
    order = load_function(spec, ".")
    long, short = (RolloutView("0-0", 0, 0, num_tokens, 9, 0, 0) for num_tokens in (3, 1))
    assert order(short) < order(long)


def check_privileged(spec: str) -> None:
    """The teacher's prompt ends with the answer, and what comes before is the policy's."""
    config = Config.model_validate({"distill": {"teacher": "initial", "privileged": spec}})
    messages = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"})
    task = Task("t", "docs", "reward", messages=messages, columns={"answer": "4"})
    encode = RunEnvironment(encoder(tiny.tokenizer())).prompt
    text = tiny.tokenizer().decode(TeacherPrompts(config, encode, None).encode_task(task).ids)
    assert text == "s:Add.\nu:2+2?\nThe final answer is 4.\na:"


def check_answer_told(spec: str) -> None:
    task = Task("t", "docs", "reward", columns={"answer": "4"})
    told = load_function(spec, ".")(task, [{"role": "user", "content": "2+2?"}])
    assert told == [{"role": "user", "content": "2+2? (The answer is 4.)"}]


def check_decorated(spec: str) -> None:
    """It says of [distill] what its decorator does; and plays: one title is short."""
    said = {"teacher": "initial", "roles": ["solver"], "privileged": "mine.py:answer_told", "coef": 0.5}
    of = Config.model_validate({"workflow": {"function": spec}})
    assert distill_options(of) == {f"distill.{name}": value for name, value in said.items()}
    for title, score in (("Sums", 1.0), ("A long title of a sum, and of its answer", 0.0)):
        host = ScriptedHost(load_function(spec, "."), lambda before, title=title: title if "A title" in before else "4")
        rewards = host.run()
        assert [r.score for i, r in rewards.items() if host.rollouts[i].role == "titler"] == [score]


def check_score_by_source(spec: str) -> None:
    pytest.importorskip("pandas")
    write_run(Path("run"), formats=["parquet"])
    assert load_function(spec, ".")("run") == {"sums": 0.5}


def check_maze(spec: str) -> None:
    """It shows the picture of each room, until the door is found."""
    maze = load_function(spec, ".")()
    Image.new("RGB", (8, 8)).save("room0.png")
    assert [part["type"] for part in maze.reset(answer="2")] == ["text", "image"]
    assert maze.step("left").text == [{"type": "image", "image": "room1.png"}]
    assert maze.step("right") == Observation(reward=1.0, done=True)


CHECKS = {
    ("vision.md", "Maze"): check_maze,
    ("parquet.md", "score_by_source"): check_score_by_source,
    **own_functions.CHECKS,
    ("own-functions.md", "has_answer"): check_trl,
    ("start.md", "accuracy"): check_trl,
    ("start.md", "compute_score"): check_verl,
    ("modes.md", "fewest_tokens_first"): check_order,
    ("distillation.md", "told"): check_privileged,
    ("distillation.md", "answer_told"): check_answer_told,
    ("distillation.md", "solve_and_title"): check_decorated,
}


def test_pages_are_found() -> None:
    assert {"README.md", "modes.md", "rewards.md"} <= {page.name for page in PAGES}
