"""The consistent cut: who is in a checkpoint, in which files, and what comes back of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from rollover.algorithms.shaping import Shaping
from rollover.checkpoint.store import CheckpointStore
from rollover.config import Config, RewardsConfig
from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Lifecycle, RunClock
from rollover.run import checkpointing
from rollover.run.checkpointing import Snapshot, StatefulComponent, load_snapshot, stateful_components, without_arrays
from rollover.tasks.reroll import Reroll
from rollover.track.lifetimes import Lifetimes
from rollover.track.trace import Trace
from rollover.trainer.backend import StoredTensors
from rollover.trainer.batch import BatchBuilder
from rollover.trainer.reuse import Reuse
from rollover.types import Prompt, Reward, StopReason, Task
from unit.rollout.world import make_segment, make_task, same_rollout

CONFIG = Config.model_validate({
    "rollout": {"groups_per_step": 1, "group_size": 2, "in_flight_groups": 3, "interrupt": "when_enough",
                "max_staleness": 2, "max_new_tokens": 20},
    "algorithm": {"advantage": "dr_grpo", "correction_cap": 2.0},
    "replay": {"size": 4, "max_staleness": 3},
})  # fmt: skip


class Trainer:
    """As much of the trainer as a snapshot asks for."""

    def __init__(self, version: int = 0) -> None:
        self.policy_version = version
        self.tensors: dict[str, torch.Tensor] = {}
        self.loaded = False
        self.backend = self
        self.reward_kl = None

    def save_checkpoint(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return self.tensors, {"policy_version": self.policy_version}

    def load_checkpoint(self, stored: StoredTensors, meta: dict[str, Any]) -> None:
        self.loaded, self.tensors, self.policy_version = True, dict(stored), meta["policy_version"]


class ShardedTrainer(Trainer):
    """One whose processes write slices of its tensors, and which reads what it wants of those of a checkpoint."""

    read: tuple[str, ...] = ()

    def save_checkpoint(self) -> tuple[Callable[[str], None], dict[str, Any]]:
        def write(folder: str) -> None:
            for kind in {name.partition("/")[0] for name in self.tensors}:
                of_kind = {name: t.contiguous() for name, t in self.tensors.items() if name.startswith(f"{kind}/")}
                Path(folder, kind).mkdir()
                safetensors.torch.save_file(of_kind, Path(folder, kind, "1.safetensors"))

        return write, {"policy_version": self.policy_version}

    def load_checkpoint(self, stored: StoredTensors, meta: dict[str, Any]) -> None:
        self.loaded, self.tensors, self.policy_version = True, dict(stored), meta["policy_version"]
        self.read = tuple(stored.paths)


class Prompts:
    max_prompt_tokens = 100

    def __init__(self, cursor: int = 0) -> None:
        self.cursor = cursor

    def rewarded(self, task: Task) -> Task:
        return task

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]


class Run(SimpleNamespace):
    """As much of a run as has a state, and its directory."""

    def stateful(self) -> list[StatefulComponent]:
        parts: Any = self
        return stateful_components(parts, parts.producer)


def write_snapshot(of: Run) -> str:
    snapshot = Snapshot.begin(of.stateful(), of.directory, of.trainer.policy_version)
    snapshot.write(of.directory.store)
    return snapshot.name


def restore(of: Run) -> None:
    load_snapshot("step-000003", of.stateful(), of.directory)


class Sink:
    def __init__(self, store: CheckpointStore) -> None:
        self.store, self.checkpoints_when_synced = store, []

    def sync(self) -> None:
        self.checkpoints_when_synced.append(self.store.list())


def new_run(folder: Path, version: int = 0, seconds: float = 0.0) -> Run:
    store = CheckpointStore(str(folder), keep=2)
    clock = SimpleNamespace(now=0.0)
    run_clock, lifetimes = RunClock(lambda: clock.now), Lifetimes()
    config = RolloutConfig.model_validate(CONFIG.rollout.model_dump())
    clock.now = seconds
    return Run(
        trainer=Trainer(version),
        lifecycle=Lifecycle(config, listeners=[lifetimes.on_event], clock=run_clock),
        prompts=Prompts(),
        directory=SimpleNamespace(store=store, metrics=Sink(store), evals=Sink(store)),
        trace=Trace(run_clock),
        lifetimes=lifetimes,
        reuse=Reuse(CONFIG, Reroll(CONFIG.reroll, CONFIG.train.num_steps, lambda: None)),
        producer=Prompts(),
        batches=SimpleNamespace(shaping=Shaping(RewardsConfig(running_norm="scale"), 9)),
    )


def worked(folder: Path) -> Run:
    """A run at version 3: one group trained and kept for replay, one half-written, one that has not begun."""
    of = new_run(folder, version=3, seconds=12.5)
    lifecycle, rng = of.lifecycle, random.Random(0)
    for i in range(3):
        lifecycle.admit(make_task(i), Prompt((1, 2, 3)), 2)
    for rollout in lifecycle.start(2)[:4]:
        stop = StopReason.EOS if rollout.group_id == 0 else StopReason.PAUSED
        complete = lifecycle.append(rollout, [make_segment(rng.randint(2, 9), 2, stop)])
        if complete is not None:
            lifecycle.set_rewards(complete, [Reward(1.0), Reward(0.0)])
    for rollout in lifecycle.cache.running():
        lifecycle.park(rollout)
    groups = lifecycle.consume(2)
    of.reuse.after_step(groups, BatchBuilder(CONFIG, of.reuse.buffer).build(groups, 2), 2)
    of.prompts.cursor = 3
    of.producer.cursor = 4
    generator = torch.Generator().manual_seed(0)
    of.trainer.tensors = {
        "master/layer.weight": torch.randn(3, 4, generator=generator).T,  # not contiguous
        "master/bias": torch.randn(5, generator=generator),
        "exp_avg/bias": torch.randn(5, generator=generator).bfloat16(),
        "random/cpu": torch.get_rng_state(),
    }
    return of


def test_everything_comes_back(tmp_path: Path) -> None:
    before = worked(tmp_path)
    assert write_snapshot(before) == "step-000003"
    files = before.directory.store.open("step-000003")
    assert set(files) == {
        "state.json", "rollouts.safetensors", "replay.safetensors",
        "trainer-master.safetensors", "trainer-exp_avg.safetensors", "trainer-random.safetensors",
    }  # fmt: skip
    assert safetensors.torch.load_file(files["trainer-exp_avg.safetensors"]).keys() == {"exp_avg/bias"}

    after = new_run(tmp_path)
    restore(after)
    assert after.trainer.policy_version == 3 and after.prompts.state_dict() == {"cursor": 3}
    assert after.producer.state_dict() == {"cursor": 4}
    ours, theirs = (of.trainer.save_checkpoint()[0] for of in (before, after))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)
    held, again = (of.lifecycle.cache.groups for of in (before, after))
    assert list(again) == list(held) == [1, 2]
    assert all(same_rollout(a, b) for i in held for a, b in zip(held[i].rollouts, again[i].rollouts, strict=True))
    assert after.lifecycle.metrics() == before.lifecycle.metrics()
    assert after.lifecycle.metrics()["tokens/generated"] > after.lifecycle.metrics()["tokens/trained"] > 0
    assert [r.rollout_id for r in after.lifecycle.start(3)] == [r.rollout_id for r in before.lifecycle.start(3)]
    (kept,) = after.reuse.buffer.kept
    assert kept.group.group_id == 0 and after.reuse.metrics() == before.reuse.metrics()
    assert after.lifecycle.clock.seconds() == 12.5 and after.lifecycle.clock.version == 3
    assert after.lifetimes.state_dict() == before.lifetimes.state_dict()


@pytest.mark.parametrize("saved_by", [Trainer, ShardedTrainer])
@pytest.mark.parametrize("read_by", [Trainer, ShardedTrainer])
def test_checkpoint_is_readable_with_any_number_of_processes(
    tmp_path: Path, saved_by: type[Trainer], read_by: type[Trainer]
) -> None:
    before, after = worked(tmp_path), new_run(tmp_path)
    tensors = before.trainer.tensors
    before.trainer, after.trainer = saved_by(3), read_by()
    before.trainer.tensors = tensors
    files = before.directory.store.open(write_snapshot(before))
    middle = "/1" if saved_by is ShardedTrainer else ""
    of_trainer = {f"trainer-{kind}{middle}.safetensors" for kind in ("master", "exp_avg", "random")}
    assert {name for name in files if name.startswith("trainer-")} == of_trainer
    restore(after)
    assert after.trainer.loaded and after.trainer.policy_version == 3
    assert after.trainer.tensors.keys() == tensors.keys() and type(after.trainer.tensors) is dict
    assert all(torch.equal(after.trainer.tensors[name], tensors[name]) for name in tensors)
    if isinstance(after.trainer, ShardedTrainer):
        assert set(after.trainer.read) == {files[name] for name in of_trainer}


def test_metrics_are_synced_before_the_checkpoint(tmp_path: Path) -> None:
    of = worked(tmp_path)
    write_snapshot(of)
    sinks: list[Any] = [of.directory.metrics, of.directory.evals]
    assert [sink.checkpoints_when_synced for sink in sinks] == [[[]], [[]]]
    assert of.directory.store.list() == ["step-000003"]


def test_another_format_is_refused_before_anything_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshot(worked(tmp_path))
    was = checkpointing.FORMAT
    monkeypatch.setattr(checkpointing, "FORMAT", was + 1)
    after = new_run(tmp_path)
    with pytest.raises(ValueError, match=f"checkpoint step-000003 has format {was}, .*reads {was + 1}"):
        restore(after)
    assert after.trainer.loaded is False
    assert not after.lifecycle.cache.groups and after.prompts.state_dict() == {"cursor": 0}


def rewritten(store: CheckpointStore, change: Any) -> None:
    """The checkpoint again, with another state.json: its hashes are right."""
    files = {name: Path(path).read_bytes() for name, path in store.open("step-000003").items()}
    state = json.loads(files["state.json"])
    change(state)
    store.write("step-000003", files | {"state.json": json.dumps(state).encode()})


def test_a_checkpoint_from_before_replay_and_trace_is_read(tmp_path: Path) -> None:
    write_snapshot(worked(tmp_path))
    after = new_run(tmp_path, seconds=99.0)
    rewritten(after.directory.store, lambda state: (state.pop("reuse"), state.pop("chronicle")))
    restore(after)
    assert after.trainer.policy_version == 3 and list(after.lifecycle.cache.groups) == [1, 2]
    assert not len(after.reuse.buffer) and after.lifecycle.clock.seconds() == 0.0


def test_accounts_that_do_not_balance_are_noticed(tmp_path: Path) -> None:
    write_snapshot(worked(tmp_path))
    after = new_run(tmp_path)

    def lose_a_token(state: dict[str, Any]) -> None:
        state["ledger"]["generated_tokens"] += 1

    rewritten(after.directory.store, lose_a_token)
    with pytest.raises(AssertionError):
        restore(after)


def test_a_part_that_joins_is_one_line_of_the_list(tmp_path: Path) -> None:
    """Its state comes back, and of a checkpoint from before it was there it has its default."""
    of, joined = worked(tmp_path), Prompts(7)
    snapshot = Snapshot.begin(
        [*of.stateful(), without_arrays("joined", joined.state_dict, joined.load_state_dict)], of.directory, 3
    )
    assert json.loads(cast(bytes, snapshot.files["state.json"]))["joined"] == {"cursor": 7}
    write_snapshot(of)
    part = without_arrays("joined", joined.state_dict, joined.load_state_dict, {"cursor": 1})
    load_snapshot("step-000003", [*new_run(tmp_path).stateful(), part], of.directory)
    assert joined.cursor == 1
