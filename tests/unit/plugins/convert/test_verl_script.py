"""`rollover convert` of verl's launch scripts: what of bash is read, what is asked about, and what is written."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from rollover import cli
from rollover.config import AlgorithmConfig
from rollover.plugins.convert.verl.options import options_of_script
from rollover.plugins.convert.verl.values import older_veto
from rollover.trainer.streams import without_rejected
from samples import random_samples

SCRIPT = """#!/usr/bin/env bash
set -x
# a comment's "quote
NODES=${NODES:-2}
folder=${FOLDER:-"$HOME/data"}
length=$((1024 * 2))
longer=$((length + 512))
files="['$folder/a.parquet', '$folder/b.parquet']"
COMMON=(
    algorithm.adv_estimator=grpo
    # actor_rollout_ref.rollout.n=99
    actor_rollout_ref.rollout.n=16
)
python3 -m verl.trainer.main_ppo "${COMMON[@]}" \\
    data.train_files="$files" \\
    data.train_batch_size=512 \\
    data.max_prompt_length=${length} data.max_response_length=$((longer - 512 + 18432)) \\
    actor_rollout_ref.model.path='me/mine' \\
    actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    +actor_rollout_ref.actor.use_dynamic_bsz=True \\
    algorithm.filter_groups.enable=True \\
    algorithm.filter_groups.metric=acc \\
    trainer.logger=['console','wandb'] \\
    trainer.nnodes="${NODES}" $@
"""


STEPS = ("--train.num_steps", "30")


def with_words(words: str) -> str:
    """The script with further options, and its number of steps."""
    return SCRIPT.replace("trainer.nnodes=", f"{words} trainer.total_training_steps=5 trainer.nnodes=")


def test_variables_sums_lists_and_arrays_are_read() -> None:
    options = options_of_script(SCRIPT, Path("run.sh"), {"FOLDER": "/d"})
    expected = {
        "data.train_files": ["/d/a.parquet", "/d/b.parquet"], "data.max_prompt_length": 2048,
        "data.max_response_length": 2048 + 18432, "actor_rollout_ref.rollout.n": 16,
        "actor_rollout_ref.model.path": "me/mine", "trainer.logger": ["console", "wandb"], "trainer.nnodes": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert options_of_script(SCRIPT, Path("run.sh"), {"NODES": "5"})["trainer.nnodes"] == 5


CONDITIONS = """
DEVICE=${DEVICE:-gpu}
n=8
memory=0.5
seed=1
if [ "$DEVICE" = gpu ]; then
    n=16
    memory=0.6
    seed=1
fi
case "$DEVICE" in
  npu) lr=1e-5 ;;
esac
[ "$DEVICE" = npu ] && length=512
more=$((n * 2))
RAY=(ray_kwargs.x=1)
if true; then
  RAY=(trainer.nnodes=2 data.truncation=left)
fi
python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.seed=$seed actor_rollout_ref.rollout.n=$n \\
    data.train_batch_size=$more actor_rollout_ref.rollout.gpu_memory_utilization=$memory "${RAY[@]}" \\
    actor_rollout_ref.model.path=me/mine algorithm.adv_estimator=grpo trainer.total_training_steps=5
"""


def test_what_a_condition_decides_is_asked_about_where_it_matters(convert_file, refuse_file, monkeypatch) -> None:
    err = refuse_file("run.sh", CONDITIONS)
    assert "actor_rollout_ref.rollout.n: line 20: 16 is under a condition of the script (line 6): settle it" in err
    assert "`n=... rollover convert FILE`" in err
    assert "data.truncation" in err and "trainer.nnodes" not in err  # of an array
    assert "data.train_batch_size: line 20: 32 is under a condition" in err
    assert "gpu_memory_utilization" not in err  # no result depends on it
    assert "data.seed" not in err  # the branch says what it is in any case
    monkeypatch.setenv("n", "4")
    config, _ = convert_file("run.sh", CONDITIONS, "--train.minibatches_per_step", "1", "--tasks.truncation", "left")
    assert (config.rollout.group_size, config.rollout.groups_per_step, config.run.seed) == (4, 8, 1)


def test_the_toml_loads_and_says_where_each_value_is_from(convert_file, refuse_file) -> None:
    assert "--train.num_steps" in refuse_file("run.sh", SCRIPT)
    config, text = convert_file("run.sh", SCRIPT, *STEPS)
    assert (config.rollout.groups_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (
        512,
        16,
        20480,
    )
    # verl counts training steps of a warm-up, here they are updates
    assert (config.train.minibatches_per_step, config.train.warmup_steps, config.train.num_steps) == (4, 40, 30)
    # the last two are verl's defaults
    assert (config.algorithm.clip_high, config.algorithm.clip_low, config.algorithm.dual_clip) == (0.28, 0.2, 3.0)
    assert (config.algorithm.correction, config.filters.metric) == ("none", "acc")
    assert [source.path[-9:] for source in config.tasks.sources] == ["a.parquet", "b.parquet"]
    assert "group_size = 16  # actor_rollout_ref.rollout.n = 16\n" in text
    assert "dual_clip = 3.0  # actor_rollout_ref.actor.clip_ratio_c = 3.0, the default\n" in text
    assert "actor_rollout_ref.actor.use_dynamic_bsz is left out: where" in text


@pytest.mark.parametrize(
    ("option", "said", "answer"),
    [
        ("algorithm.use_pf_ppo=True", "algorithm.use_pf_ppo", "--accept algorithm.use_pf_ppo"),
        ("actor_rollout_ref.actor.surprise=3", "surprise", "--accept actor_rollout_ref.actor.surprise"),
        ("data.train_max_samples=7", "data.train_max_samples", "--accept data.*"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=100", "ppo_mini_batch_size",
         "--train.minibatches_per_step 4 --train.warmup_steps 40"),
        # The value of an option that is not read is not guessed.
        ("data.train_batch_size=$SIZE", "ppo_mini_batch_size: 128 goes with data.train_batch_size, which is not read",
         "--rollout.groups_per_step 256 --train.minibatches_per_step 2 --train.warmup_steps 20"),
        ("actor_rollout_ref.actor.optim.lr=fast", "\ntrain.learning_rate = ", "--train.learning_rate 1e-6"),
        ("algorithm.rollout_correction.rollout_rs=geometric",
         "verl 0.9.1 has no geometric: set --algorithm.rejection", "--accept algorithm.rollout_correction.rollout_rs"),
        *((f"algorithm.rollout_is_threshold=2.0 algorithm.rollout_is=True algorithm.{option}", "algorithm.rollout_is",
           "--algorithm.correction token_truncate --accept algorithm.rollout_is*")
          for option in ("rollout_is_mode=clip", "rollout_is_level=geometric")),
    ],
)  # fmt: skip
def test_what_would_change_learning_has_to_be_answered(
    option: str, said: str, answer: str, convert_file, refuse_file
) -> None:
    assert said in refuse_file("run.sh", with_words(option))
    convert_file("run.sh", with_words(option), *answer.split())


def test_tables_of_a_yaml_are_read(convert_file) -> None:
    text = (
        "data: {train_files: a.parquet, val_files: b.parquet, apply_chat_template_kwargs: {enable_thinking: false}}\n"
        "actor_rollout_ref:\n  model: {path: me/mine}\n"
        "  rollout: {n: 4, val_kwargs: {n: 3, do_sample: true, temperature: 0.6}}\n"
        "  actor: {optim: {lr_warmup_steps: null, lr_warmup_steps_ratio: 0.1, lr_scheduler_type: cosine,"
        " warmup_style: null}}\n"
        "reward: {reward_kwargs: {overlong_buffer_cfg: {enable: true, len: 64}}}\n"
        "algorithm: {adv_estimator: rloo}\ntrainer: {total_training_steps: 3, test_freq: 1}\n"
    )
    config, _ = convert_file("mine.yaml", text)
    assert (config.algorithm.advantage, config.rollout.group_size, config.train.num_steps) == ("rloo", 4, 3)
    assert (config.eval.samples_per_task, config.eval.temperature) == (3, 0.6)
    assert config.rewards.overlong_buffer_tokens == 64
    assert config.model.chat_template_kwargs == {"enable_thinking": False}
    assert (config.train.warmup_steps, config.train.warmup_ratio, config.train.schedule) == (0, 0.1, "cosine")


def test_the_weighed_loss_of_bypass_mode_is_reinforce(convert_file) -> None:
    options = ("bypass_mode=True", "loss_type=reinforce", "rollout_is=sequence", "rollout_is_threshold=4.0")
    words = " ".join(f"algorithm.rollout_correction.{option}" for option in options)
    found = convert_file("run.sh", with_words(words))[0].algorithm
    assert (found.loss, found.correction, found.correction_cap) == ("reinforce", "sequence_truncate", 4.0)


@pytest.mark.parametrize(("name", "text"), [("a.sh", "echo hello\n"), ("a.yaml", "- 1\n"), ("a.sh", None)])
def test_a_file_that_holds_no_options_is_refused(name: str, text: str | None, refuse_file) -> None:
    assert name in refuse_file(name, text)


@pytest.mark.parametrize(("value", "wanted"), [("", 0), ("=-1", 0), ("=0", 0), ("=4", 4)])
def test_max_num_gen_batches_without_limit_never_gives_up(value: str, wanted: int, convert_file) -> None:
    words = f"algorithm.filter_groups.max_num_gen_batches{value}" if value else ""
    assert convert_file("run.sh", with_words(words))[0].filters.give_up_after_steps == wanted


@pytest.mark.parametrize("metric", ["seq_reward", "seq_final_reward"])
def test_groups_are_filtered_by_the_reward_with_its_penalty(metric: str, convert_file, refuse_file) -> None:
    plain = with_words(f"algorithm.filter_groups.metric={metric}").replace("algorithm.filter_groups.metric=acc", "")
    prefix = "reward.reward_kwargs.overlong_buffer_cfg"
    shaped = plain.replace("trainer.nnodes=", f"{prefix}.enable=True {prefix}.len=64 trainer.nnodes=")
    for text, found in ((shaped, "shaped_score"), (plain, "score")):
        assert convert_file("run.sh", text)[0].filters.metric == found
    with_kl = shaped.replace("trainer.nnodes=", "algorithm.use_kl_in_reward=True trainer.nnodes=")
    if metric == "seq_final_reward":
        assert "the score less the KL" in refuse_file("run.sh", with_kl)
    else:
        convert_file("run.sh", with_kl)


def test_validation_file_of_training_is_asked_about(convert_file, refuse_file) -> None:
    text = with_words("data.train_files=a.parquet data.val_files=a.parquet")
    assert "data.val_files: a.parquet is a file of data.train_files, too" in refuse_file("run.sh", text)
    for words, share in ((["--accept", "data.val_files"], 0.0), (["--tasks.eval_fraction", "0.2"], 0.2)):
        tasks = convert_file("run.sh", text, *words)[0].tasks
        assert (tasks.eval_fraction, tasks.sources[0].eval_path) == (share, "")


def test_without_tree_sitter_the_extra_is_named(refuse_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    assert "pip install 'rollover[convert]'" in refuse_file("run.sh", SCRIPT)


def test_left_out_options_say_what_to_use(convert_file) -> None:
    words = "hydra.searchpath=[file://conf] actor_rollout_ref.actor.strategy=megatron trainer.resume_mode=auto"
    _, said = convert_file("run.sh", with_words(words).replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo"))
    assert "actor_rollout_ref.actor.strategy is left out: `backend.type" in said and "FSDP2" in said
    assert "trainer.resume_mode is left out: `--resume`" in said
    assert "hydra.searchpath is left out: Hydra's own" in said


def test_comments_name_the_option_that_decides_a_key(convert_file) -> None:
    words = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.005"
    lines = convert_file("run.sh", with_words(f"{words} algorithm.use_kl_in_reward=False"))[1].splitlines()
    assert "kl_coef = 0.005  # actor_rollout_ref.actor.kl_loss_coef = 0.005" in lines
    assert 'kl_in = "loss"  # actor_rollout_ref.actor.use_kl_loss = True' in lines
    start = "# actor_rollout_ref.actor.use_kl_loss: verl clamps k3 at 10, which is `kl_max`;"
    assert any(line.startswith(start) for line in lines[lines.index("# Notes:") :])


@pytest.mark.parametrize(
    "starts",
    [
        "bash recipe/mine/inner.sh",  # as from the root of the repository
        "WANDB_MODE=offline nohup ./inner.sh",
        "sbatch --nodes=1 inner.sh",
    ],
)
def test_a_launcher_is_followed_to_the_script_that_it_starts(starts: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "recipe" / "mine"
    folder.mkdir(parents=True)
    inner = SCRIPT.replace("set -x", "set -x\nn=${1:-4}\nshift").replace("rollout.n=16", "rollout.n=$n")
    (folder / "inner.sh").write_text(inner)
    (folder / "launch.sh").write_text(f"#!/bin/bash\nset -x\n{starts} 6 trainer.total_training_steps=7 > log.txt\n")
    assert cli.main(["convert", str(folder / "launch.sh")]) == 0, capsys.readouterr().err
    out = tomllib.loads(capsys.readouterr().out)
    assert (out["rollout"]["group_size"], out["train"]["num_steps"]) == (6, 7)


@pytest.mark.parametrize(
    ("launcher", "batch"),
    [
        ("export B=2\nbash run.sh", 2),
        ("B=2\nbash run.sh", 1),
        ("set -a\nB=2\nset +a\nbash run.sh", 2),
        ("set -o allexport\nset +o allexport\nB=2\nbash run.sh", 1),
        ("export B=2\nexport -n B\nbash run.sh", 1),
        ("export B=2\ndeclare +x B\nbash run.sh", 1),
        ("export B=2\nunset B\nB=3\nbash run.sh", 1),
        ("f() { local B=2; export B; }\nf\nB=3\nbash run.sh", 1),
        ("export B=2\nenv -u B bash run.sh", 1),
        ("export B=2\nenv -i bash run.sh", 1),
        ("B=2 bash -o pipefail +x run.sh", 2),
        ("B=2 nice -n 5 ./run.sh", 2),
        ("set -- 1 2\nshift 1\nB=$1 bash run.sh", 2),
        ("exec bash run.sh\nB=2 bash run.sh", 1),
        ("cd a\ncd b\nbash run.sh", 7),
        ("cd a/b\ncd ..\nbash b/run.sh", 7),
        ("cd a/b && cd -\nbash run.sh", 1),
        ("pushd a/b\npopd\nbash run.sh", 1),
    ],
)
def test_a_started_script_sees_what_bash_shows_it(tmp_path: Path, launcher: str, batch: int) -> None:
    """Each of the expected batches is what bash printed for it."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    text = "python3 -m verl.trainer.main_ppo data.train_batch_size=${B:-1}\n"
    (tmp_path / "run.sh").write_text(text)
    (tmp_path / "a" / "b" / "run.sh").write_text(text.replace("-1}", "-7}"))
    (tmp_path / "launch.sh").write_text(launcher + "\n")
    found = options_of_script(launcher + "\n", tmp_path / "launch.sh", {})
    assert found["data.train_batch_size"] == batch


@pytest.mark.parametrize("starts", ["bash x/other.sh trainer.nnodes=2", "./other.sh", "sbatch other.slurm"])
def test_a_script_that_is_not_there_is_named(starts: str, refuse_file) -> None:
    name = next(word for word in starts.split() if "other." in word)
    said = f"line 2 starts {name}, which cannot be read (it is not there), and nothing else here trains: convert it"
    assert said in refuse_file("run.sh", f"export N=4\n{starts}\n")


def test_a_script_may_start_itself(convert_file) -> None:
    convert_file("run.sh", SCRIPT.replace("set -x", 'AGAIN=1 bash "$0"'), *STEPS)


VETO = {"sequence_max_k1": [-20.0, 9.21034]}  # verl's default of 1e-4


@pytest.mark.parametrize(
    ("options", "correction", "cap", "floor", "rejection"),
    [
        ("rollout_is_threshold=null rollout_is=True", "none", None, None, {}),
        ("rollout_is_threshold=2.0 rollout_is_mode=mask", "none", None, None, {}),  # measured only
        ("rollout_is_threshold=3.0 rollout_is=True", "token_truncate", 3.0, None, VETO),
        ("rollout_is_threshold=4.0 rollout_is=True rollout_is_mode=mask", "token_mask", 4.0, 0.25, VETO),
        (
            "rollout_is_threshold=2.0 rollout_is=True rollout_is_level=sequence rollout_is_veto_threshold=0.01",
            "sequence_truncate", 2.0, None, {"sequence_max_k1": [-20.0, 4.60517]},
        ),
        (
            "rollout_is_threshold=2.0 rollout_is_threshold_lower=0.1 rollout_is_mode=mask rollout_is=True"
            " rollout_is_level=sequence rollout_is_veto_threshold=null",
            "sequence_mask", 2.0, 0.1, {},
        ),
    ],
)  # fmt: skip
def test_the_older_names_of_the_correction(
    options: str,
    correction: str,
    cap: float | None,
    floor: float | None,
    rejection: dict[str, list[float]],
    convert_file,
) -> None:
    _, text = convert_file("run.sh", with_words(" ".join(f"algorithm.{option}" for option in options.split())))
    found = tomllib.loads(text.partition("rollover: ")[0])["algorithm"]
    assert (found["correction"], found.get("correction_cap")) == (correction, cap)
    assert (found.get("correction_floor"), found.get("rejection", {})) == (floor, rejection)


def test_the_older_veto_is_of_ratios_below_its_bound() -> None:
    bounds = older_veto(0.5, {"algorithm.rollout_is": True, "algorithm.rollout_is_threshold": 2.0}.get)
    behavior = np.full(3, -2.0, np.float32)
    ratios = np.array([1.0, 0.6, 90.0]), np.array([1.0, 0.4, 1.0])  # the second has one below 0.5
    samples = [
        dataclasses.replace(random_samples(1)[0].with_streams(behavior_logprobs=behavior), mask=np.ones(3, bool))
    ] * 2
    kept = [
        without_rejected(
            AlgorithmConfig(rejection=bounds["algorithm.rejection"]),
            s.with_streams(proximal_logprobs=np.float32(-2.0 + np.log(r))),
            0,
        ).mask.tolist()
        for s, r in zip(samples, ratios, strict=True)
    ]
    assert kept == [[True] * 3, [False] * 3]


def test_a_sandbox_service_scores_programs(convert_file, refuse_file) -> None:
    url = "http://sandbox:8080/run_code"
    text = with_words(f"reward_model.sandbox_fusion.url={url}")
    config, _ = convert_file("run.sh", text)
    name, params = config.rewards.by_data_source["taco"].split("/", 1)
    assert name == "code" and set(config.rewards.by_data_source) == {"codecontests", "apps", "codeforces", "taco"}
    assert json.loads(params) == {"sandbox": "http", "url": url, "concurrency": 64, "memory_mb": 1024}
    text = text.replace("trainer.nnodes", "custom_reward_function.path=mine.py trainer.nnodes")
    assert "verl hands it to the function of custom_reward_function" in refuse_file("run.sh", text)
