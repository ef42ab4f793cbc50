"""`rollover sft` in the real loop: its gradients, resuming, one's own rollouts as examples, and what comes after it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from endings import end, train
from safetensors.torch import load_file

import rollover
import tiny
from local_trainer import build_batch, local_trainer
from rollover.config import AlgorithmConfig, TrainConfig
from rollover.run.supervised import SupervisedExamples, as_group
from rollover.tasks.examples import Example, TokenSpan
from rollover.types import Group, Prompt, Task

SFT: dict[str, Any] = {"batch_examples": 4}
sft = partial(train, verb="sft")
NO_ROLLOUTS = dict.fromkeys(("groups_per_step", "group_size", "in_flight_groups", "interrupt", "max_staleness"))


def write(folder: Path, **tables: Any) -> Path:
    """The recipe of `runs`, which is one of `rollover train`, with 30 examples that answer in digits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "examples.jsonl").open("w") as file:
        for i in range(30):
            file.write(
                json.dumps({"prompt": f"count to {i}", "completion": "".join(map(str, range(i % 8 + 1)))}) + "\n"
            )
    train = {"learning_rate": 3e-3, **tables.pop("train", {})}
    sft = {"path": str(folder / "examples.jsonl"), **SFT, **tables.pop("sft", {})}
    return runs.write(folder, sft=sft, train=train, **tables)


def some_groups() -> list[Group]:
    """Three examples, one with an answer in two turns; and one of two answers to one prompt, which they share."""
    rng = np.random.default_rng(0)

    def ids(num: int) -> np.ndarray:
        return rng.integers(4, 90, num).astype(np.int32)

    task, groups = Task("t", "s", "", prompt=""), []
    for i in range(3):
        parts = [TokenSpan(ids(4 + i), True)]
        if i == 1:
            parts += [TokenSpan(ids(3), False), TokenSpan(ids(5), True)]
        groups.append(as_group(Example(task, Prompt.of(ids(3 + i)), tuple(parts)), i, 0))
    twice = [as_group(Example(task, Prompt.of(range(10, 16)), (TokenSpan(ids(4), True),)), 3, 0) for _ in range(2)]
    twice[1].rollouts[0].sibling, twice[1].rollouts[0].rollout_id = 1, "3-1"
    groups.append(Group(3, task, twice[0].prompt, [g.rollouts[0] for g in twice]))
    return groups


@pytest.mark.parametrize("micro_batch_tokens", [20, 2048])
def test_loss_and_gradients_are_those_of_labels(micro_batch_tokens: int) -> None:
    """transformers' loss with the label -100 outside the answers; packed, and with a shared prompt."""
    model, groups = tiny.model(), some_groups()
    model.set_attn_implementation("eager")
    rows = [
        (list(r.prompt.ids) + r.token_ids(), [-100] * len(r.prompt) + labels)
        for group in groups
        for r in group.rollouts
        for labels in [[int(t) if s.trainable else -100 for s in r.segments for t in s.token_ids]]
    ]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([of + [-100] * (width - len(of)) for _, of in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    expected = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    expected.backward()

    algorithm = AlgorithmConfig(preset="sft")
    train = TrainConfig(micro_batch_tokens=micro_batch_tokens, optimizer="sgd", momentum=0.0, max_grad_norm=0.0)
    trainer = local_trainer(tiny.loaded(), train, algorithm, dtype=torch.float32, max_new_tokens=8)
    found: dict[str, torch.Tensor] = {}
    backend = tiny.local(trainer)
    step = backend.optim_step

    def looking(*args: Any, **kwargs: Any) -> dict[str, float]:
        found.update({n: p.grad.clone() for n, p in backend.model.named_parameters() if p.grad is not None})
        return step(*args, **kwargs)

    backend.optim_step = looking  # pyright: ignore[reportAttributeAccessIssue]
    row = trainer.train_step(build_batch(groups, algorithm))
    assert row["sft/loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert row["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert not any(key.startswith(("mismatch", "importance", "ratio", "clip", "kl")) for key in row)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_a_killed_run_trains_the_same_steps(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seventh step begins the second pass; it ends after the ninth, whose checkpoint is that of the eighth."""
    checkpoint = {"every_steps": 4}
    whole = write(
        tmp_path / "whole", steps=12, checkpoint=checkpoint, sft={"eval_fraction": 0.1, "eval_every_steps": 5}
    )
    code, text = sft(capsys, whole)
    assert code == 0, text
    assert "rollout.group_size = 3" in text and "was reset" in text, "a recipe of `train` is a layer below"
    cut = write(tmp_path / "cut", steps=12, checkpoint=checkpoint, sft={"eval_fraction": 0.1, "eval_every_steps": 5})
    produce = SupervisedExamples.produce

    async def until(producer: SupervisedExamples, step: int, version: int) -> Any:
        return end() if version == 9 else await produce(producer, step, version)

    with monkeypatch.context() as patched:
        patched.setattr(SupervisedExamples, "produce", until)
        assert sft(capsys, cut)[0] == 130
    assert len(runs.rows(tmp_path / "cut")) == 9
    code, text = sft(capsys, cut, "--resume")
    assert code == 0 and "resumed from step-000008" in text, text
    ours, theirs = runs.rows(tmp_path / "cut"), runs.rows(tmp_path / "whole")
    assert [row["step"] for row in ours] == list(range(1, 13))
    for key in ("sft/loss", "grad_norm", "sft/epoch", "sft/examples", "eval/sft_loss"):
        assert [row.get(key) for row in ours] == [row.get(key) for row in theirs], key
    assert [step for step, row in enumerate(ours, start=1) if "eval/sft_loss" in row] == [5, 10, 12]
    a, b = (load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("cut", "whole"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert theirs[-1]["sft/loss"] < theirs[0]["sft/loss"] - 1

    with (tmp_path / "cut" / "examples.jsonl").open("a") as file:
        for number in range(20):  # some are held out
            file.write(json.dumps({"prompt": f"{number} more", "completion": "1"}) + "\n")
    code, text = sft(capsys, cut, "--resume", "--train.num_steps", "14")
    assert code == 2 and "the examples of [sft] are not what they were" in text, text


def test_what_comes_after_it_begins_with_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out tasks are answered before, between and after, by the weights of then; then `train` goes on from them."""
    evaluated = {"num_tasks": 4, "every_steps": 10, "samples_per_task": 4}
    recipe = write(tmp_path, steps=20, eval=evaluated, checkpoint={"every_steps": 0})
    code, text = sft(capsys, recipe, "--train.learning_rate", "0.01")
    assert code == 0, text
    rows = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    assert [row["step"] for row in rows] == [0, 10, 20]
    assert rows[-1]["mean"] > rows[0]["mean"] + 0.05, "share of digits"
    assert runs.rows(tmp_path)[-1]["weights/bytes"] == 0, "the engine gets weights for evaluations alone"
    assert not any(
        key.startswith(("reward/", "staleness/", "advantage/")) for row in runs.rows(tmp_path) for key in row
    )
    train = ("--run.dir", tmp_path / "train", "--model.path", tmp_path / "run" / "model", "--train.num_steps", "1")
    code, text = sft(capsys, recipe, *train, "--sft.path", "", "--sft.batch_examples", "8", verb="train")
    assert code == 0, text
    first = runs.json_lines(tmp_path / "train" / "eval.jsonl")[0]
    assert first["step"] == 0 and first["mean"] == rows[-1]["mean"]


def recorded(folder: Path, rollouts: list[tuple[str, str, float | None, str]]) -> None:
    """A run's records: (task, answer, score, why it stopped) of each rollout, one a group."""
    encode = tiny.tokenizer()
    (folder / "rollouts").mkdir(parents=True)
    lines = []
    for i, (task, answer, score, stop) in enumerate(rollouts):
        ids = encode(answer)["input_ids"] + [1]
        sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        segment = {"policy_version": 3, "num_tokens": len(ids), "stop_reason": stop, "trainable": True}
        lines.append(
            {
                "rollout_id": f"{i}-0", "group_id": i, "sibling": 0, "group_size": 1, "task_id": task, "attempt": 0,
                "source": "s", "reward": "r", "outcome": "trained" if i % 2 else "dropped:filtered", "messages": None,
                "prompt": f"count to {task}", "columns": "{}", "prompt_ids": encode(f"count to {task}")["input_ids"],
                "score": score, "extras": None, "error": None if score is not None else "lost", "stop_reason": stop,
                "segments": [{**segment, "sampling": sampling}], "token_ids": ids, "logprobs": [-1.0] * len(ids),
            }
        )  # fmt: skip
    (folder / "rollouts" / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_own_rollouts_that_pass_are_examples(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(
        tmp_path / "before",
        [
            ("1", "1", 1.0, "eos"),
            ("1", "1", 1.0, "eos"),  # again
            ("1", "11", 2.0, "stop_string"),
            ("1", "111", 1.5, "eos"),  # beyond the best two of its task
            ("2", "2", 0.5, "eos"),  # below the reward
            ("2", "22", 1.0, "length"),  # cut off
            ("2", "222", None, "eos"),  # without a reward
            ("3", "3", 1.0, "env_done"),
        ],
    )
    seen: list[str] = []
    produce = SupervisedExamples.produce

    async def looking(producer: SupervisedExamples, step: int, version: int) -> Any:
        groups = await produce(producer, step, version)
        seen.extend(tiny.tokenizer().decode(r.token_ids()) for g in groups or () for r in g.rollouts)
        return groups

    monkeypatch.setattr(SupervisedExamples, "produce", looking)
    options = {"path": None, "rollouts": str(tmp_path / "before"), "per_task": 2, "batch_examples": 3, "epochs": 2}
    code, text = sft(capsys, write(tmp_path, steps=100, sft=options))
    assert code == 0, text
    assert "of 8 recorded rollouts 3 are examples" in text
    for why in (
        "2 have no reward of 1 or more", "1 did not end by themselves", "1 repeat another",
        "1 are beyond the best 2 of their task",
    ):  # fmt: skip
        assert why in text
    assert sorted(seen) == sorted(["11<eos>", "111<eos>", "3<eos>"] * 2)
    rows = runs.rows(tmp_path)
    assert [row["sft/epoch"] for row in rows] == [1.0, 2.0], "two passes of one step, whatever train.num_steps says"
    assert json.loads((tmp_path / "run" / "config.resolved.json").read_text())["train"]["num_steps"] == 2
    code, text = sft(capsys, tmp_path / "recipe.toml", "--resume")
    assert code == 0 and "train.num_steps" not in text, text


def test_adapters_are_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ("--model.lora.rank", "8", '--model.lora.target_modules=["all-linear"]', "--train.learning_rate", "0.02")
    evaluated = {"num_tasks": 4, "samples_per_task": 2}
    code, text = sft(capsys, write(tmp_path, steps=8, eval=evaluated), *lora)
    assert code == 0, text
    losses = [row["sft/loss"] for row in runs.rows(tmp_path)]
    assert losses[-1] < losses[0] - 0.3
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors").exists()
    assert [row["step"] for row in runs.json_lines(tmp_path / "run" / "eval.jsonl")] == [0, 8]


@pytest.mark.slow
def test_ranks_train_what_one_process_does(tmp_path: Path) -> None:
    options = {"eval_fraction": 0.2}
    for kind in ("local", "ranks"):
        threads = 2 if kind == "ranks" else 1
        recipe = write(tmp_path / kind, steps=3, sft=options, run={"threads": threads}, backend={"type": kind})
        done = runs.rollover("sft", recipe)
        assert done.returncode == 0, done.stderr
    for ours, theirs in zip(runs.rows(tmp_path / "ranks"), runs.rows(tmp_path / "local"), strict=True):
        for key in ("sft/loss", "grad_norm", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key
        assert ours.get("eval/sft_loss") == pytest.approx(theirs.get("eval/sft_loss"), abs=1e-5)


def test_a_program_trains_on_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"count to {i}", "completion": str(i)} for i in range(12)]
    run = rollover.sft(
        model={"path": tiny.save(tmp_path / "model"), "dtype": "float32"}, examples=rows, epochs=3, batch_examples=6,
        learning_rate=1e-3, dir=tmp_path / "run", threads=1, engine={"kv_memory_gb": 0.1}, live="off",
    )  # fmt: skip
    assert run.finished and [row["step"] for row in run.metrics] == list(range(1, 7))
    assert run.metrics[-1]["sft/loss"] < run.metrics[0]["sft/loss"]
    longer = run.resume(num_steps=8, **{"sft.epochs": 0})
    assert [row["step"] for row in longer.metrics] == list(range(1, 9)), "it goes on with the objects that it was given"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sft.path", ""], "there are no examples to train on: set sft.path"),
        (["--sft.path", "nowhere.jsonl"], "sft.path = 'nowhere.jsonl': there is no such file"),
        (
            ["--sft.max_tokens", "4"],
            "no example is left to train: all 30 have more than 4 tokens. Raise sft.max_tokens",
        ),
        (["--sft.eval_fraction", "0.9999"], "all are held out. Lower sft.eval_fraction"),
        (["--sft.rollouts", "."], "sft.rollouts = "),
        (["--rollout.groups_per_step", "5"], "Set sft.batch_examples in its place"),
    ],
)
def test_what_cannot_be_trained_is_said(words: list[str], message: str, tmp_path: Path, capsys, monkeypatch) -> None:
    recipe = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, text = sft(capsys, recipe, *words)
    assert code == 2 and message in text, text


def test_what_is_said_of_a_run_is_about_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it, while it runs and afterwards: no figure of rollouts that there were none of."""
    recipe = write(tmp_path, steps=3, algorithm={"preset": "sft"}, rollout=NO_ROLLOUTS)
    code, text = sft(capsys, recipe, "--dry-run")
    assert code == 0 and "3 steps of 4 examples" in text and "notice" not in text, text
    code, text = sft(capsys, recipe, verb="train")
    assert code == 0 and "step 3/3 | loss" in text and "rollover sft" in text.replace("-m ", ""), text
    assert not any(word in text for word in ("staleness", "reward", "generated")), text
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert '"sft"' in card and "Examples a step | 4" in card and "reinforcement" not in card and "dvantage" not in card
    code, text = sft(capsys, tmp_path / "run", verb="show")
    assert code == 0 and "nats a token of the examples" in text and "staleness" not in text, text


def test_long_examples_are_counted_and_held_out_ones_are_not_trained(tmp_path: Path, capsys) -> None:
    """Of the 30 examples 3 have the longest answer, and 2 are in sft.eval_path, too."""
    held_out = tmp_path / "held_out.jsonl"
    recipe = write(tmp_path, steps=2, sft={"max_tokens": 24, "eval_path": str(held_out)})
    rows = (tmp_path / "examples.jsonl").read_text().splitlines(keepends=True)
    held_out.write_text("".join(rows[:2]) + '{"prompt": "another", "completion": "1"}\n')
    code, text = sft(capsys, recipe)
    assert code == 0 and "sft: 2 examples are not trained, as sft.eval_path has them" in text, text
    skipped = sum(len(f"u:{json.loads(row)['prompt']}\na:{json.loads(row)['completion']}") + 1 > 24 for row in rows)
    assert skipped and f"sft: {skipped} examples of more than 24 tokens are skipped (sft.max_tokens)" in text
    last = runs.rows(tmp_path)[-1]
    assert last["sft/skipped"] == skipped and last["sft/epoch"] == pytest.approx(8 / (28 - skipped))
    assert last["eval/sft_loss"] > 0 and f"{28 - skipped} examples" in text and "3 held out" in text
