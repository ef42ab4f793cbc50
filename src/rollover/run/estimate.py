"""A rough estimate of the duration of a run on a CPU, from the model's FLOPs and the CPU's peak FLOP/s.

It assumes answers of half of rollout.max_new_tokens, and half of the peak (docs/performance.md has measurements).
"""

from __future__ import annotations

from typing import Any

from rollover.config import Config
from rollover.models.devices import dtype_of, engine_device, pick_device
from rollover.models.flops import ModelFlops, peak_flops
from rollover.track.figures import duration

_REACHED = 0.5  # of the peak, in decoding and in training alike
_FIXED_ROWS = 16  # minimum cost of a decode step in rows: reading the weights from memory
_SHORT_S, _LONG_S = 60.0, 30 * 60.0
_TRIAL = {"rollout.group_size": 4, "rollout.max_new_tokens": 64}


def estimate_of(config: Config, model: Any, steps_left: int) -> str:
    """Return `estimate` for a run on this CPU alone; "" for others."""
    here = (
        config.backend.type == "local"
        and not config.algorithm.supervised
        and config.engine.kind in ("embedded", "process")
    )
    if not here or not steps_left or {pick_device(config.model.device).type, engine_device(config).type} != {"cpu"}:
        return ""
    peak = peak_flops(engine_device(config), dtype_of(config), config.track.peak_tflops)
    return estimate(config, ModelFlops.from_model(model), peak, steps_left)


def seconds(config: Config, flops: ModelFlops, peak: float) -> tuple[float, float]:
    """Return the seconds of (a training step, an evaluation) on a device with this peak (FLOP/s)."""
    rollout, held_out = config.rollout, config.eval
    passes = 3 + config.algorithm.kl_in_loss + config.algorithm.kl_in_reward  # forward, backward for inputs and weights
    tokens = rollout.groups_per_step * rollout.group_size * rollout.max_new_tokens / 2
    step = _decoded(config, flops, tokens) + passes * _forward(flops, tokens)
    tokens = held_out.num_tasks * held_out.samples_per_task * (held_out.max_new_tokens or rollout.max_new_tokens) / 2
    return step / (_REACHED * peak), _decoded(config, flops, tokens) / (_REACHED * peak)


def estimate(config: Config, flops: ModelFlops, peak: float, steps_left: int) -> str:
    """Return a line, for a long run with settings for a trial; "" for a short run."""
    step_s, eval_s = seconds(config, flops, peak)
    every = config.eval.every_steps
    evaluations = (config.eval.at_start + 1 + (steps_left // every if every else 0)) * bool(config.eval.num_tasks)
    total_s = steps_left * step_s + evaluations * eval_s
    if total_s < _SHORT_S:
        return ""
    line = (
        f"about {duration(step_s)} a step and {duration(total_s)} in all on this CPU ({peak / 1e9:,.0f} GFLOP/s in"
        f" {config.model.dtype}), if answers have {config.rollout.max_new_tokens // 2} tokens on average"
    )
    options = {key: value for key, value in _TRIAL.items() if getattr(config.rollout, key.split(".")[1]) > value}
    if total_s <= _LONG_S or not options:
        return line
    return f"{line}\nfor a quick trial: " + " ".join(f"--{key} {value}" for key, value in options.items())


def _forward(flops: ModelFlops, tokens: float) -> float:
    return 2 * (flops.linear + flops.head) * tokens


def _decoded(config: Config, flops: ModelFlops, tokens: float) -> float:
    rows = max(1, min(config.engine.max_running, config.rollout.groups_per_step * config.rollout.group_size))
    return _forward(flops, tokens) * max(rows, _FIXED_ROWS) / rows
