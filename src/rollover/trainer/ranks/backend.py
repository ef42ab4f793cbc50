"""The backend whose weights, gradients and optimizer are spread over ranks: it carries out each verb on all of them.

    samples ──spread──▶ the ranks' own ──▶ rank, rank, ... ──▶ streams and sums, merged in the order of the ranks

Owns `policy_version` as the ranks have it, and the file through which weights come from there. The weights themselves
are never in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollover.checkpoint.storage import FolderWriter
from rollover.config import Config
from rollover.engine.protocol import ExtendRequest
from rollover.models.devices import dtype_of, pick_device
from rollover.models.limits import Limits
from rollover.models.load import outline_of
from rollover.models.threads import most_threads
from rollover.processes import brief_waiting
from rollover.trainer.backend import TEACHER, BackendSetup, Stream, Version
from rollover.trainer.local_backend import answers_under, write_folder
from rollover.trainer.objective import Counts
from rollover.trainer.packing import row_tokens
from rollover.trainer.ranks.group import Ranks, meet
from rollover.trainer.ranks.local import HOST, LocalRanks
from rollover.trainer.ranks.wire import to_plain
from rollover.trainer.stored_tensors import StoredTensors
from rollover.trainer.tally import Tally
from rollover.trainer.teacher import load_teacher_outline
from rollover.types import Sample, Segment
from rollover.weights.safetensors_stream import WholeFile
from rollover.weights.weights_file import OwnFolder, not_written

_numbers = itertools.count(1)


def start_ranks(config: Config, logs: Path | None = None) -> LocalRanks:
    """The ranks of a configuration on this machine, met. `logs`: see BackendSetup. ValueError where it has not as many
    GPUs."""
    num, device = config.backend.num_ranks, pick_device(config.model.device)
    if device.type == "cuda" and torch.cuda.device_count() < num:
        raise ValueError(
            f"backend.num_ranks = {num}, and there are {torch.cuda.device_count()} CUDA devices, of which each rank"
            " takes one. Set backend.num_ranks to their number"
        )
    devices = [f"cuda:{rank}" if device.type == "cuda" else device.type for rank in range(num)]
    ranks = LocalRanks(num, config.backend.rank_timeout_s, brief_waiting(config.run), logs)
    try:
        threads = max(1, most_threads(config) // num)
        meet(ranks, HOST, devices, threads, config.backend.rank_timeout_s)
    except BaseException:
        ranks.close()
        raise
    return ranks


def make_ranks(setup: BackendSetup) -> RanksBackend:
    """A backend on ranks of its own."""
    ranks = start_ranks(setup.config, setup.logs) if setup.own_ranks is None else setup.own_ranks()
    return RanksBackend(setup, ranks)


class RanksBackend:
    """The `TrainerBackend` over `ranks`, which have met, and end with it. Each verb is documented there.

    `setup.loaded` has tokenizer, configuration and shapes of the model; its weights are never looked at.
    """

    def __init__(self, setup: BackendSetup, ranks: Ranks) -> None:
        config = setup.config
        self.config, self.loaded, self.engine, self.ranks = config, setup.loaded, setup.engine, ranks
        self.policy_version, self._flops = 0, dict.fromkeys(range(ranks.num), 0.0)
        self._limits = self._teacher_limits = Limits.of(setup.loaded.model)
        if config.distill.model_path:
            self._teacher_limits = Limits.of(load_teacher_outline(config, setup.loaded).model)
        self._number = next(_numbers)
        self._folder = OwnFolder(config.engine.weights_dir)
        self._published: Path | None = None
        places = [place for place in sys.path if place]  # where a loss of the user's own may be found
        build = {"config": config.model_dump(mode="json"), "max_staleness": setup.max_staleness, "places": places}
        everyone = dict.fromkeys(range(ranks.num), {"backend": self._number})
        try:
            # Rank 0 reads the weights from a disk, which takes what it takes: nobody waits for it in between.
            loaded = self.ranks.call("load", {rank: of | build for rank, of in everyone.items()}, limited=False)
            self.ranks.call("build", {rank: of | loaded[0] for rank, of in everyone.items()})
        except BaseException:
            self.close()
            raise

    @property
    def flops(self) -> float:
        return sum(self._flops.values())

    def compute_logprobs(self, samples: list[Sample], version: Version | None = None) -> Stream:
        limits = self._teacher_limits if version == TEACHER else self._limits
        parts = [{"samples": part, "version": version} for part in self._spread(samples, limits)]
        return _merged(self._call("compute_logprobs", parts))

    def compute_statistics(self, samples: list[Sample]) -> Stream:
        parts = [{"samples": part} for part in self._spread(samples, self._limits)]
        return _merged(self._call("compute_statistics", parts))

    def compute_values(self, samples: list[Sample]) -> Stream:
        raise ValueError('there is no value head: backend.type = "ranks" has none')

    def forward_backward(self, samples: list[Sample], counts: Counts) -> Tally:
        values = [{"samples": part, "counts": counts} for part in self._spread(samples, self._limits)]
        sums = Tally()
        for found in self._call("forward_backward", values):
            sums.absorb(Tally.of(found["sums"], found["tokens"]))
        return sums

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        return self._call_all("optim_step", rate_scale=rate_scale, divisor=divisor, ends_step=ends_step)

    def forget_gradients(self) -> None:
        self._call_all("forget_gradients")

    async def publish(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Views of a file, which rank 0 has written: a WholeFile."""
        return await asyncio.to_thread(self._gathered)

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        """As LocalBackend's."""
        return await answers_under(self, self.engine, requests)

    def save_checkpoint(self) -> tuple[FolderWriter, dict[str, Any]]:
        def write(folder: str) -> None:
            self._call_all("write_state", folder=folder)

        return write, self._call_all("state_meta")

    def load_checkpoint(self, stored: StoredTensors, meta: dict[str, Any]) -> None:
        self._call_all("read_state", paths=stored.paths, meta=meta)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """As `save_checkpoint`, for programs without a run: all of it, in this process."""
        write, meta = self.save_checkpoint()
        with tempfile.TemporaryDirectory(dir=self._folder.path(0)) as folder:
            write(folder)
            return dict(StoredTensors([str(path) for path in Path(folder).rglob("*.safetensors")])), meta

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder.path(0)) as folder:
            path = os.path.join(folder, "state.safetensors")
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            self.load_checkpoint(StoredTensors([path]), meta)

    def save_model(self, folder: Path) -> None:
        """A folder that transformers' from_pretrained loads, in compute dtype, tokenizer included."""
        outline = outline_of(self.loaded, self.config.model, dtype_of(self.config))
        write_folder(folder, outline, dict(self._gathered(buffers=True)), self.loaded, self.loaded.path)

    def start_profile(self) -> None:
        """Every rank profiles itself from now on."""
        self._call_all("start_profile")

    def stop_profile(self, path: Path) -> None:
        """Every rank writes its profile beside `path`, with its number in the name."""
        names = (path.with_stem(f"{path.stem}-rank-{rank}") for rank in range(self.ranks.num))
        self._call("stop_profile", [{"path": str(name)} for name in names])

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()
        self._folder.close()

    # Private

    def _spread(self, samples: list[Sample], limits: Limits) -> list[list[Sample]]:
        """The samples of each rank. ValueError for one that the model of these limits cannot be given: its rank alone
        would fail, and the others wait for it."""
        for s in samples:
            if s.mask.any():
                limits.check(s.rollout_id, s.prompt_ids, s.token_ids)
        return spread(samples, self.ranks.num)

    def _call(self, verb: str, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        """What each rank found, in their order."""
        asked = {rank: to_plain({**of_rank, "backend": self._number}) for rank, of_rank in enumerate(values)}
        answers = self.ranks.call(verb, asked)
        for rank, answer in answers.items():
            self._flops[rank] = answer["flops"]
        self.policy_version = answers[0]["policy_version"]
        return [answers[rank]["found"] for rank in sorted(answers)]

    def _call_all(self, verb: str, **values: Any) -> Any:
        """What rank 0 found, of a call that is the same for all."""
        return self._call(verb, [values] * self.ranks.num)[0]

    def _gathered(self, *, buffers: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
        """All weights in compute dtype, as views of a file of their own; `buffers`: and what else the model's files
        hold."""
        sizes = sum(p.numel() for p in self.loaded.model.parameters()) * dtype_of(self.config).itemsize
        path = self._folder.path(2 * sizes) / f"published.{next(_numbers)}.safetensors"
        failed = self._call_all("write_weights", path=str(path), buffers=buffers)
        if failed:
            path.unlink(missing_ok=True)
            raise not_written(path.parent, failed)
        if self._published is not None:
            self._published.unlink(missing_ok=True)
        self._published = path
        return WholeFile(path)


def spread(samples: list[Sample], num_ranks: int) -> list[list[Sample]]:
    """The samples of each rank, whole groups in the order in which they came, with about as many tokens each.

    Pure. A group is never cut: its siblings share the copy of their prompt in a row. The largest group first, to the
    rank that has the fewest tokens so far (Graham 1969, "Bounds on Multiprocessing Timing Anomalies": at most 4/3 of
    the best spread). What has no loss token costs nothing, and goes with its group.
    """
    tokens: dict[int, int] = {}
    groups: dict[int, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group_id, []).append(s)
    for group_id, group in groups.items():
        tokens[group_id] = row_tokens([s for s in group if s.mask.any()])
    loads = [0] * num_ranks
    rank_of: dict[int, int] = {}
    for group_id in sorted(groups, key=lambda g: -tokens[g]):  # equal ones in their order
        rank = loads.index(min(loads))
        rank_of[group_id] = rank
        loads[rank] += tokens[group_id]
    return [[s for s in samples if rank_of[s.group_id] == rank] for rank in range(num_ranks)]


def _merged(streams: Sequence[Stream]) -> Stream:
    return {key: values for stream in streams for key, values in stream.items()}
