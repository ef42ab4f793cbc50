"""rLLM, on top of verl: verl's rows with rLLM's names, defaults and rules.

Source: rLLM's unified trainer at commit 9beb6e0 (rllm/trainer/config/rllm/base.yaml; `sync_config` copies its options
to verl's). A shared option may have either name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rollover.plugins.convert.mapping import Options, Row, System, Unanswered
from rollover.plugins.convert.verl.rows import VERL
from rollover.plugins.convert.verl.values import ACTOR, IS, RLLM_SWITCH, ROLLOUT, advantage, sources

# fmt: off
# verl's option -> rLLM's names of it.
_NAMES = {
    **{f"trainer.{name}": (f"rllm.trainer.{name}",) for name in (
        "save_freq", "test_freq", "val_before_train", "val_only", "total_epochs", "logger", "project_name",
        "experiment_name")},
    **{f"data.{name}": (f"rllm.data.{name}",) for name in (
        "train_batch_size", "max_prompt_length", "max_response_length", "val_batch_size")},
    **{f"{ROLLOUT}.{theirs}{name}": (f"rllm.rollout.{ours}.{name}", f"rllm.rollout.sampling.{ours}.{name}")
       for theirs, ours in (("", "train"), ("val_kwargs.", "val")) for name in ("temperature", "top_p", "top_k")},
    f"{ROLLOUT}.n": ("rllm.rollout.n",),
    f"{ROLLOUT}.val_kwargs.n": ("rllm.rollout.n_val",),
    "algorithm.adv_estimator": ("rllm.algorithm.adv_estimator",),
    "algorithm.norm_adv_by_std_in_grpo": ("rllm.algorithm.norm_adv_by_std_in_grpo",),
    f"{IS}.bypass_mode": ("rllm.algorithm.rollout_correction.bypass_mode",),
    f"{IS}.rollout_is": ("rllm.algorithm.rollout_correction.tis_mode",),
    f"{IS}.rollout_is_threshold": ("rllm.algorithm.rollout_correction.tis_cap",),
    f"{ACTOR}.policy_loss.loss_mode": ("rllm.algorithm.loss_fn",),
    f"{ACTOR}.loss_agg_mode": ("rllm.algorithm.loss_agg_mode",),
    f"{ACTOR}.optim.lr_warmup_steps": ("rllm.algorithm.warmup_steps",),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": ("rllm.algorithm.warmup_steps_ratio",),
    f"{ACTOR}.optim.lr_scheduler_type": ("rllm.algorithm.lr_schedule",),
    f"{ACTOR}.clip_ratio_low": ("rllm.algorithm.eps_clip",),
    f"{ACTOR}.clip_ratio_high": ("rllm.algorithm.eps_clip_high",),
}
_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo", "data.train_batch_size": 64, "data.max_prompt_length": 2048,
    "data.max_response_length": 30720, f"{ROLLOUT}.n": 8, f"{ROLLOUT}.val_kwargs.temperature": 1.0,
    f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ACTOR}.clip_ratio_high": None, f"{ACTOR}.kl_loss_coef": 0.0,
    "trainer.total_epochs": 10, "trainer.test_freq": 5, "trainer.save_freq": 20, "trainer.val_before_train": False,
    "data.train_files": "",
}
# fmt: on


def _population(value: Any, options: Options) -> dict[str, Any]:
    """Convert rLLM's advantages: numpy's (population) deviation, and statistics over trajectories."""
    values = advantage(value, options)
    if values["algorithm.advantage"] == "grpo":
        values["algorithm.advantage_std"] = "population"
    if values["algorithm.advantage"] == "reinforce_plus_plus_baseline":
        values["algorithm.advantage_counts"] = "rollouts"
    return values


def _clip_low(value: Any, options: Options) -> dict[str, Any]:
    """Convert the lower bound, which is also the upper one unless that is set."""
    high = options(f"{ACTOR}.clip_ratio_high")
    return {"algorithm.clip_low": value} | ({"algorithm.clip_high": value} if high is None else {})


def _data(value: Any, options: Options) -> dict[str, Any]:
    values = sources(value or [], options)
    if not value:
        raise Unanswered(
            "its program chooses the data, in Python: set --tasks.sources.0.path and --tasks.sources.0.eval_path"
            " (without the latter, a share of the rows is held out)",
            values,
        )
    return values


_TO = {
    "algorithm.adv_estimator": _population,
    "algorithm.norm_adv_by_std_in_grpo": lambda value, options: _population(
        options("algorithm.adv_estimator"), options
    ),
    f"{ACTOR}.clip_ratio_low": _clip_low,
    "data.train_files": _data,
}


def _rows(rows: Iterable[Row]) -> Iterable[Row]:
    yield Row(RLLM_SWITCH, note="its options are those of rLLM", default=True)
    for row in rows:
        name = row.option
        names, default = _NAMES.get(name, ()), _DEFAULTS.get(name, row.default)
        yield replace(row, also=(*row.also, *names), default=default, to=_TO.get(name, row.to))


RLLM = System("verl, by rLLM", tuple(_rows(VERL.rows)), VERL.base, VERL.steps)
