"""Every recipe of the package: valid alone, over the quickstart and under it; found by its name, and written as a file
of the user's own; what its comments name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollover import cli
from rollover.config import Config
from rollover.config import recipes as recipes_module
from rollover.config.load import Resolved, load_config
from rollover.config.schema import field_at, leaves
from rollover.rollout.scheduler import Scheduler

FOLDER = recipes_module.FOLDER
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
    "vllm": {
        "actor_rollout_ref.rollout.name": "engine.server",
        "num_engines": "engine.num_servers",
        "--max-num-seqs": "engine.max_running",
        "--kv-cache-memory-bytes": "engine.kv_memory_gb",
        "/pause?clear_cache=true": "rollout.kv_on_resume",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
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
        "off_policy_mask_threshold": "algorithm.off_policy_mask_above",
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
    "ppo_gae": {
        "data.train_batch_size": "rollout.groups_per_step",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "data.max_response_length": "rollout.max_new_tokens",
        "algorithm.adv_estimator": "algorithm.preset",
        "algorithm.gamma": "algorithm.gamma",
        "algorithm.lam": "algorithm.gae_lambda",
        "critic.model.path": "critic.model",
        "critic.optim.lr": "critic.learning_rate",
        "critic.optim.clip_grad": "critic.max_grad_norm",
        "critic.cliprange_value": "critic.value_clip",
        "trainer.critic_warmup": "critic.policy_waits_steps",
        "actor.optim.lr": "train.learning_rate",
        "actor.ppo_mini_batch_size": "train.minibatches_per_step",
    },
    "dapo": {
        "algorithm.adv_estimator": "algorithm.preset",
        "data.train_batch_size": "rollout.groups_per_step",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "data.max_response_length": "rollout.max_new_tokens",
        "data.gen_batch_size": "rollout.in_flight_groups",
        "overlong_buffer.len": "rewards.overlong_buffer_tokens",
        "overlong_buffer.penalty_factor": "rewards.overlong_penalty",
        "algorithm.filter_groups.enable": "filters.zero_variance",
        "algorithm.filter_groups.metric": "filters.metric",
        "algorithm.filter_groups.max_num_gen_batches": "filters.give_up_after_steps",
        "overlong filtering": "filters.mask_truncated",
        "actor.clip_ratio_low": "algorithm.clip_low",
        "actor.clip_ratio_high": "algorithm.clip_high",
        "actor.loss_agg_mode": "algorithm.aggregation",
        "actor.optim.lr": "train.learning_rate",
        "actor.optim.lr_warmup_steps": "train.warmup_steps",
        "actor.optim.weight_decay": "train.weight_decay",
        "actor.grad_clip": "train.max_grad_norm",
        "actor.ppo_mini_batch_size": "train.minibatches_per_step",
    },
    "remax": {
        "algorithm.adv_estimator": "algorithm.preset",
        "data.train_batch_size": "rollout.groups_per_step",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "data.max_response_length": "rollout.max_new_tokens",
        "algorithm.use_kl_in_reward": "algorithm.kl_in",
        "algorithm.kl_penalty": "algorithm.kl_kind",
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
        "actor.optim.lr": "train.learning_rate",
        "actor.ppo_mini_batch_size": "train.minibatches_per_step",
    },
}


# Those that train something; the others are overlays.
WITH_TASKS = {
    "quickstart",
    "grpo_kl",
    "apr_qwen3_4b_2node",
    "calculator",
    "calculator_agent",
    "code",
    "dapo_qwen2.5_32b",
    "guess_number",
    "solver_judge",
}


def recipes(*, overlays: bool = False):
    chosen = [path for path in RECIPES if not (overlays and path.stem in WITH_TASKS)]
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


def surprising(resolved: Resolved, path: Path) -> list[str]:
    """The notices, but that of a peer's clip bounds, which its own settings leave without effect."""
    told = [notice for notice in resolved.notices if "no effect: algorithm.clip_high = 0.28 (preset dapo)" in notice]
    assert not told or path.stem in {"axolotl_async", "apr_qwen3_4b_2node"}
    return [notice for notice in resolved.notices if notice not in told]


def test_there_is_a_recipe_for_everyone_who_migrates() -> None:
    assert {path.stem for path in RECIPES} == WITH_TASKS | OPTIONS.keys()


@recipes()
def test_alone(path: Path) -> None:
    resolved = load_config([path])
    assert surprising(resolved, path) == []
    check_runnable(resolved)


@recipes(overlays=True)
def test_over_the_quickstart(path: Path) -> None:
    """Its own values win; the tasks, the punishment of long answers to them and the KV cache stay what they were."""
    config = check_runnable(load_config([QUICKSTART, path]))
    alone = load_config([path]).config
    punishing = alone if alone.rewards.overlong_buffer_tokens else load_config([QUICKSTART]).config
    punishment = {name: getattr(punishing.rewards, name) for name in ("overlong_buffer_tokens", "overlong_penalty")}
    kv = "kv_on_resume" in path.read_text()
    assert config.rollout == (alone.rollout if kv else alone.rollout.model_copy(update={"kv_on_resume": "keep"}))
    assert config.rewards == alone.rewards.model_copy(update=punishment)
    assert config.tasks.sources == load_config([QUICKSTART]).config.tasks.sources
    assert config.train.num_steps == load_config([QUICKSTART]).config.train.num_steps


@recipes(overlays=True)
def test_over_a_synchronous_recipe(path: Path, tmp_path: Path) -> None:
    sync = tmp_path / "sync.toml"
    sync.write_text('[rollout]\ngroups_per_step = 4\n[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n')
    resolved = load_config([sync, path])
    assert surprising(resolved, path) == []
    assert check_runnable(resolved).rollout == load_config([path]).config.rollout


@recipes(overlays=True)
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


@recipes(overlays=True)
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


@recipes()
def test_a_recipe_is_found_by_its_name(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config([path.stem]).config == load_config([path]).config
    assert recipes_module.word_for(path.stem) == Path(path.stem)
    assert len(recipes_module.about(path)) > 20


def test_a_file_in_the_working_directory_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "apr").mkdir()  # a folder is no configuration
    assert recipes_module.located("apr") == ("recipe apr", FOLDER / "apr.toml")
    (tmp_path / "apr.toml").write_text("")
    assert recipes_module.located("apr") == ("apr.toml", Path("apr.toml"))
    (tmp_path / "april").write_text("")
    assert recipes_module.located("april") == ("april", Path("april"))
    assert recipes_module.word_for("apr") == FOLDER / "apr.toml"
    assert recipes_module.located("mine/apr") == ("mine/apr", Path("mine/apr")), "what names a folder is a path"


def test_the_name_of_a_recipe_may_have_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "dapo_qwen2.5_32b"
    assert recipes_module.located(name) == (f"recipe {name}", FOLDER / f"{name}.toml")
    (tmp_path / f"{name}.toml").write_text("")
    assert recipes_module.located(name) == (f"{name}.toml", Path(f"{name}.toml"))
    assert recipes_module.located("mine2.5_32b") == ("mine2.5_32b", Path("mine2.5_32b")), "no recipe: a path"


def test_dapo_at_full_scale_is_the_papers() -> None:
    """Section 4.1 of arXiv 2503.14476; a warm-up counts updates here, and steps there."""
    c = load_config(["dapo_qwen2.5_32b"]).config
    assert (c.rollout.groups_per_step, c.rollout.group_size, c.rollout.max_new_tokens) == (512, 16, 16_384 + 4096)
    assert c.train.updates_per_step == 16 and c.train.warmup_steps == 20 * 16
    assert (c.train.learning_rate, c.train.schedule, c.train.optimizer) == (1e-6, "constant", "adamw")
    algorithm = c.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.2, 0.28, 0.0)
    assert (algorithm.advantage, algorithm.loss, algorithm.aggregation) == ("grpo", "clip", "token-mean")
    assert c.filters.zero_variance and c.rewards.overlong_buffer_tokens == 4096
    assert (c.eval.samples_per_task, c.eval.temperature, c.eval.top_p) == (32, 1.0, 0.7)
    assert c.cluster.num_nodes * c.cluster.gpus_per_node == 128
    assert c.backend.num_ranks + c.engine.num_servers * c.cluster.gpus_per_server == 128


def test_messages_name_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = load_config(["apr"], [("rollout.interrupt", "never"), ("rollout.in_flight_groups", "8")])
    assert "rollout.supplement = true (recipe apr) was reset" in "\n".join(resolved.notices)
    assert resolved.origin["rollout.group_size"] == "recipe apr"


@recipes()
def test_what_init_writes_is_the_recipe_with_every_key_explained(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", path.stem]) == 0
    assert capsys.readouterr().out == f"wrote {path.name}; to train with it: rollover train {path.name}\n"
    text = Path(path.name).read_text()
    assert load_config([path.name]).config == load_config([path]).config
    assert surprising(load_config([path.name]), path) == []
    said = " ".join(line.lstrip("# ") for line in text.splitlines())
    for key, info in leaves():
        name = key.rpartition(".")[2]
        if key != "tasks.sources":
            assert re.search(rf"^#?{name} = ", text, re.MULTILINE), key
            assert " ".join((info.description or "?").split()) in said, key
    for key, note in comments(path).items():
        assert note in text, f"the recipe's own comment behind {key}"
    used = {line.partition(" = ")[0] for line in text.splitlines() if re.match(r"\w+ = ", line)}
    assert used == {key.rpartition(".")[2] for key in comments(path)}, "what the recipe sets is set, and nothing else"


def test_a_comment_of_init_is_the_value_that_the_key_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone, without its #, changes nothing: it is no error, or one that says that it has no effect."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    lines = Path("quickstart.toml").read_text().splitlines()
    off = [i for i, line in enumerate(lines) if re.match(r"#\w+ = ", line)]
    wanted, changed = load_config(["quickstart.toml"]).config, 0
    for i in off:
        Path("one.toml").write_text("\n".join([*lines[:i], lines[i][1:], *lines[i + 1 :]]))
        assert load_config(["one.toml"]).config == wanted, lines[i]
        changed += 1
    assert changed > 100


@pytest.mark.parametrize(
    ("words", "file"),
    [([], "quickstart.toml"), (["x.toml"], "x.toml"), (["apr"], "apr.toml"), (["apr", "x.toml"], "x.toml")],
)
def test_init_takes_a_name_a_file_or_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *words]) == 0
    recipe = "apr" if "apr" in words else "quickstart"
    assert load_config([file]).config == load_config([FOLDER / f"{recipe}.toml"]).config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quikstart"], "there is no recipe 'quikstart'. Did you mean the recipe quickstart?"),
        (["mine", "x.toml"], "there is no recipe 'mine'. The recipes are quickstart, apr, "),
        (["there.toml"], "rollover init: there.toml is there already: give the name of another file, or remove it"),
        (["apr", "no/x.toml"], "rollover init: no/x.toml: there is no folder no"),
        (["apr", "--train.num_steps", "3"], "rollover init reads no configuration: leave out --train.num_steps"),
    ],
)
def test_what_init_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    assert cli.main(["init", *words]) == 2
    assert message in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("there.toml", "mine")]


def test_the_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipes_module.recipes())
    assert lines[0].split(maxsplit=1)[1].startswith("Trains SmolLM2-135M on easy arithmetic")
