"""Model FLOPs utilization of a step: what it computed (models/flops.py) by what its devices could have, in that time.

Owns the peaks of the run's devices, taken once.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollover.config import Config
from rollover.config.backend import is_tinker
from rollover.config.cluster import num_ranks
from rollover.models.devices import dtype_of, engine_device, pick_device
from rollover.models.flops import peak_flops


class Utilization:
    """The utilization of the devices of one run, by step. `overlaps`: whether generation goes on during training."""

    def __init__(self, config: Config, overlaps: bool) -> None:
        self.elsewhere = is_tinker(config)  # on what devices is not told
        if self.elsewhere:
            return
        dtype = dtype_of(config)
        trains_on, generates_on = pick_device(config.model.device), engine_device(config)
        self.overlaps = overlaps
        self.train_peak = self.generate_peak = peak_flops(trains_on, dtype, config.track.peak_tflops)
        if generates_on != trains_on:
            self.generate_peak = peak_flops(generates_on, dtype, config.track.peak_tflops)
        if trains_on.type != "cpu":  # which all processes of a machine share
            self.train_peak *= max(1, num_ranks(config))

    def of_step(self, row: Mapping[str, float], train_flops: float, generate_flops: float) -> dict[str, float]:
        """What trainer and engine computed for the step of this row. Where generation overlaps with training it has the
        whole step's time."""
        if self.elsewhere:
            return {"perf/train_flops": train_flops}
        metrics = {"perf/peak_tflops": self.train_peak / 1e12, "perf/train_flops": train_flops}
        if row["time/train_s"]:
            metrics["perf/mfu_train"] = train_flops / (row["time/train_s"] * self.train_peak)
        seconds = row["time/step_s"] if self.overlaps else row["time/generate_s"]
        if generate_flops and seconds:
            metrics["perf/generate_flops"] = generate_flops
            metrics["perf/mfu_generate"] = generate_flops / (seconds * self.generate_peak)
        return metrics
