"""Supervised training against TRL's SFTTrainer: the loss of every step, on the same examples and weights.

In float32 on the CPU, with SGD, so that the loss of a step is that of the gradients before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from rollover import sft

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

STEPS, EXAMPLES, RATE = 4, 6, 0.02
# As `tiny`'s, with an end of turn, and the mark of what is trained that TRL's assistant_only_loss looks for.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations() -> list[dict[str, Any]]:
    """One turn, two turns, and a system message."""
    rows = []
    for i in range(STEPS * EXAMPLES):
        messages = [said("user", f"count to {i}"), said("assistant", " ".join(map(str, range(1 + i % 9))))]
        if i % 2:
            messages += [said("user", "again"), said("assistant", "no" * (1 + i % 3))]
        rows.append({"messages": [said("system", "be brief"), *messages] if i % 3 else messages})
    return rows


def completions() -> list[dict[str, Any]]:
    return [{"prompt": f"count to {i}", "completion": ": " + "12 3"[: i % 5]} for i in range(STEPS * EXAMPLES)]


def texts() -> list[dict[str, Any]]:
    return [{"text": f"{i} and {i + 1} " * (1 + i % 4)} for i in range(STEPS * EXAMPLES)]


def trl_losses(folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[float]:
    """The loss of each of TRL's steps, whose batches come in the order of the rows."""
    model = tiny.model()
    model.set_attn_implementation("eager")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template, before = TEMPLATE, tokenizer.chat_template
    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=EXAMPLES, learning_rate=RATE,
        lr_scheduler_type="constant", warmup_steps=0, optim="sgd", max_grad_norm=0.0, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential", **options,
    )  # fmt: skip
    try:
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train()
    finally:
        tokenizer.chat_template = before
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("rows", "chat", "options"),
    [
        (conversations(), True, {"assistant_only_loss": True}),
        (completions(), False, {}),
        (texts(), False, {}),
    ],
    ids=["messages", "prompt and completion", "text"],
)
def test_losses_are_those_of_trls_trainer(
    rows: list[dict[str, Any]], chat: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr("random.Random.shuffle", lambda self, numbers: None)
    run = sft(
        model={"path": folder, "dtype": "float32"}, examples=rows, batch_examples=EXAMPLES, num_steps=STEPS,
        chat=chat, run={"dir": tmp_path / "run", "threads": 1}, engine={"kv_memory_gb": 0.1},
        checkpoint={"save_final_model": False, "every_steps": 0}, track={"live": "off"},
        train={"optimizer": "sgd", "momentum": 0.0, "learning_rate": RATE, "max_grad_norm": 0.0,
               "micro_batch_tokens": 128},
    )  # fmt: skip
    ours = [row["sft/loss"] for row in run.metrics]
    theirs = trl_losses(tmp_path, rows, **options)
    assert len(ours) == len(theirs) == STEPS and ours[-1] != ours[0]
    assert ours == pytest.approx(theirs, abs=1e-4), "TRL logs four decimals"
