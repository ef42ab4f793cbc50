"""The modes of the net: one recipe folder each, written from scratch, with a random model of some 70,000 weights.

    write(MODES["sync"], folder, renames)       recipe.toml, tasks.jsonl, functions.py, model/

Nothing here imports the package: a recipe is data, and its functions use only what users import.
"""

from __future__ import annotations

import importlib
import json
import random
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, GROUPS, SIBLINGS = 6, 3, 3
TESTS = Path(__file__).resolve().parents[2] / "tests"

Tables = dict[str, dict[str, Any]]

_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)

# PAUSE_S makes steps longer, so that a kill from outside hits the place that it aims at.
FUNCTIONS = '''
import random
import time

from rollover import Observation
from rollover.envs.protocol import written
from rollover.envs.tools import Call

PAUSE_S = {pause_s}


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def reward(prompts, completions, **columns):
    time.sleep(PAUSE_S)
    return [sum(c.isdigit() for c in text_of(c)) / 10 + len(text_of(c)) % 5 / 7 for c in completions]


def sparse(prompts, completions, **columns):
    """1 for an answer with a 7 in it: many groups have no signal."""
    time.sleep(PAUSE_S)
    return [float("7" in text_of(c)) for c in completions]


def sparse_score(data_source, solution_str, ground_truth, extra_info):
    return sparse([], [solution_str])[0]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(PAUSE_S / 9)
    return sum(c.isdigit() for c in solution_str) / 10 + len(solution_str) % 5 / 7


def told(task, messages):
    return [dict(role="system", content="The answer is 0123456789"), *messages]


async def talk(task, episode):
    drawn = await episode.once("draw", random.random)
    solver, judge = episode.trajectory("solver"), episode.trajectory("judge")
    first = await solver.chat(task.messages)
    second = await solver.chat([*task.messages, first.message, dict(role="user", content="more")])
    verdict = await judge.chat([dict(role="user", content=first.text[:3])])
    solver.reward = sum(c.isdigit() for c in first.text + second.text) / 20 + len(second.text) % 5 / 7
    judge.reward = sum(c.isdigit() for c in verdict.text) / 20 + len(verdict.text) % 3 / 7
    assert await episode.once("draw", random.random) == drawn


async def by_http(task, client, model):
    messages, digits = list(task.messages), 0
    for turn in range(3):
        done = await client.chat.completions.create(model=model, messages=messages)
        message = done.choices[0].message
        messages += [message.model_dump(exclude_none=True), dict(role="user", content="more")]
        digits += sum(c.isdigit() for c in message.content)
    return digits / 20 + digits % 3 / 7


class EveryDigit:
    """Each digit of a turn is a call; a turn without one ends the episode."""

    def definitions(self, schemas):
        return ""

    def read(self, text):
        return [Call("digit", dict(number=int(c))) for c in text if c.isdigit()]


class Digits:
    def reset(self, answer):
        self.seen = []

    def digit(self, number: int) -> str:
        """Add a digit.

        Args:
            number: which
        """
        self.seen.append(number)
        time.sleep(PAUSE_S / 50)
        return str(len(self.seen))

    def get_reward(self):
        return sum(self.seen) / 30 + len(self.seen)

    def snapshot(self):
        return dict(seen=self.seen)

    def restore(self, state):
        self.seen = state["seen"]


class Restarted(Digits):
    resume = "restart"
    snapshot = restore = None


class Game:
    """Stateless: after a kill its steps are called again."""

    def reset(self, answer):
        self.messages = []
        return f" (up to {answer})"

    def step(self, message):
        self.messages.append(message)
        score = sum(c.isdigit() for c in message) / 20 + len(message) % 5 / 7
        return Observation("more", reward=score, done=len(self.messages) == 3)


class Dialogue:
    """Adds two tokens after each of the first two turns."""

    def __init__(self, setup):
        self.score, self.scores_singly = setup.score, setup.scores_singly

    async def next(self, rollout):
        turns = sum(not segment.trainable for segment in rollout.segments)
        return written(rollout, [70, 71]) if turns < 2 else None
'''


@dataclass(frozen=True)
class Mode:
    """One mode: changes of the base recipe. Two runs of an `exact` one are the same bit for bit."""

    name: str
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exact: bool = False
    vision: bool = False
    rows: int = 200  # tasks

    @property
    def synchronous(self) -> bool:
        """Whether each step trains the groups that were admitted for it, in their order."""
        return self.tables.get("rollout", {}).get("interrupt", "never") == "never" and not (
            self.tables.get("rollout", {}).get("overlap", False)
        )

    @property
    def keeps_rows(self) -> bool:
        """Whether a kill takes no row back."""
        table = self.tables.get("checkpoint", {})
        return table.get("journal_s") != 0.0 and table.get("lost_steps") != "roll_back"

    @property
    def still(self) -> bool:
        """Whether the weights stay, so that no token depends on the step in which it is sampled."""
        return self.tables.get("train", {}).get("learning_rate") == 0.0


_PARTIAL = {"interrupt": "when_enough", "in_flight_groups": 8, "max_staleness": 2}
_BUSY = {**_PARTIAL, "interrupt": "on_weight_update", "overlap": True}
_TURNS = {"stop_token_ids": list(range(2, 14)), "max_new_tokens": 90}
_STILL = {"learning_rate": 0.0}
_SPARSE = {"rewards": {"function": "functions.py:sparse"}, "rollout": {"max_new_tokens": 12}}
_VARIANCE = {"kind": "variance", "decay": 0.5, "min_weight": 0.1}
_REUSE = {
    "replay": {"size": 6, "max_staleness": 4},
    "reroll": {"max_groups": 1, "start_fraction": 0.25, "size": 5},
}
_ALL = (
    Mode("sync", exact=True),
    Mode(  # lost steps and evaluations are cut and repeated
        "no_journal",
        {"checkpoint": {"journal_s": 0.0}, "eval": {"num_tasks": 2, "every_steps": 2, "max_new_tokens": 8}},
        exact=True,
    ),
    Mode("partial", {"rollout": _PARTIAL}),
    Mode("token_budget", {"rollout": {**_PARTIAL, "interrupt": "token_budget", "token_budget": 16}}, exact=True),
    Mode("fraction", {"rollout": {**_PARTIAL, "in_flight_groups": 3, "complete_fraction": 0.5}}),
    Mode("overlap", {"rollout": _BUSY, "engine": {"kind": "process"}}),
    Mode("streaming", {"train": {"streaming_min_groups": 1}, "rewards": {"function": "functions.py:compute_score"}}),
    Mode("agents", {"rollout": _TURNS, "workflow": {"function": "functions.py:talk"}, "train": _STILL}),
    Mode("http_agents", {"rollout": _TURNS, "workflow": {"function": "functions.py:by_http"}, "train": _STILL}),
    Mode(
        "critic",
        {
            "algorithm": {"preset": "ppo"},
            "critic": {
                "model": "policy",
                "learning_rate": 1e-3,
                "head_learning_rate": 1e-2,
                "policy_waits_steps": 1,
                "bootstrap_truncated": True,
            },
            "train": {"minibatches_per_step": 3},
        },
        exact=True,
    ),
    Mode("lora", {"model.lora": {"rank": 4}}, exact=True),
    Mode(
        "distillation",
        {"distill": {"teacher": "policy", "refresh_steps": 3, "discount": 0.5, "privileged": "functions.py:told"}},
        exact=True,
    ),
    Mode("ranks", {"backend": {"type": "ranks", "num_ranks": 2}, "algorithm": {"kl_coef": 0.01}}, exact=True),
    Mode("pictures", {"rollout": {"max_new_tokens": 24}}, exact=True, vision=True),
    Mode(
        "tools",
        {
            "rollout": _TURNS,
            "workflow": {"environment": "functions.py:Digits", "tool_format": "functions.py:EveryDigit"},
            "train": _STILL,
        },
    ),
    Mode(
        "restart",
        {
            "rollout": _TURNS,
            "workflow": {"environment": "functions.py:Restarted", "tool_format": "functions.py:EveryDigit"},
            "train": _STILL,
        },
    ),
    Mode(
        "games",
        {"rollout": _TURNS, "workflow": {"environment": "functions.py:Game"}, "train": _STILL},
    ),
    Mode(
        "dialogue",
        {"rollout": {**_TURNS, "environment": "functions.py:Dialogue"}, "train": _STILL},
    ),
    Mode("reuse", {**_SPARSE, **_REUSE}, exact=True),
    Mode(
        "everything",
        {
            **_REUSE,
            "rollout": {**_BUSY, "max_new_tokens": 12},
            "rewards": {"function": "functions.py:sparse_score"},
            "train": {"streaming_min_groups": 1},
            "model.lora": {"rank": 4},
            "tasks.curriculum": _VARIANCE,
        },
        rows=12,
    ),
    Mode("curriculum", {**_SPARSE, "tasks.curriculum": {"kind": "buckets", "easy_weight": 0.05}}, exact=True, rows=12),
    Mode(
        "rolled_back",
        {
            **_SPARSE,
            "rollout": {**_PARTIAL, "max_new_tokens": 12},
            "tasks.curriculum": _VARIANCE,
            "checkpoint": {"lost_steps": "roll_back"},
        },
        rows=12,
    ),
    Mode(
        "filters",
        {**_SPARSE, "rollout": {**_PARTIAL, "max_new_tokens": 12},
         "filters": {"zero_variance": True, "give_up_after_steps": 50}},
    ),
    Mode(
        "kl_shaped",
        {
            "algorithm": {"advantage": "dr_grpo", "kl_coef": 0.2, "kl_in": "reward", "kl_target": 1e-4,
                          "kl_horizon": 20, "reference_refresh_steps": 3, "reference_mixup": 0.6},
            "rewards": {"overlong_buffer_tokens": 40, "overlong_penalty": 0.5, "running_norm": "scale"},
        },
        exact=True,
    ),
    Mode(
        "epochs",
        {"train": {"minibatches_per_step": 3, "epochs_per_step": 3, "optimizer": "muon", "max_kl": 0.005}},
        exact=True,
    ),
)  # fmt: skip
MODES = {mode.name: mode for mode in _ALL}


def tables_of(mode: Mode, *, steps: int = STEPS, every_steps: int = 2) -> Tables:
    """The recipe's tables under the names of the commit before the redesign, without its tasks."""
    tables: Tables = {
        "run": {"name": mode.name, "dir": "run", "threads": 1, "seed": 7},
        "model": {"path": "model", "dtype": "float32"},
        "rollout": {
            "groups_per_step": GROUPS,
            "group_size": SIBLINGS,
            "max_new_tokens": 48,
            "stop_token_ids": [2, 3, 4, 5],  # beside <eos>: answers of many lengths
            "in_flight_groups": GROUPS,
            "interrupt": "never",
            "max_staleness": 0,
        },
        "engine": {"max_running": 32, "kv_memory_gb": 0.1},
        "train": {"num_steps": steps, "learning_rate": 1e-3, "micro_batch_tokens": 256},
        "rewards": {"function": "functions.py:reward", "num_workers": 1},
        "checkpoint": {"every_steps": every_steps, "keep": 2, "journal_s": 0.02},
        "track": {"live": "plain"},
    }
    if "workflow" in mode.tables and "function" in mode.tables["workflow"]:
        del tables["rewards"]["function"]
    for table, changes in mode.tables.items():
        tables.setdefault(table, {}).update(changes)
    return tables


def write(mode: Mode, folder: Path, renames: Mapping[str, Any], *, pause_s: float = 0.0, **options: int) -> Path:
    """Write the recipe of a mode as the tree with these renames reads it. Returns the path of recipe.toml."""
    folder.mkdir(parents=True)
    tables: Tables = renames["recipe"](tables_of(mode, **options))
    lines = []
    for table, fields in tables.items():
        lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in fields.items())]
    lines += ["[[tasks.sources]]", 'kind = "dataset"', 'path = "tasks.jsonl"']
    (folder / "recipe.toml").write_text("\n".join(lines) + "\n")
    code = FUNCTIONS.replace("{pause_s}", str(pause_s))
    for old, new in renames["CODE"].items():
        code = code.replace(old, new)
    (folder / "functions.py").write_text(code)
    rows = (
        _shown_tasks(folder)
        if mode.vision
        else [{"prompt": f"count to {i}", "answer": str(i)} for i in range(mode.rows)]
    )
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if mode.vision:
        sys.path.insert(0, str(TESTS))
        importlib.import_module("vision.families").write("qwen3_vl", folder / "model")
        sys.path.remove(str(TESTS))
    else:
        _write_model(folder / "model")
    return folder / "recipe.toml"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + "}"
    return json.dumps(value)


def _shown_tasks(folder: Path) -> list[dict[str, Any]]:
    """Write twelve small images. Returns tasks that show one or two of them."""
    from PIL import Image

    draw, rows = random.Random(0), []
    for number in range(12):
        size = (24, 16 + 8 * (number % 3))
        Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(folder / f"{number}.png")
    for number in range(60):
        shown = [f"{number % 12}.png", f"{(number + 5) % 12}.png"][: 1 + number % 2]
        parts: list[dict[str, str]] = [{"type": "image", "image": name} for name in shown]
        parts.append({"type": "text", "text": f"what is {number}?"})
        rows.append({"prompt": [{"role": "user", "content": parts}], "answer": str(number)})
    return rows


def _write_model(folder: Path) -> None:
    """A Llama of two layers over printable ASCII characters, sharp enough that a wrong cache changes its tokens."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(string.printable)}}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(vocab), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        initializer_range=0.08, bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
