from typing import Literal

from pydantic import Field

from rollover.config.base import Table


class TrackConfig(Table):
    """[track]: what is shown and recorded."""

    live: Literal["auto", "rich", "plain", "off"] = Field(
        default="auto", description="Terminal view: rich on a TTY, plain lines elsewhere (auto)."
    )
    rollouts: bool = Field(default=True, description="Record every trained or dropped rollout under rollouts/ (JSONL).")
    trace: bool = Field(
        default=True, description="Write what happened to every rollout, and when, to trace.jsonl (docs/trace.md)."
    )
    metrics: str = Field(
        default="",
        description="Your own function (module:function or path.py:function) of the groups that a step trains: numbers"
        " by name, which its row of metrics.jsonl has as own/NAME.",
    )
    show_samples: int = Field(default=3, ge=0, description="Answers before and after training shown in the summary.")
    peak_tflops: float = Field(
        default=0.0,
        ge=0,
        description="What one device computes at best, in TFLOP/s (1e12), for perf/mfu_*; 0 = by the name of a known"
        " GPU, else the fastest of a few matrix products at the start.",
    )
