"""Tools that a run is shown in, of other systems' files: what is taken over, and left out with a reason; and keys."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.config.load import load_config
from rollover.plugins.convert.conversion import SYSTEMS
from rollover.plugins.convert.mapping import convert

KEY = "0123456789abcdef0123456789abcdef01234567"


def track(system: str, **options: Any) -> dict[str, Any]:
    """What [track] and run.name become of the least configuration with these options; nothing is asked."""
    done = convert(SYSTEMS[system], dict(SYSTEMS[system].base) | options)
    assert not done.questions.keys() & options.keys()
    values = {key: value for key, (value, _) in done.values.items()}
    load_config([values])
    return {key: value for key, value in values.items() if key.startswith("track.") or key == "run.name"}


def left_out(system: str, **options: Any) -> dict[str, str]:
    done = convert(SYSTEMS[system], dict(SYSTEMS[system].base) | options)
    return {name: reason for name, reason in done.left_out.items() if name in options}


@pytest.mark.parametrize(
    ("system", "options", "becomes"),
    [
        ("verl", {}, {}),
        ("verl", {"trainer.logger": ["console", "file"], "trainer.project_name": "p"}, {}),
        ("verl", {"trainer.logger": "console"}, {}),
        ("verl", 
            {"trainer.logger": ["console", "tracking"], "trainer.project_name": "p", "trainer.experiment_name": "e"},
            {"track.trackers": ["wandb"], "track.project": "p", "run.name": "e", "track.tracker_rollouts": 0},
        ),
        ("verl", 
            {"trainer.logger": ["swanlab", "mlflow"], "trainer.log_val_generations": 10},
            {"track.trackers": ["swanlab", "mlflow"], "track.tracker_rollouts": 10},
        ),
        ("trl", {"report_to": "none", "project": "p"}, {}),
        ("trl", {"report_to": "wandb", "project": "p"}, {"track.trackers": ["wandb"], "track.tracker_rollouts": 0}),
        ("trl", 
            {"report_to": ["trackio"], "project": "p", "run_name": "r", "log_completions": True},
            {"track.trackers": ["trackio"], "track.project": "p", "run.name": "r"},
        ),
        ("axolotl", {"wandb_name": "n", "wandb_entity": "us", "use_wandb": False, "wandb_log_model": "end"}, {}),
        ("axolotl", 
            {"wandb_project": "p", "wandb_name": "n", "wandb_entity": "us", "wandb_log_model": "checkpoint"},
            {
                "track.trackers": ["wandb"], "track.project": "p", "run.name": "n", "track.entity": "us",
                "track.artifacts": ["model"], "track.tracker_rollouts": 0,
            },
        ),
        ("axolotl", {"wandb_project": "p", "wandb_mode": "disabled", "wandb_name": "n"}, {}),
        ("axolotl", 
            {
                "use_tensorboard": True, "mlflow_experiment_name": "m", "hf_mlflow_log_artifacts": True,
                "mlflow_run_name": "r",
            },
            {
                "track.trackers": ["tensorboard", "mlflow"], "track.project": "m", "run.name": "r",
                "track.artifacts": ["model"], "track.tracker_rollouts": 0,
            },
        ),
        ("lightrft", {"wandb_project": "p", "wandb_run_name": "n"}, {}),
        ("lightrft", 
            {"use_wandb": KEY, "wandb_project": "p", "wandb_run_name": "n", "wandb_org": "us", "wandb_group": "g"},
            {
                "track.trackers": ["wandb"], "track.project": "p", "run.name": "n", "track.entity": "us",
                "track.group": "g", "track.tracker_rollouts": 0,
            },
        ),
        ("lightrft", 
            {"use_tensorboard": "runs", "wandb_org": "us"},
            {"track.trackers": ["tensorboard"], "track.tracker_rollouts": 0},
        ),
    ],
)  # fmt: skip
def test_trackers_and_their_options(system: str, options: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert track(system, **options) == becomes


def test_unsupported_tracker_is_left_out_without_question() -> None:
    options = {"trainer.logger": ["clearml", "wandb"]}
    assert track("verl", **options)["track.trackers"] == ["wandb"]
    assert "there is no clearml: a run is shown in wandb" in left_out("verl", **options)["trainer.logger"]
    assert track("trl", report_to=["comet_ml", "trackio"])["track.trackers"] == ["trackio"]
    assert "comet_ml" in left_out("trl", report_to=["comet_ml", "trackio"])["report_to"]
    assert track("trl", report_to="all") == {}
    assert "name them in `track.trackers`" in left_out("trl", report_to="all")["report_to"]


def test_second_project_is_left_out_with_a_reason() -> None:
    options = {"wandb_project": "p", "mlflow_experiment_name": "m"}
    assert track("axolotl", **options)["track.project"] == "p"
    assert left_out("axolotl", **options) == {"mlflow_experiment_name": "all tools have one project, p"}


SCRIPT = """export WANDB_PROJECT="mine"
python examples/gsm8k_geo3k/train_colocate.py --pretrain me/mine --text_only --advantage_estimator group_norm \\
    --use_kl_loss --kl_estimator k3 --prompt_data /data --input_key prompt --n_samples_per_prompt 8 \\
    --rollout_batch_size 8 --train_batch_size 64 --use_wandb "${WANDB_API_KEY}" --wandb_project "${WANDB_PROJECT}"
"""


def test_key_in_the_environment_is_not_printed(convert_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightRFT's --use_wandb takes it."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    words = ("--rewards.function", "boxed", "--train.num_steps", "9")
    config, text = convert_file("run.sh", SCRIPT, *words)
    assert KEY not in text and 'trackers = ["wandb"]  # use_wandb = ***' in text
    assert (config.track.trackers, config.track.project) == (["wandb"], "mine")


def test_conditional_logger_is_left_out_without_question(convert_file) -> None:
    script = """logger=wandb
if [ -n "$DEBUG" ]; then
    logger=console
fi
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet \\
    actor_rollout_ref.model.path=me/mine actor_rollout_ref.rollout.n=8 trainer.total_training_steps=5 \\
    trainer.logger=$logger trainer.project_name=p
"""
    config, text = convert_file("run.sh", script)
    assert "trainer.logger is left out" in text and "under a condition" in text
    assert config.track.trackers == []
