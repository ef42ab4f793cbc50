"""Report what Rollover does on a GPU: tests, training, decode, whole steps, weight sync and a profile, in some minutes.

    make gpu-report [MINUTES=8] [WHEELS=folder] [OUT=folder]      the interpreter's own packages, no environment
    make gpu-report TINY=1                                        every part on a CPU, at sizes of seconds

Every part runs in a process of its own with a time limit: a crash, a hang or an error ends that part alone, and time
that a part leaves goes to the later ones. OUT/gpu-report.json is written again after every row, OUT/gpu-report.md at
the end; OUT/gpu-report.log has what the parts print. The models have random weights, in the shapes of Qwen3-0.6B and
Qwen2.5-1.5B.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
Say = Callable[[Row], None]

REQUIRED = ("torch", "transformers", "pydantic", "numpy", "safetensors", "tokenizers", "rich", "fsspec")
SHAPES: dict[str, Row] = {
    "0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True, "max_position_embeddings": 40_960,
    },
    "1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936,
        "tie_word_embeddings": True, "max_position_embeddings": 32_768,
    },
}  # fmt: skip
TINY_SHAPES: dict[str, Row] = {
    "tiny": SHAPES["0.6B"]
    | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 1024,
    }
}  # fmt: skip


TURNS = 3  # measured repetitions, after one that warms up
PROFILED_STEPS = 4  # of decoding: a profiler takes longer to tell of more than they took


class Sizes:
    """How much each part does: `tiny` on a CPU in seconds, else on a GPU in minutes."""

    def __init__(self, tiny: bool, models: Path) -> None:
        self.tiny, self.models = tiny, models
        self.shapes = TINY_SHAPES if tiny else SHAPES
        self.first = next(iter(self.shapes))
        self.device, self.dtype = ("cpu", "float32") if tiny else ("cuda", "bfloat16")
        self.tests = ["tests/unit/test_staleness.py"] if tiny else ["-m", "gpu", "tests/gpu"]
        self.sample_tokens = (64, 128) if tiny else (16_384, 4096, 1024)
        self.step_tokens = 256 if tiny else 32_768  # of one training step
        self.micro_batch_tokens = 128 if tiny else 16_384
        self.prompt_tokens = 8 if tiny else 256
        self.sequences = (1, 4) if tiny else (1, 32, 128, 512)
        self.decode_steps = 8 if tiny else 64
        self.kv_memory_gb = 0.1 if tiny else 30.0
        self.copied_bytes = 2**24 if tiny else 2**31
        self.groups, self.group_size, self.answer_tokens = (2, 4, 16) if tiny else (16, 8, 128)
        self.steps = 2 if tiny else 3

    def folder(self, shape: str) -> str:
        """The model of this shape, with random weights and a tokenizer of characters; made at the first call."""
        folder = self.models / shape
        if not folder.exists():
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            from rollover.recipes.toy_model import character_tokenizer

            torch.manual_seed(0)
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(**self.shapes[shape]), dtype=getattr(torch, self.dtype)
                )
            unfinished = Path(tempfile.mkdtemp(dir=self.models))
            model.save_pretrained(unfinished)
            character_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}").save_pretrained(unfinished)
            unfinished.rename(folder)
        return str(folder)

    def config(self, shape: str, *overrides: tuple[str, str]) -> Any:
        """The configuration for the model of this shape."""
        from rollover.config.load import load_config
        from rollover.models.threads import prepare_process

        values = [
            ("model.path", self.folder(shape)), ("model.dtype", self.dtype), ("model.device", self.device),
            ("engine.max_running", str(max(self.sequences))), ("engine.kv_memory_gb", str(self.kv_memory_gb)),
            ("train.micro_batch_tokens", str(self.micro_batch_tokens)),
        ]  # fmt: skip
        config = load_config([], [*values, *overrides], require_sources=False).config
        prepare_process(config)
        return config

    def trainer(self, shape: str, **train: Any) -> Any:
        """A trainer of this shape."""
        from local_trainer import local_trainer
        from rollover.models.devices import dtype_of, pick_device
        from rollover.models.load import load_model

        config = self.config(shape)
        loaded = load_model(config.model, device=pick_device(config.model.device))
        options = config.train.model_copy(update=train)
        return local_trainer(loaded, options, config.algorithm, dtype=dtype_of(config), max_new_tokens=2**20)

    def batch(self, shape: str, sample_tokens: int) -> Any:
        """One step's samples of this length, none of which shares its prompt with another one."""
        from benchmarks import workload
        from rollover.trainer.batch import Batch

        answers = [sample_tokens - self.prompt_tokens] * (self.step_tokens // sample_tokens)
        vocabulary = self.shapes[shape]["vocab_size"]
        return Batch(workload.samples(vocabulary, self.prompt_tokens, answers, 1, shared=False))

    def engine(self, shape: str) -> tuple[Any, float]:
        """(an embedded engine of this shape, bytes of weights that a decode step reads)."""
        from rollover.engine.build import embedded_engine
        from rollover.models.devices import dtype_of, pick_device
        from rollover.models.flops import ModelFlops
        from rollover.models.load import load_model

        config = self.config(shape)
        loaded = load_model(config.model, dtype=dtype_of(config), device=pick_device(config.model.device))
        of = ModelFlops.from_model(loaded.model)
        return embedded_engine(loaded, config, copies=False), (of.linear + of.head) * dtype_of(config).itemsize

    def prompts(self, shape: str, num: int) -> list[tuple[int, ...]]:
        from benchmarks import workload

        return [workload.prompt(self.shapes[shape]["vocab_size"], self.prompt_tokens, i) for i in range(num)]


# Parts: each says its rows, the most telling ones first, as its time limit may cut off the rest.


def attempt(work: Callable[[], Row]) -> Row:
    """A row's figures, or its error: the rows after it are measured all the same."""
    try:
        return work()
    except Exception as error:  # boundary: the report says it
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        _free_memory()


def tests(sizes: Sizes, say: Say) -> None:
    """What `make test-gpu` runs: one row for each failure, then how many passed."""
    import pytest

    outcomes = {"passed": 0, "failed": 0, "skipped": 0}

    class Recorder:
        def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
            say({"progress": f"{_counted(outcomes)}; in {nodeid}"})

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.outcome] += 1
            if report.failed:
                say({"test": report.nodeid, "outcome": "failed", "message": _message(report)})

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                outcomes["failed"] += 1
                say({"test": report.nodeid, "outcome": "failed", "message": _message(report)})

    os.chdir(ROOT)
    code = pytest.main(["-p", "no:cacheprovider", *sizes.tests], plugins=[Recorder()])
    say({"test": "all", "outcome": _counted(outcomes)})
    if code != 0 or not outcomes["passed"]:
        raise AssertionError(f"{_counted(outcomes)} (pytest's exit code: {int(code)})")


def _counted(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{num} {name}" for name, num in outcomes.items())


def _message(report: Any) -> str:
    """The last line that says what went wrong."""
    lines = str(report.longrepr).splitlines() or [""]
    return next((line for line in reversed(lines) if line.startswith("E ")), lines[-1]).removeprefix("E").strip()


def training(sizes: Sizes, say: Say) -> None:
    """Training steps (forward, backward, AdamW) with FlexAttention and the padded way; with gradient checkpointing from
    the first length on for which the memory does not suffice without."""
    import torch

    from benchmarks import machine
    from rollover.models import flex
    from rollover.models.flops import peak_flops

    try_out, reasons, cuda = flex.unusable_reason, set[str](), sizes.device == "cuda"
    peak = peak_flops(torch.device(sizes.device), getattr(torch, sizes.dtype))

    def trying_out(*args: Any) -> str:
        reasons.add(reason := try_out(*args))
        return reason

    def measure(trainer: Any, batch: Any) -> Row:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = trainer.backend.flops
        times = machine.seconds(lambda: trainer.train_step(batch), TURNS)
        flops = (trainer.backend.flops - before) / (TURNS + 1) / statistics.median(times)
        rate, (low, high) = machine.rate(sizes.step_tokens, times)
        return {
            "tokens/s": rate, "lowest": low, "highest": high, "MFU %": 100 * flops / peak,
            "peak GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        }  # fmt: skip

    ways = {"FlexAttention": trying_out, "padded": lambda *args: "the report compares it"}
    if not cuda:
        del ways["FlexAttention"]
    short = set[str]()  # models that need gradient checkpointing
    for attention, unusable_reason in ways.items():
        flex.unusable_reason = unusable_reason
        for shape in sizes.shapes:
            trainer = None
            for sample_tokens in sizes.sample_tokens:
                batch, found = sizes.batch(shape, sample_tokens), {"error": ""}
                reasons.clear()
                for checkpointing in (shape in short, True):
                    if trainer is None:
                        _free_memory()
                        trainer = sizes.trainer(shape, gradient_checkpointing=checkpointing)
                    found = attempt(partial(measure, trainer, batch))
                    if "OutOfMemoryError" not in found.get("error", "") or checkpointing:
                        break
                    trainer = None
                    short.add(shape)
                row = {"model": shape, "tokens a sample": sample_tokens, "attention": attention}
                row["checkpointing"] = "yes" if shape in short else "no"
                if attention == "FlexAttention" and (refused := "; ".join(filter(None, reasons))):
                    row["note"] = f"FlexAttention was refused: {refused}"
                say(row | found)
            del trainer
            _free_memory()


def decode(sizes: Sizes, say: Say) -> None:
    """Decode steps, beside the time in which weights and KV cache could be read."""
    import torch

    from benchmarks import workload

    bandwidth = _copy_bandwidth(torch.device(sizes.device), sizes.copied_bytes)

    def measure(engine: Any, weight_bytes: float, prompts: list[tuple[int, ...]]) -> Row:
        steps = sizes.decode_steps
        steps_s = [workload.decode_seconds(engine, prompts, steps) / steps for _ in range(TURNS + 1)][1:]
        step_s = statistics.median(steps_s)
        context = sizes.prompt_tokens + workload.TOKENS_BEFORE + steps / 2
        bound_s = (weight_bytes + len(prompts) * context * engine.kv_bytes_per_token) / bandwidth
        return {
            "tokens/s": len(prompts) / step_s, "ms a step": 1e3 * step_s, "lowest": 1e3 * min(steps_s),
            "highest": 1e3 * max(steps_s), "% of the bandwidth bound": 100 * bound_s / step_s,
            "copy GB/s": bandwidth / 1e9,
        }  # fmt: skip

    def launches(engine: Any, prompts: list[tuple[int, ...]]) -> Row:
        found = _Profile(with_operators=False)
        workload.decode_seconds(engine, prompts, PROFILED_STEPS, found.around)
        return {"launches a step": found.launches / PROFILED_STEPS}

    for shape in sizes.shapes:
        engine, weight_bytes = sizes.engine(shape)
        for num in sizes.sequences:
            prompts = sizes.prompts(shape, num)
            say({"model": shape, "sequences": num} | attempt(partial(measure, engine, weight_bytes, prompts)))
        few = sizes.sequences[1]
        say({"model": shape, "sequences": few} | attempt(partial(launches, engine, sizes.prompts(shape, few))))
        del engine
        _free_memory()


def whole_steps(sizes: Sizes, say: Say) -> None:
    """Training steps with generation and scores, with the same answer lengths in every mode."""
    import numpy as np

    from benchmarks import step

    drawn = np.random.default_rng(0).lognormal(np.log(sizes.answer_tokens / 4), 0.9, (sizes.groups, sizes.group_size))
    lengths = np.clip(drawn, 2, sizes.answer_tokens).astype(int).tolist()
    config = sizes.config(sizes.first)
    common = {
        "tasks.sources": f"[{{ kind = {json.dumps(f'{__file__}:questions')} }}]",
        "model.device": sizes.device,
        "rollout.groups_per_step": sizes.groups,
        "rollout.group_size": sizes.group_size,
        "rollout.max_new_tokens": sizes.answer_tokens,
        "engine.max_running": 2 * sizes.groups * sizes.group_size,
        "engine.kv_memory_gb": sizes.kv_memory_gb,
        "train.micro_batch_tokens": sizes.micro_batch_tokens,
    }
    rolls_over = {
        "rollout.in_flight_groups": sizes.groups * 3 // 2,
        "rollout.interrupt": "when_enough",
        "rollout.max_staleness": 1,
    }
    overlapped = {"rollout.overlap": "true", "rollout.interrupt": "on_weight_update", "rollout.max_staleness": 1}

    def measure(of_mode: Row) -> Row:
        fill = 3 if of_mode else 1  # steps until what a mode has in flight is of several ages
        overrides = [(key, str(value)) for key, value in (common | of_mode).items()]
        found = step.run_ours(config, overrides, fill + sizes.steps, lengths=lengths)[fill:]
        seconds = [of.seconds for of in found]
        mfu = {key: [of.mfu[key] for of in found if key in of.mfu] for key in step.MFU}
        return {
            "s a step": statistics.median(seconds), "lowest": min(seconds), "highest": max(seconds),
            "trained tokens/s": sum(of.tokens for of in found) / sum(seconds),
            **{f"{key} %".replace("_", " "): 100 * statistics.median(of) for key, of in mfu.items() if of},
        }  # fmt: skip

    for mode, of_mode in (("sync", {}), ("partial", rolls_over), ("overlapped", overlapped)):
        say({"model": sizes.first, "mode": mode} | attempt(partial(measure, of_mode)))


def questions(setup: Any) -> Any:
    """A source of tasks without an end, which needs no data set."""
    from rollover.types import Task

    class Sums:
        def problem(self, index: int) -> Task:
            return Task(str(index), setup.label, "exact_match", prompt=f"{index % 90 + 7} + {index % 70 + 5} =")

    return Sums()


def weight_sync(sizes: Sizes, say: Say) -> None:
    """Weights from the trainer to an engine in this process, and to one in a process of its own."""
    from benchmarks import workload
    from rollover.engine.build import EngineSetup, build_engine
    from rollover.models.devices import pick_device
    from rollover.models.load import load_model
    from rollover.trainer.trainer import build_trainer

    async def hand_over(engine: Any, backend: Any, prompts: Any) -> tuple[int, list[float]]:
        try:
            await workload.extend_all(engine, prompts, [()], 1)  # an engine elsewhere takes weights once it runs
            times, num_bytes = [], 0
            for version in range(1, TURNS + 2):
                started = time.perf_counter()
                num_bytes = (await engine.load_weights(version, await backend.publish())).num_bytes
                _synchronize()
                times.append(time.perf_counter() - started)
            (segment,) = (await workload.extend_all(engine, prompts, [()], 1))[0]
            assert segment.policy_version == TURNS + 1, "the engine has other weights than it was given"
            return num_bytes, times[1:]
        finally:
            await engine.close()

    def measure(shape: str, kind: str) -> Row:
        config = sizes.config(shape, ("engine.kind", kind))
        loaded = load_model(config.model, device=pick_device(config.model.device))
        engine = build_engine(EngineSetup(config, lambda: loaded, 1))
        backend = build_trainer(config, loaded, engine).backend
        num_bytes, times = asyncio.run(hand_over(engine, backend, sizes.prompts(shape, 1)))
        seconds = statistics.median(times)
        return {"s": seconds, "lowest": min(times), "highest": max(times), "GB": num_bytes / 1e9,
                "GB/s": num_bytes / 1e9 / seconds}  # fmt: skip

    for shape in sizes.shapes:
        for kind in ("embedded", "process"):
            say({"model": shape, "engine": kind} | attempt(partial(measure, shape, kind)))


def vllm(sizes: Sizes, say: Say) -> None:
    """What vLLM decodes, with log-probs: the time of some tokens less that of two, so without prefill."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        model=sizes.folder(sizes.first), dtype=sizes.dtype, gpu_memory_utilization=0.6, max_model_len=1024,
        max_num_seqs=max(sizes.sequences), enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip

    def seconds(prompts: Any, new_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    def measure(num: int) -> Row:
        prompts: Any = [{"prompt_token_ids": list(ids)} for ids in sizes.prompts(sizes.first, num)]
        pairs = [[seconds(prompts, n) for n in (2 + sizes.decode_steps, 2)] for _ in range(TURNS + 1)][1:]
        rates = [num * sizes.decode_steps / (many - few) for many, few in pairs]
        return {"tokens/s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}

    for num in reversed(sizes.sequences):
        say({"model": sizes.first, "sequences": num} | attempt(partial(measure, num)))


def profile(sizes: Sizes, say: Say) -> None:
    """The kernels (on a CPU: operators) that take most of a training step and of decode steps."""
    from benchmarks import workload

    def of_training() -> None:
        trainer, batch = sizes.trainer(sizes.first), sizes.batch(sizes.first, sizes.sample_tokens[1])
        trainer.train_step(batch)
        found = _Profile()
        with found.around():
            trainer.train_step(batch)
        found.say_top("a training step", say)

    of_training()
    _free_memory()
    (engine, _), prompts = sizes.engine(sizes.first), sizes.prompts(sizes.first, sizes.sequences[1])
    workload.decode_seconds(engine, prompts, PROFILED_STEPS)
    found = _Profile()
    workload.decode_seconds(engine, prompts, PROFILED_STEPS, found.around)
    found.say_top(f"{PROFILED_STEPS} decode steps", say)


class _Profile:
    """torch's profiler around some work. `with_operators` False: on a GPU without what the CPU does in between."""

    def __init__(self, *, with_operators: bool = True) -> None:
        self.cuda, self.with_operators, self.seconds = _has_cuda(), with_operators, 0.0
        self.events: Any = None

    @contextmanager
    def around(self) -> Iterator[None]:
        import torch
        from torch.profiler import ProfilerActivity

        activities = [ProfilerActivity.CPU] * (self.with_operators or not self.cuda)
        activities += [ProfilerActivity.CUDA] * self.cuda
        with torch.profiler.profile(activities=activities) as profiler:
            started = time.perf_counter()
            yield
            _synchronize()
            self.seconds = time.perf_counter() - started
        self.events = profiler.key_averages()

    @property
    def launches(self) -> int:
        """Kernels and graphs that the host launched; on a CPU 0."""
        return sum(e.count for e in self.events if re.search(r"Launch(Cooperative)?Kernel|GraphLaunch", e.key))

    def say_top(self, step: str, say: Say, num: int = 20) -> None:
        import torch

        events = [(e, e.self_cpu_time_total) for e in self.events]
        if self.cuda:  # what ran there; operators and annotations have the same time once more
            cuda = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
            kernels = [e for e in self.events if e.device_type == cuda and not getattr(e, "is_user_annotation", False)]
            events = [(e, e.self_device_time_total) for e in kernels]
        total_us = sum(us for _, us in events)
        say({"step": step, "kernel": "all", "calls": sum(e.count for e, _ in events), "ms": total_us / 1e3, "%": 100.0,
             "wall ms": 1e3 * self.seconds})  # fmt: skip
        for event, us in sorted(events, key=lambda pair: pair[1], reverse=True)[:num]:
            say({"step": step, "kernel": event.key[:100], "calls": event.count, "ms": us / 1e3,
                 "%": 100 * us / total_us})  # fmt: skip


def _copy_bandwidth(device: Any, num_bytes: int) -> float:
    """Bytes a second, read and written, of the fastest copy of so many bytes."""
    import torch

    from benchmarks import machine

    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(machine.seconds(lambda: target.copy_(source), 10))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free_memory() -> None:
    """Give back what no longer has an owner."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Name, function, share of the time, package without which it is left out.
PARTS: tuple[tuple[str, Callable[[Sizes, Say], None], float, str], ...] = (
    ("tests", tests, 0.22, "pytest"),
    ("training", training, 0.25, ""),
    ("decode", decode, 0.13, ""),
    ("whole steps", whole_steps, 0.18, ""),
    ("weight sync", weight_sync, 0.09, ""),
    ("vLLM", vllm, 0.2, "vllm"),
    ("profile", profile, 0.07, ""),
)


def run_part(name: str, sizes: Sizes, rows: int, parent: int) -> int:
    """In a process of its own: write each row of the part as a line of JSON to the file descriptor `rows`."""
    from rollover.processes import die_with

    die_with(parent)
    part = next(function for of, function, _, _ in PARTS if of == name)
    num_errors = 0
    with os.fdopen(rows, "w") as file:

        def say(row: Row) -> None:
            nonlocal num_errors
            num_errors += "error" in row
            print(json.dumps({key: _plain(value) for key, value in row.items()}), file=file, flush=True)

        try:
            part(sizes, say)
            say({"done": True})
        except (Exception, SystemExit) as error:  # boundary: the report says it, and the next part begins
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
    return int(num_errors > 0)


def _plain(value: Any) -> Any:
    """As JSON and a table can have it: texts of bounded length, and no number that is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.encode("utf-8", "replace").decode()[:2000] if isinstance(value, str) else value


# The report


class Report:
    """What was found so far, as OUT/gpu-report.json has it."""

    def __init__(self, folder: Path, head: Row) -> None:
        self.folder, self.content = folder, head | {"parts": []}
        self.write()

    def write(self) -> None:
        """Replace both files, so that a kill leaves the last whole ones. A full disk is said, and costs no more."""
        for name, text in (("gpu-report.json", json.dumps(self.content, indent=1)), ("gpu-report.md", self.markdown())):
            unfinished = self.folder / f"{name}.{os.getpid()}"
            try:
                unfinished.write_text(text, encoding="utf-8")
                os.replace(unfinished, self.folder / name)
            except OSError as error:
                print(f"gpu-report: {self.folder / name} cannot be written: {error}", file=sys.stderr, flush=True)

    def leave_out(self, name: str, reason: str) -> None:
        self.content["parts"].append({"name": name, "status": "left out", "error": reason, "rows": []})
        self.write()

    def run(self, name: str, command: list[str], environment: dict[str, str], limit_s: float) -> None:
        """Run a part for at most `limit_s`; its rows are in the file as soon as they come."""
        part: Row = {"name": name, "status": "running", "limit_s": round(limit_s), "rows": []}
        self.content["parts"].append(part)
        self.write()
        started = time.monotonic()
        read_end, write_end = os.pipe()
        process: subprocess.Popen[bytes] | None = None
        in_time, done = False, False
        try:
            with open(self.folder / "gpu-report.log", "ab") as log:
                process = subprocess.Popen(
                    [*command, "--rows", str(write_end)], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    env=environment, pass_fds=(write_end,), start_new_session=True,
                )  # fmt: skip
            os.close(write_end)
            in_time, done = self._collect(part, process, read_end, started + limit_s)
        except BaseException:
            part["status"] = "interrupted"
            self.write()
            raise
        finally:
            os.close(read_end)
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started, too
                process.wait()
                for pid in _left_of(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        assert process is not None
        part["seconds"] = round(time.monotonic() - started, 1)
        if not in_time:
            part["status"] = "cut off by its time limit"
        elif process.returncode == 0 and done:
            part["status"] = "passed"
            part.pop("progress", None)
        else:
            part["status"] = "failed"
            if not any("error" in row for row in [part, *part["rows"]]):
                part["error"] = f"exit code {process.returncode}: see gpu-report.log"
        self.write()

    def _collect(
        self, part: Row, process: subprocess.Popen[bytes], read_end: int, deadline: float
    ) -> tuple[bool, bool]:
        """Add rows until the process has ended. Returns (whether it had at `deadline`, whether it said it was done)."""
        begun, done = b"", False
        while (left := deadline - time.monotonic()) > 0:
            ended = process.poll() is not None
            if not select.select([read_end], [], [], 0 if ended else min(left, 0.5))[0]:
                if ended:
                    return True, done
                continue
            if not (data := os.read(read_end, 2**16)):
                if ended:
                    return True, done
                time.sleep(0.05)
                continue
            *lines, begun = (begun + data).split(b"\n")
            for text in lines:
                try:
                    line = json.loads(text)
                except ValueError:  # something else wrote there
                    continue
                if line == {"done": True}:
                    done = True
                elif line.keys() <= {"progress", "error"}:
                    part |= line
                else:
                    part["rows"].append(line)
            self.write()
        return False, done

    def markdown(self) -> str:
        """All of it as tables."""
        head = ", ".join(f"{key} {value}" for key, value in self.content.items() if key != "parts")
        out = [f"GPU report: {head}", ""]
        for part in self.content["parts"]:
            took = f" in {part['seconds']:.0f} s" if "seconds" in part else ""
            notes = [_cell(part[key]) for key in ("progress", "error") if key in part]
            out.append("; ".join([f"**{part['name']}**: {part['status']}{took}", *notes]))
            columns = list(dict.fromkeys(key for row in part["rows"] for key in row))
            if columns:
                out += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
                out += ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in part["rows"]]
            out.append("")
        return "\n".join(out)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return " ".join(str(value).replace("|", "\\|").split())[:300]


def _left_of(session: int) -> list[int]:
    """Processes of a part that has ended: they have the number that the report gave it in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"ROLLOVER_GPU_REPORT={os.getpid()}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid not in (os.getpid(), session)]


def unpack_wheels(wheels: Path, folder: Path) -> None:
    """Unpack every wheel: one with compiled modules cannot be imported as it is. SystemExit where there is none."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"gpu-report: WHEELS={wheels} has no file *.whl. Name a folder of wheels for this Python")
    for wheel in found:
        try:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    path = Path(archive.extract(member, folder))
                    if mode := (member.external_attr >> 16) & 0o777:
                        path.chmod(mode | 0o600)  # programs in wheels stay programs
        except Exception as error:  # boundary: whatever a damaged file does to zipfile
            raise SystemExit(f"gpu-report: {wheel} cannot be unpacked: {error}") from error


# Run by the interpreter of the parts: why each package cannot be imported ("" if it can), and the machine.
LOOK = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        found[name] = ""
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
about = {}
if not found.get("torch", "missing"):
    import torch
    cuda = torch.cuda.is_available()
    about = {"device": torch.cuda.get_device_name() if cuda else "CPU", "cuda": torch.version.cuda or "none",
             "torch": torch.__version__}
if not found.get("transformers", "missing"):
    about["transformers"] = importlib.import_module("transformers").__version__
print(json.dumps([found, about]))
"""


_LOOK_S = 120.0


def look(environment: dict[str, str], optional: Iterable[str]) -> tuple[dict[str, str], Row]:
    """(why each package cannot be imported, "" if it can; device and versions), as the parts will find them."""
    found, about = _imported(REQUIRED, environment)
    for package in optional:  # each by itself, as one may crash or hang at its import
        found |= _imported((package,), environment)[0]
    return found, about


def _imported(packages: Sequence[str], environment: dict[str, str]) -> tuple[dict[str, str], Row]:
    command = [sys.executable, "-P", "-c", LOOK, *packages]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LOOK_S)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"its import took more than {_LOOK_S:.0f} s"
    except (IndexError, ValueError):
        why = f"its import ended the process (exit code {done.returncode})"
    return dict.fromkeys(packages, why), {}


def missing_for(package: str, found: dict[str, str]) -> str:
    """Why a part that needs this package is left out; "" if it is not."""
    return found[package] if package else ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of packages that are missing here")
    parser.add_argument("--tiny", action="store_true", help="every part on a CPU, at sizes of seconds")
    parser.add_argument("--only", help=f"the parts to run, with commas: {', '.join(name for name, *_ in PARTS)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_part(args.part, Sizes(args.tiny, args.models), args.rows, args.parent)
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes {args.minutes:g}: give more than 0")
    names = [name for name, *_ in PARTS]
    chosen = [name.strip() for name in args.only.split(",")] if args.only else names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--only: there is no part {', '.join(unknown)}; parts are {', '.join(names)}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for name in ("log", "md", "json"):
            (args.out / f"gpu-report.{name}").unlink(missing_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error}")
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    for number in (signal.SIGTERM, signal.SIGHUP):  # what was made is removed, and said how far it was
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="rollover-gpu-report-") as folder:
        return report(args, chosen, Path(folder))


def report(args: argparse.Namespace, chosen: list[str], folder: Path) -> int:
    """Run the chosen parts one after the other. Returns the exit code: 1 if one of them failed or was cut off."""
    paths = [str(ROOT / "src"), str(ROOT / "experiments")]
    if args.wheels:
        unpack_wheels(args.wheels, folder / "wheels")
        paths.append(str(folder / "wheels"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ROLLOVER_GPU_REPORT": str(os.getpid()),
    }
    deadline = time.monotonic() + 60 * args.minutes
    (models := folder / "models").mkdir()
    optional = {package for name, _, _, package in PARTS if package and name in chosen}
    found, about = look(environment, sorted(optional))
    if missing := {name: found[name] for name in REQUIRED if found[name]}:
        print(
            f"gpu-report: missing Python packages: {', '.join(missing)}\n"
            + "".join(f"  {name}: {why}\n" for name, why in missing.items())
            + "Install them, or name a folder of their wheels for this Python: make gpu-report WHEELS=folder",
            file=sys.stderr,
        )
        return 2
    if about["device"] == "CPU" and not args.tiny:
        print("gpu-report: torch sees no CUDA device. On a CPU: make gpu-report TINY=1", file=sys.stderr)
        return 2
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    about["driver"] = driver[0] if driver else "none"
    is_ours = _output("git", "rev-parse", "--show-toplevel") == str(ROOT)  # it may lie in another repository
    about["commit"] = (is_ours and _output("git", "rev-parse", "--short", "HEAD")) or "unknown"
    about |= {"date": time.strftime("%Y-%m-%d"), "sizes": "tiny" if args.tiny else "full"}
    out = Report(args.out, about)
    shares = {name: share for name, _, share, package in PARTS if name in chosen and not missing_for(package, found)}
    for name, _, share, package in [part for part in PARTS if part[0] in chosen]:
        if name not in shares:
            out.leave_out(name, f"{package}: {missing_for(package, found)}")
            print(f"gpu-report: {name}: left out, without {package}", file=sys.stderr, flush=True)
            continue
        limit_s = (deadline - time.monotonic()) * share / sum(shares.values())
        del shares[name]
        print(f"gpu-report: {name}: at most {limit_s:.0f} s", file=sys.stderr, flush=True)
        command = [
            sys.executable, __file__, "--part", name, "--models", str(models), "--parent", str(os.getpid()),
            *["--tiny"] * args.tiny,
        ]  # fmt: skip
        out.run(name, command, environment, limit_s)
        print(f"gpu-report: {name}: {out.content['parts'][-1]['status']}", file=sys.stderr, flush=True)
    out.write()
    print(out.markdown())
    statuses = {part["status"] for part in out.content["parts"]}
    return int("passed" not in statuses or not statuses <= {"passed", "left out"})


if __name__ == "__main__":
    sys.exit(main())
