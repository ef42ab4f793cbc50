"""The backend whose weights, gradients and optimizer are spread over ranks: it calls each verb on all of them.

    samples ──spread──▶ the ranks' own ──▶ rank, rank, ... ──▶ streams and sums, merged in the order of the ranks

Owns the ranks' `policy_version`, and the file through which their weights come. The weights themselves are never in
this process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollover.checkpoint.storage import FolderWriter
from rollover.config import Config
from rollover.engine.protocol import ExtendRequest
from rollover.models.devices import dtype_of, pick_device
from rollover.models.load import ModelLimits, make_outline
from rollover.models.save import write_folder
from rollover.models.threads import most_threads
from rollover.processes import brief_waiting
from rollover.trainer.auxiliary_models import load_teacher_outline
from rollover.trainer.backend import TEACHER, BackendSetup, RunBackend, StoredTensors, Stream, Version
from rollover.trainer.local_backend import sample_with
from rollover.trainer.objective import Counts, Tally
from rollover.trainer.passes import row_tokens
from rollover.trainer.ranks.group import HOST, LocalRanks, Ranks, rendezvous
from rollover.trainer.ranks.wire import to_plain
from rollover.types import Sample, Segment
from rollover.weights.safetensors_stream import WholeFile
from rollover.weights.weights_file import LockedFolder, no_room_error

_numbers = itertools.count(1)


def start_ranks(config: Config, logs: Path | None = None) -> LocalRanks:
    """Start connected ranks on this machine. `logs`: see BackendSetup. ValueError for too few GPUs."""
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
        rendezvous(ranks, HOST, devices, threads, config.backend.rank_timeout_s)
    except BaseException:
        ranks.close()
        raise
    return ranks


def make_ranks(setup: BackendSetup) -> RanksBackend:
    """Make a backend on new ranks."""
    ranks = start_ranks(setup.config, setup.logs) if setup.make_ranks is None else setup.make_ranks()
    return RanksBackend(setup, ranks)


class RanksBackend(RunBackend):
    """The `RunBackend` over connected `ranks`, which close with it. The protocol documents each verb.

    `setup.loaded` has tokenizer, configuration and shapes of the model; its weights are not used.
    """

    def __init__(self, setup: BackendSetup, ranks: Ranks) -> None:
        config = setup.config
        self.config, self.loaded, self.engine, self.ranks = config, setup.loaded, setup.engine, ranks
        self._version, self._flops = 0, dict.fromkeys(range(ranks.num), 0.0)
        self._limits = self._teacher_limits = ModelLimits.from_model(setup.loaded.model)
        if config.distill.model_path:
            self._teacher_limits = ModelLimits.from_model(load_teacher_outline(config, setup.loaded).model)
        self._number = next(_numbers)
        self._folder = LockedFolder(config.engine.weights_dir)
        self._published: Path | None = None
        places = [place for place in sys.path if place]  # where a custom loss may be imported from
        build = {"config": config.model_dump(mode="json"), "places": places}
        everyone = dict.fromkeys(range(ranks.num), {"backend": self._number})
        try:
            # Rank 0 reads the weights from a disk: no time limit.
            loaded = self.ranks.call("load", {rank: of | build for rank, of in everyone.items()}, limited=False)
            self.ranks.call("build", {rank: of | loaded[0] for rank, of in everyone.items()})
        except BaseException:
            self.close()
            raise

    @property
    def policy_version(self) -> int:
        return self._version

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
            sums.absorb(Tally.from_vectors(found["sums"], found["tokens"]))
        return sums

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        return self._call_all("optim_step", rate_scale=rate_scale, divisor=divisor, ends_step=ends_step)

    def forget_gradients(self) -> None:
        self._call_all("forget_gradients")

    async def publish(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return views of a file that rank 0 wrote: a WholeFile."""
        return await asyncio.to_thread(self._gathered)

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        """Sample with the engine of the backend (`sample_with`)."""
        return await sample_with(self, self.engine, requests)

    def save_checkpoint(self) -> tuple[FolderWriter, dict[str, Any]]:
        def write(folder: str) -> None:
            self._call_all("write_state", folder=folder)

        return write, self._call_all("state_meta")

    def load_checkpoint(self, stored: StoredTensors, meta: dict[str, Any]) -> None:
        self._call_all("read_state", paths=stored.paths, meta=meta)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Collect the whole state of `save_checkpoint` in this process, for programs without a run."""
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
        """Write a folder that from_pretrained loads, in compute dtype, tokenizer included."""
        outline = make_outline(self.loaded, self.config.model, dtype_of(self.config))
        write_folder(folder, outline, dict(self._gathered(buffers=True)), self.loaded, self.loaded.path)

    @contextmanager
    def profiled(self, path: Path) -> Iterator[None]:
        """Profile every rank, each to a file beside `path` with its number in the name."""
        self._call_all("start_profile")
        yield
        names = (path.with_stem(f"{path.stem}-rank-{rank}") for rank in range(self.ranks.num))
        self._call("stop_profile", [{"path": str(name)} for name in names])

    def close(self) -> None:
        """Close the ranks."""
        self.ranks.close()
        self._folder.close()

    # Private

    def _spread(self, samples: list[Sample], limits: ModelLimits) -> list[list[Sample]]:
        """Spread the samples over the ranks.

        ValueError for one that exceeds the model's limits: its rank alone would fail, and the others wait for it.
        """
        for s in samples:
            if s.mask.any():
                limits.check(s.rollout_id, s.prompt_ids, s.token_ids)
        return spread(samples, self.ranks.num)

    def _call(self, verb: str, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Call the verb on all ranks; return their results in order."""
        calls = {rank: to_plain({**of_rank, "backend": self._number}) for rank, of_rank in enumerate(values)}
        answers = self.ranks.call(verb, calls)
        for rank, answer in answers.items():
            self._flops[rank] = answer["flops"]
        self._version = answers[0]["policy_version"]
        return [answers[rank]["found"] for rank in sorted(answers)]

    def _call_all(self, verb: str, **values: Any) -> Any:
        """Call the verb with equal values on all ranks; return the result of rank 0."""
        return self._call(verb, [values] * self.ranks.num)[0]

    def _gathered(self, *, buffers: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
        """Return all weights in compute dtype, as views of a new file.

        `buffers`: also the buffers that the model's files hold.
        """
        sizes = sum(p.numel() for p in self.loaded.model.parameters()) * dtype_of(self.config).itemsize
        path = self._folder.path(2 * sizes) / f"published.{next(_numbers)}.safetensors"
        failed = self._call_all("write_weights", path=str(path), buffers=buffers)
        if failed:
            path.unlink(missing_ok=True)
            raise no_room_error(path.parent, failed)
        if self._published is not None:
            self._published.unlink(missing_ok=True)
        self._published = path
        return WholeFile(path)


def spread(samples: list[Sample], num_ranks: int) -> list[list[Sample]]:
    """Spread samples over ranks: whole groups in their order, with about as many tokens for each rank.

    Pure. A group is never split: its siblings share the copy of their prompt in a row. The largest group first, to the
    rank with the fewest tokens so far (Graham 1969, "Bounds on Multiprocessing Timing Anomalies": at most 4/3 of the
    optimum). Samples without a loss token cost nothing, and go with their group.
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
