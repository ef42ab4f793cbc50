"""The ranks backend: what every backend does, and its processes."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

import tiny
from contract import ranks_model, trainer_contract
from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError
from rollover.config import Config
from rollover.engine.build import EngineSetup, build_engine
from rollover.functions import FunctionError
from rollover.models.threads import Team
from rollover.process_tree import has_ended
from rollover.trainer.backend import REFERENCE, TEACHER, BackendLost, StoredTensors, Stream, TrainerBackend
from rollover.trainer.batch import Batch
from rollover.trainer.objective import Counts
from rollover.trainer.passes import micro_batches
from rollover.trainer.ranks.backend import RanksBackend, spread, start_ranks
from rollover.trainer.ranks.group import LocalRanks
from rollover.trainer.streams import with_stream
from rollover.trainer.trainer import Trainer
from rollover.types import Sample
from rollover.weights.safetensors_stream import WholeFile
from rollover.weights.weights_file import LockedFolder
from samples import random_samples
from unit.trainer.shard_jobs import digests

# The backend on ranks under the contract, and beside one process: whatever the ranks share, the numbers are those
# of one


SAMPLES = random_samples(3, num_groups=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks_model.model_folder(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LocalRanks]:
    """Two ranks, on which every test makes backends of its own."""
    ranks = start_ranks(ranks_model.config(folder))
    yield ranks
    ranks.close()
    # Backends on ranks of others are not closed: whoever makes a folder removes those that nobody holds any more.
    gc.collect()
    folder_of_none = LockedFolder("")
    folder_of_none.path(0)
    folder_of_none.close()


def largest_difference(ours: Stream, theirs: Stream) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)


@pytest.mark.parametrize("check", trainer_contract.CHECKS, ids=lambda check: check.__name__)
def test_ranks_are_a_backend(check, folder: Path, two: LocalRanks) -> None:
    def backend() -> RanksBackend:
        of = ranks_model.config(folder)
        setup = ranks_model.setup(of)
        engine = build_engine(EngineSetup(of, lambda: setup.loaded, 1))
        return RanksBackend(dataclasses.replace(setup, engine=engine), two)

    asyncio.run(check(trainer_contract.Subject(backend, SAMPLES)))


def uneven(num: int) -> list[Sample]:
    """A group of `num` micro-batches, and one of a single one: each goes to a rank of its own."""
    long = dataclasses.replace(
        random_samples(7, 1, 1)[0],
        token_ids=np.arange(2, 42, dtype=np.int32),
        mask=np.ones(40, bool),
        streams={
            "behavior_logprobs": np.full(40, -4.6, np.float32),
            "versions": np.zeros(40, np.int32),
            "advantages": np.linspace(-1, 1, 40, dtype=np.float32),
        },
    )
    rows = [dataclasses.replace(long, rollout_id=f"0-{i}", sequence_id="") for i in range(num)]
    return rows + [s for s in random_samples(5, 2) if s.group_id == 1]


@pytest.mark.parametrize("num", [4, 0])
def test_ranks_with_unequal_micro_batches_train_as_one_process(num: int, folder: Path, two: LocalRanks) -> None:
    samples = uneven(num)
    parts = [len(list(micro_batches(part, 60))) for part in spread(samples, 2)]
    assert parts == ([4, 1] if num else [1, 0])
    # AdamW divides a gradient by its own size: of one near 0 the rounding is worth a share of the learning rate.
    of = ranks_model.config(folder, train={"learning_rate": 2e-3})
    ranks, local = ranks_model.pair(of, two)
    for _ in range(5):
        assert largest_difference(ranks.compute_logprobs(samples), local.compute_logprobs(samples)) < 1e-5
        ours, theirs = (b.forward_backward(samples, Counts.from_samples(samples)).totals() for b in (ranks, local))
        assert ours["sum/loss"] == pytest.approx(theirs["sum/loss"], abs=1e-5)
        assert ours["count/tokens"] == theirs["count/tokens"] == Counts.from_samples(samples).tokens
        update, expected = ranks.optim_step(), local.optim_step()
        assert update["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5) and update["grad_norm"] > 0
    published, weights = (dict(asyncio.run(b.publish())) for b in (ranks, local))
    assert published.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(published[name], weight, rtol=0, atol=1e-5)
    assert ranks.flops == local.flops


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_other_optimizers_train_and_resume_on_ranks(optimizer: str, folder: Path, two: LocalRanks, tmp_path) -> None:
    of = ranks_model.config(folder, train={"optimizer": optimizer}, algorithm={"kl_coef": 0.1})
    ranks, local = ranks_model.pair(of, two)
    before = local.compute_logprobs(SAMPLES)
    for backend in (ranks, local):
        for _ in range(2):
            step(backend)
    expected = local.compute_logprobs(SAMPLES)
    # Muon iterates in bfloat16 over sums that ranks add in another order.
    tolerance = 1e-2 if optimizer == "muon" else 1e-5
    assert largest_difference(expected, before) > 10 * tolerance
    assert largest_difference(ranks.compute_logprobs(SAMPLES), expected) < tolerance
    store = CheckpointStore(str(tmp_path), keep=2)
    meta = write(store, "step-000002", ranks)
    again = RanksBackend(ranks_model.setup(of), two)
    again.load_checkpoint(StoredTensors(files(store, "step-000002")), meta)
    assert step(again) == step(ranks)
    assert digests(again.save_state()[0]) == digests(ranks.save_state()[0])
    local.load_state(StoredTensors(files(store, "step-000002")), meta)
    assert local.policy_version == 2


def test_epochs_and_their_early_stop_are_those_of_one_process(folder: Path, two: LocalRanks) -> None:
    train = {"minibatches_per_step": 2, "epochs_per_step": 3, "max_kl": 0.05, "adam_eps": 1e-3}
    of = ranks_model.config(folder, train=train, rollout={"groups_per_step": 4})
    samples, made = random_samples(4, num_groups=4), []
    trainers = [Trainer(backend, of, Team()) for backend in ranks_model.pair(of, two)]
    for _ in range(3):
        found, expected = (trainer.train_step(Batch(samples)) for trainer in trainers)
        made.append(found["train/updates"])
        assert found["train/updates"] == expected["train/updates"]
        for name in ("kl/step_start", "loss", "grad_norm", "ratio/max"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert any(1 < num < 6 for num in made), made
    logprobs = [trainer.backend.compute_logprobs(samples) for trainer in trainers]
    assert largest_difference(*logprobs) < 1e-4


def test_what_is_told_of_each_token_is_that_of_one_process(folder: Path, two: LocalRanks) -> None:
    algorithm = {"correction": "token_truncate", "correction_cap": 1.5, "rejection": {"token_k2": 3.0}}
    of = ranks_model.config(folder, algorithm=algorithm, rollout={"groups_per_step": 4})
    samples = random_samples(4, num_groups=4)
    trainers = [Trainer(backend, of, Team()) for backend in ranks_model.pair(of, two)]
    for trainer in trainers:
        trainer.train_step(Batch(samples))
    for s in samples:
        found, expected = (trainer.token_stats[s.rollout_id] for trainer in trainers)
        assert np.array_equal(found.mask, expected.mask) and np.array_equal(found.rejected, expected.rejected)
        for name in ("importance_weights", "loss_weights", "entropies"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours == pytest.approx(theirs, rel=1e-3, nan_ok=True) and not np.isnan(ours).all(), name


def test_bfloat16_logprobs_are_those_of_one_process_bit_for_bit(folder: Path, two: LocalRanks) -> None:
    """Also after an update: what an output layer was made of is not taken for what it is made of now."""
    ranks, local = ranks_model.pair(ranks_model.config(folder, dtype="bfloat16"), two)
    parts = spread(SAMPLES, 2)
    for _ in range(2):
        expected = {k: v for part in parts for k, v in local.compute_logprobs(part).items()}
        assert largest_difference(ranks.compute_logprobs(SAMPLES), expected) == 0.0
        ranks.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
        ranks.optim_step()
        published = dict(asyncio.run(ranks.publish()))
        with torch.no_grad():
            for name, parameter in local.model.named_parameters():
                assert published[name].dtype == torch.bfloat16
                parameter.copy_(published[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_and_earlier_versions_are_the_kept_weights(dtype: str, folder: Path, two: LocalRanks) -> None:
    of = ranks_model.config(
        folder,
        dtype=dtype,
        algorithm={"kl_coef": 0.1, "proximal": "snapshot", "correction": "token_truncate"},
        rollout={"max_staleness": 2, "in_flight_groups": 9},
    )
    ranks = RanksBackend(ranks_model.setup(of), two)
    seen = []
    for _ in range(3):
        seen.append(ranks.compute_logprobs(SAMPLES))
        ranks.forward_backward(with_stream(SAMPLES, "reference_logprobs", seen[0]), Counts.from_samples(SAMPLES))
        ranks.optim_step()
    now = ranks.compute_logprobs(SAMPLES)
    assert all(largest_difference(a, b) > 1e-3 for a, b in zip(seen, [*seen[1:], now], strict=True))
    for version, logprobs in enumerate(seen):
        assert largest_difference(ranks.compute_logprobs(SAMPLES, version), logprobs) == 0.0
    assert largest_difference(ranks.compute_logprobs(SAMPLES), now) == 0.0, "and the current ones are back"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_reference_is_spread_and_refreshed(dtype: str, folder: Path, two: LocalRanks, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", seed=1)
    algorithm = {"kl_coef": 0.1, "reference_path": str(other), "reference_refresh_steps": 2, "reference_mixup": 0.3}
    ranks, local = ranks_model.pair(ranks_model.config(folder, dtype=dtype, algorithm=algorithm), two)
    plain = ranks_model.pair(ranks_model.config(other, dtype=dtype), two)[0]
    theirs = plain.compute_logprobs(SAMPLES)
    for version in range(3):
        found = ranks.compute_logprobs(SAMPLES, REFERENCE)
        assert (largest_difference(found, theirs) == 0.0) == (version < 2)
        assert largest_difference(found, local.compute_logprobs(SAMPLES, REFERENCE)) < (
            1e-4 if dtype == "float32" else 0.2
        )
        for backend in (ranks, local):
            backend.forward_backward(with_stream(SAMPLES, "reference_logprobs", found), Counts.from_samples(SAMPLES))
            backend.optim_step()
    state = ranks.save_state()[0]
    kept = {name for name in state if name.startswith("kept/reference/")}
    assert kept and {state[name].dtype for name in kept} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_model_as_teacher_is_spread_and_frozen(dtype: str, folder: Path, two: LocalRanks, tmp_path) -> None:
    other = tiny.save(tmp_path / "other", seed=1)
    of = ranks_model.config(folder, dtype=dtype, distill={"teacher": str(other)})
    ranks, local = ranks_model.pair(of, two)
    told = [dataclasses.replace(s, prompt_ids=np.array([5, 6, *s.prompt_ids], np.int32)) for s in SAMPLES]
    first = ranks.compute_logprobs(told, TEACHER)
    assert largest_difference(first, local.compute_logprobs(told, TEACHER)) < (1e-5 if dtype == "float32" else 0.1)
    assert ranks.flops == pytest.approx(local.flops, rel=0.1), "micro-batches that share other prompts"
    for backend in (ranks, local):
        backend.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
        backend.optim_step()
    assert largest_difference(ranks.compute_logprobs(told, TEACHER), first) == 0.0
    assert largest_difference(ranks.compute_logprobs(told), first) > 0.01, "the policy is another model"
    long = dataclasses.replace(SAMPLES[0], prompt_ids=np.zeros(100_000, np.int32))
    with pytest.raises(ValueError, match="positions"):
        ranks.compute_logprobs([long], TEACHER)


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("qwen3", "bfloat16", {"tie_word_embeddings": False}),
        ("gemma3_text", "float32", {}),
    ],
)
def test_other_families_and_recomputed_activations_train_as_in_one_process(
    family: str, dtype: str, changes: dict[str, bool], two: LocalRanks, tmp_path: Path
) -> None:
    """An output layer of its own; buffers that are in no file; four layers, in two kinds."""
    folder = tiny.save(tmp_path / family, family, **changes)
    of = ranks_model.config(folder, dtype=dtype, train={"gradient_checkpointing": True, "learning_rate": 1e-3})
    ranks, local = ranks_model.pair(of, two)
    atol = 1e-5 if dtype == "float32" else 0.03
    for step in range(2):
        parts = spread(SAMPLES, 2)
        expected = {k: v for part in parts for k, v in local.compute_logprobs(part).items()}
        assert largest_difference(ranks.compute_logprobs(SAMPLES), expected) <= (atol if step else 0.0)
        ours, theirs = (b.forward_backward(SAMPLES, Counts.from_samples(SAMPLES)).totals() for b in (ranks, local))
        assert ours["sum/loss"] == pytest.approx(theirs["sum/loss"], abs=atol)
        assert ranks.optim_step()["grad_norm"] == pytest.approx(local.optim_step()["grad_norm"], rel=max(1e-4, atol))


def test_what_the_model_cannot_be_given_is_refused_and_the_ranks_go_on(folder: Path, two: LocalRanks) -> None:
    ranks = RanksBackend(ranks_model.setup(ranks_model.config(folder)), two)
    wrong = dataclasses.replace(SAMPLES[0], token_ids=np.full_like(SAMPLES[0].token_ids, 5000))
    with pytest.raises(ValueError, match="rollout 0-0: token 0 of its answer is 5000"):
        ranks.forward_backward([wrong, *SAMPLES[1:]], Counts.from_samples(SAMPLES))
    assert ranks.compute_logprobs(SAMPLES).keys() == {s.rollout_id for s in SAMPLES if s.mask.any()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_saved_as_one_process_saves_it(dtype: str, folder: Path, two: LocalRanks, tmp_path: Path) -> None:
    ranks, local = ranks_model.pair(ranks_model.config(folder, dtype=dtype), two)
    ranks.save_model(tmp_path / "ranks")
    local.save_model(tmp_path / "local")
    names = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == names
    for name in names:
        if name.endswith(".json"):
            assert (tmp_path / "ranks" / name).read_text() == (tmp_path / "local" / name).read_text(), name
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("ranks", "local"))
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_what_a_models_files_hold_beside_its_weights_is_saved_and_used_by_all_ranks(two: LocalRanks, tmp_path) -> None:
    of = ranks_model.config(tiny.save_routed(tmp_path / "model"), dtype="bfloat16")
    ranks, local = ranks_model.pair(of, two)
    expected = {k: v for part in spread(SAMPLES, 2) for k, v in local.compute_logprobs(part).items()}
    assert largest_difference(ranks.compute_logprobs(SAMPLES), expected) == 0.0
    ranks.save_model(tmp_path / "ranks")
    local.save_model(tmp_path / "local")
    ours, theirs = (safetensors.torch.load_file(tmp_path / n / "model.safetensors") for n in ("ranks", "local"))
    assert ours.keys() == theirs.keys() and sum("e_score_correction_bias" in name for name in ours) == 1
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


# Checkpoints


def keeping(folder: Path, dtype: str = "float32") -> Config:
    """With weights that are kept beside the current ones."""
    algorithm = {"kl_coef": 0.1, "proximal": "snapshot", "correction": "token_truncate"}
    rollout = {"max_staleness": 2, "in_flight_groups": 9}
    return ranks_model.config(folder, dtype=dtype, algorithm=algorithm, rollout=rollout)


def step(backend: TrainerBackend) -> dict[str, float]:
    reference = backend.compute_logprobs(SAMPLES, 0)
    backend.forward_backward(with_stream(SAMPLES, "reference_logprobs", reference), Counts.from_samples(SAMPLES))
    return backend.optim_step()


def write(store: CheckpointStore, name: str, backend: RanksBackend) -> dict[str, Any]:
    """A checkpoint of the backend alone; what JSON holds of it, as JSON has it."""
    shards, meta = backend.save_checkpoint()
    store.write(name, {}, [("trainer-", shards)])
    return json.loads(json.dumps(meta))


def files(store: CheckpointStore, name: str) -> list[str]:
    return list(store.open(name).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_and_one_process_resume_each_other_exactly(dtype: str, folder: Path, two: LocalRanks, tmp_path) -> None:
    of = keeping(folder, dtype)
    ranks, local = ranks_model.pair(of, two)
    for _ in range(2):
        step(ranks)
    store = CheckpointStore(str(tmp_path / "checkpoints"), keep=2)
    meta, written = write(store, "step-000002", ranks), digests(ranks.save_state()[0])
    kinds = {"master", "exp_avg", "exp_avg_sq", "kept", "random"}
    assert {name.partition("/")[0] for name in written} == kinds
    lying = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in lying if path.name != "COMMITTED"} == {".safetensors", ".json"}

    local.load_state(StoredTensors(files(store, "step-000002")), meta)
    theirs, meta_again = local.save_state()
    assert digests(theirs) == written and meta_again == meta and local.policy_version == 2

    again = RanksBackend(ranks_model.setup(of), two)
    again.load_checkpoint(StoredTensors(files(store, "step-000002")), meta)
    assert again.policy_version == 2 and step(again) == step(ranks)
    assert digests(again.save_state()[0]) == digests(ranks.save_state()[0])

    step(local)
    theirs, meta = local.save_state()
    assert digests(theirs) != written
    safetensors.torch.save_file({k: t.contiguous() for k, t in theirs.items()}, tmp_path / "trainer-all.safetensors")
    again.load_checkpoint(StoredTensors([str(tmp_path / "trainer-all.safetensors")]), meta)
    assert digests(again.save_state()[0]) == digests(theirs) and again.policy_version == 3


def test_the_full_disk_of_a_rank_is_said_and_the_ranks_go_on(folder: Path, two: LocalRanks, tmp_path: Path) -> None:
    ranks = RanksBackend(ranks_model.setup(keeping(folder)), two)
    store = CheckpointStore(str(tmp_path), keep=2)
    write(store, "step-000001", ranks)
    step(ranks)
    largest = resource.prlimit(two.pids[1], resource.RLIMIT_FSIZE)
    resource.prlimit(two.pids[1], resource.RLIMIT_FSIZE, (1000, largest[1]))
    try:
        with pytest.raises(CheckpointWriteError, match=r"step-000002 could not be written.*too large \(rank 1\)"):
            write(store, "step-000002", ranks)
    finally:
        resource.prlimit(two.pids[1], resource.RLIMIT_FSIZE, largest)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    meta = write(store, "step-000002", ranks)
    assert meta["policy_version"] == 1 and store.list() == ["step-000001", "step-000002"]


OWN_LOSS = """
def loss(t):
    return -t.advantages_BT * t.logprobs_BT, t.mask_BT & False

def fails(t):
    if t.mask_BT.shape[1] > 3:  # not when it is tried out
        raise RuntimeError("mine")
    return loss(t)
"""


def test_own_loss_is_found_by_ranks_and_named_if_it_fails(folder: Path, two: LocalRanks, tmp_path, monkeypatch) -> None:
    (tmp_path / "loss_for_ranks.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    ranks, local = ranks_model.pair(ranks_model.config(folder, algorithm={"loss": "loss_for_ranks:loss"}), two)
    for backend in (ranks, local):
        backend.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
    assert ranks.optim_step()["grad_norm"] == pytest.approx(local.optim_step()["grad_norm"], rel=1e-5)
    of = ranks_model.config(folder, algorithm={"loss": "loss_for_ranks:fails"})
    failing = RanksBackend(ranks_model.setup(of), two)
    with pytest.raises(FunctionError, match="algorithm.loss = 'loss_for_ranks:fails' failed: RuntimeError: mine"):
        failing.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
    assert len(ranks.compute_logprobs(SAMPLES)) == len(SAMPLES), "as all refused alike, they go on"


def test_a_full_disk_under_the_weights_file_is_said_and_the_ranks_go_on(folder: Path, two: LocalRanks) -> None:
    ranks = RanksBackend(ranks_model.setup(ranks_model.config(folder)), two)
    expected = {name: tensor.clone() for name, tensor in asyncio.run(ranks.publish())}
    largest = resource.prlimit(two.pids[0], resource.RLIMIT_FSIZE)
    resource.prlimit(two.pids[0], resource.RLIMIT_FSIZE, (20_000, largest[1]))
    try:
        with pytest.raises(ValueError, match=r"could not be written to .*too large.*engine.weights_dir"):
            asyncio.run(ranks.publish())
    finally:
        resource.prlimit(two.pids[0], resource.RLIMIT_FSIZE, largest)
    published = asyncio.run(ranks.publish())
    again = dict(published)
    assert isinstance(published, WholeFile), "servers get the file as it is"
    assert again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in again)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="/proc is Linux's")
def test_ranks_listen_on_this_machine_alone(two: LocalRanks) -> None:
    for pid in two.pids:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists() or link.is_symlink()]
        own = {link.removeprefix("socket:[").removesuffix("]") for link in links}
        tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [row.split() for table in tables for row in table.splitlines()]
        addresses = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own}
        assert addresses == {"0100007F"}


def test_a_state_of_another_model_is_refused_and_the_ranks_go_on(folder: Path, two: LocalRanks, tmp_path: Path) -> None:
    ranks = RanksBackend(ranks_model.setup(ranks_model.config(folder)), two)
    tensors, meta = ranks.save_state()
    tensors = {name: t for name, t in tensors.items() if "embed" not in name}
    with pytest.raises(ValueError, match=r"of another model .*embed_tokens.weight differs"):
        ranks.load_state(tensors, meta)
    assert step(ranks)["grad_norm"] > 0


# A rank that is killed or frozen ends all of them, and says so; so does one whose parent ends


PROCESS_SAMPLES = random_samples(3, num_groups=4)
LIMIT_S = 60.0  # of a machine with other things to do
LOOK_S = 0.02
MOST_S = 5.0  # from the death of a rank to that of the others


def wait_until(what: Callable[[], bool]) -> float:
    """Seconds until `what` is so, of a machine that does nothing else: as many naps as this thread took until then.
    Where there is more to do, all that is waited for takes longer, and so do they."""
    started, naps = time.monotonic(), 0
    while not what():
        assert time.monotonic() - started < LIMIT_S
        time.sleep(LOOK_S)
        naps += 1
    return naps * LOOK_S


@pytest.fixture
def idle() -> Iterator[LocalRanks]:
    ranks = LocalRanks(3, 60.0)
    yield ranks
    ranks.close()


def test_a_rank_that_ends_between_two_calls_takes_the_others_with_it(idle: LocalRanks) -> None:
    os.kill(idle.pids[1], signal.SIGKILL)
    assert wait_until(lambda: all(map(has_ended, idle.pids))) < MOST_S
    for _ in range(2):
        with pytest.raises(BackendLost, match="rank 1 of 3 was killed by SIGKILL .*: the other 2 were ended"):
            idle.call("listen", {0: {"host": "127.0.0.1"}})


def test_ranks_end_when_they_are_closed(idle: LocalRanks) -> None:
    idle.close()
    assert all(map(has_ended, idle.pids))
    with pytest.raises(BackendLost, match="the ranks were ended"):
        idle.call("listen", {0: {"host": "127.0.0.1"}})


@pytest.mark.parametrize("calling", [False, True])
def test_ranks_that_were_all_stopped_are_noticed(calling: bool) -> None:
    """Nobody of them can tell; nor where one of them is called alone, or what is asked may take its time."""
    ranks = LocalRanks(2, 1.0)
    try:
        for pid in ranks.pids:
            os.kill(pid, signal.SIGSTOP)
        if not calling:
            wait_until(lambda: all(map(has_ended, ranks.pids)))
        with pytest.raises(BackendLost, match=r"rank \d of 2 was stopped, and did not continue within 1 s"):
            ranks.call("listen", {0: {"host": "127.0.0.1"}}, limited=False)
        wait_until(lambda: all(map(has_ended, ranks.pids)))
    finally:
        ranks.close()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_that_the_others_wait_for_is_noticed(frozen: bool, tmp_path: Path) -> None:
    """A killed one at once; one that is frozen, and so keeps its connections, after the time limit."""
    timeout_s = 5.0 if frozen else 10 * LIMIT_S
    of = ranks_model.config(ranks_model.model_folder(tmp_path), backend={"rank_timeout_s": timeout_s})
    ranks = start_ranks(of, tmp_path / "logs")
    try:
        backend = RanksBackend(ranks_model.setup(of), ranks)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread, pytest.raises(BackendLost) as lost:
            step = thread.submit(backend.forward_backward, PROCESS_SAMPLES, Counts.from_samples(PROCESS_SAMPLES))
            if not frozen:
                time.sleep(0.5)  # the other one waits for it by then
                os.kill(ranks.pids[1], signal.SIGKILL)
                assert wait_until(step.done) + wait_until(lambda: all(map(has_ended, ranks.pids))) < MOST_S
            step.result()
        wait_until(lambda: all(map(has_ended, ranks.pids)))
        with pytest.raises(BackendLost):
            backend.forget_gradients()
    finally:
        ranks.close()
    if frozen:
        told = ("rank 0 of 2 failed (", "rank 1 of 2 did not answer within 5 s", "rank 1 of 2 was stopped")
        assert any(how in str(lost.value) for how in told), lost.value
    else:
        assert str(lost.value).startswith("rank 1 of 2 was killed by SIGKILL (in forward_backward): ")
        assert str(lost.value).endswith(f"({tmp_path / 'logs' / 'rank-1.log'})")
