"""Every recipe in configs/: valid alone, over the quickstart and under it; what its comments name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollover import cli
from rollover.config import Config
from rollover.config.fields import field_at, leaves
from rollover.config.load import Resolved, load_config
from rollover.rollout.scheduler import Scheduler

FOLDER = Path(__file__).parents[3] / "configs"
RECIPES = sorted(FOLDER.glob("*.toml"))
QUICKSTART = FOLDER / "quickstart.toml"

# Where users come from: the options that they look for, and the setting that each is here.
OPTIONS = {
    "lightrft_partial": {
        "--use_partial": "rollout.interrupt",
        "--max_budget": "rollout.token_budget",
        "--partial_percent": "rollout.complete_fraction",
        "--rollout_batch_size": "rollout.groups_per_step",
        "--n_samples_per_prompt": "rollout.group_size",
        "--generate_max_len": "rollout.max_new_tokens",
    },
    "apr": {
        "async_training.partial_rollout": "rollout.interrupt",
        "SSIM": "rollout.supplement",
        "data.train_batch_size": "rollout.groups_per_step",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "data.max_response_length": "rollout.max_new_tokens",
        "algorithm.rollout_correction.rollout_is": "algorithm.correction",
        "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction_cap",
    },
    "april": {
        "--partial-rollout": "rollout.interrupt",
        "--rollout-batch-size": "rollout.groups_per_step",
        "--over-sampling-batch-size": "rollout.in_flight_groups",
        "--n-samples-per-prompt": "rollout.group_size",
        "--rollout-max-response-len": "rollout.max_new_tokens",
        "--mask-offpolicy-in-partial-rollout": "rollout.on_stale",
        "--use-tis": "algorithm.correction",
        "--tis-clip": "algorithm.correction_cap",
    },
    "one_step_off": {
        "one_step_off_policy": "rollout.overlap",
        "rollout_correction.rollout_is": "algorithm.correction",
        "rollout_correction.rollout_is_threshold": "algorithm.correction_cap",
    },
    "fully_async": {
        "fully_async_policy": "rollout.overlap",
        "async_training.partial_rollout": "rollout.interrupt",
        "async_training.staleness_threshold": "rollout.max_staleness",
        "async_training.require_batches": "rollout.groups_per_step",
        "async_training.trigger_parameter_sync_step": "train.publish_every",
        "rollout_correction.rollout_is": "algorithm.correction",
    },
    "axolotl_async": {
        "use_data_producer": "rollout.overlap",
        "async_prefetch": "rollout.overlap",
        "prefetch_depth": "rollout.in_flight_groups",
        "vllm_sync_interval": "train.publish_every",
        "skip_zero_advantage_batches": "train.skip_zero_advantage",
        "mask_truncated_completions": "filters.mask_truncated",
        "multi_objective_aggregation": "algorithm.advantage",
        "vllm_importance_sampling_mode": "algorithm.correction",
        "vllm_importance_sampling_cap": "algorithm.correction_cap",
        "off_policy_mask_threshold": "algorithm.off_policy_mask_threshold",
        "use_bias_correction_kl": "algorithm.kl_bias_correction",
        "reward_num_workers": "rewards.num_workers",
        "replay_buffer_size": "replay.size",
        "reroll_start_fraction": "reroll.start_fraction",
        "reroll_max_groups": "reroll.max_groups",
    },
    "kimi_k15": {
        "output token budget": "rollout.token_budget",
        "on-policy": "rollout.max_staleness",
        "excluded from loss": "rollout.on_stale",
        "repeat detection": "rollout.stop_repetition_tokens",
        "penalties": "rewards.repetition_penalty",
    },
}


def recipes(*, without: str = ""):
    chosen = [path for path in RECIPES if path.stem != without]
    return pytest.mark.parametrize("path", chosen, ids=[path.stem for path in chosen])


def comments(path: Path) -> dict[str, str]:
    """Dotted key -> the comment behind it, for every key with a value."""
    table, found = "", {}
    for line in path.read_text().splitlines():
        if header := re.fullmatch(r"\[+([\w.]+)\]+", line.strip()):
            table = header[1]
        elif match := re.match(r"(\w+) *= *[^#]*(?:#(.*))?$", line):
            found[f"{table}.{match[1]}"] = (match[2] or "").strip()
    return found


def check_runnable(resolved: Resolved) -> Config:
    Scheduler(resolved.config.rollout, resolved.config.engine.max_running)
    return resolved.config


def test_there_is_a_recipe_for_everyone_who_migrates() -> None:
    assert {path.stem for path in RECIPES} == {"quickstart", *OPTIONS}


@recipes()
def test_alone(path: Path) -> None:
    resolved = load_config([path])
    assert resolved.notices == []
    check_runnable(resolved)


@recipes(without="quickstart")
def test_over_the_quickstart(path: Path) -> None:
    """Its own values win, and the tasks stay what they were."""
    config = check_runnable(load_config([QUICKSTART, path]))
    alone = load_config([path]).config
    assert config.rollout == alone.rollout and config.rewards == alone.rewards
    assert config.tasks.sources == load_config([QUICKSTART]).config.tasks.sources
    assert config.train.num_steps == load_config([QUICKSTART]).config.train.num_steps


@recipes(without="quickstart")
def test_over_a_synchronous_recipe(path: Path, tmp_path: Path) -> None:
    sync = tmp_path / "sync.toml"
    sync.write_text('[rollout]\ngroups_per_step = 4\n[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n')
    resolved = load_config([sync, path])
    assert resolved.notices == []
    assert check_runnable(resolved).rollout == load_config([path]).config.rollout


@recipes(without="quickstart")
def test_under_a_users_own_file(path: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[model]\npath = "somewhere"\n[rollout]\nmax_new_tokens = 4096\n'
        '[[tasks.sources]]\nkind = "dataset"\npath = "problems.jsonl"\n'
    )
    config = check_runnable(load_config([path, mine]))
    assert [source.path for source in config.tasks.sources] == ["problems.jsonl"]
    assert config.rollout.interrupt == load_config([path]).config.rollout.interrupt


@recipes()
def test_what_config_prints_loads_again(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(path)]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load_config([again]).config == load_config([path]).config


@recipes(without="quickstart")
def test_every_key_says_what_it_is_in_the_original(path: Path) -> None:
    """Keys of the tasks aside: those are an example."""
    found = {key: text for key, text in comments(path).items() if not key.startswith("tasks.")}
    assert [key for key in found if field_at(key) is None] == []
    assert [key for key, text in found.items() if not text] == []
    for option, key in OPTIONS[path.stem].items():
        assert option in found[key], f"{path.name}: {key} does not name {option}"


@recipes()
def test_keys_named_in_comments_exist(path: Path) -> None:
    tables = {name.partition(".")[0] for name, _ in leaves()}
    text = "\n".join(line.partition("#")[2] for line in path.read_text().splitlines())
    originals = " ".join(OPTIONS.get(path.stem, ()))
    named = [name for name in re.findall(r"(?<![\w.])[a-z]+(?:\.[a-z_]+)+", text) if name.partition(".")[0] in tables]
    ours = [name for name in named if name not in originals]
    assert [name for name in ours if field_at(name) is None] == []
    # Values that comments quote, as in `"mask" and max_staleness = 0`.
    plain = {name.rpartition(".")[2] for name, _ in leaves()}
    assert [name for name in re.findall(r"\b([a-z]+(?:_[a-z]+)+) = ", text) if name not in plain] == []
