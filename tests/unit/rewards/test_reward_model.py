"""The reward model: against transformers' own answer for each row alone, whatever the batch and the padding."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

import tiny
from rollover.config import RewardsConfig
from rollover.rewards.built_in import make_function, make_spec
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.types import Task

CLASSES = {"sequence": LlamaForSequenceClassification, "token": LlamaForTokenClassification}


def saved(folder: Path, kind: str = "sequence", num_labels: int = 1, template: bool = False) -> Path:
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=1, eos_token_id=1, max_position_embeddings=512,
    )  # fmt: skip
    config.num_labels = num_labels
    if num_labels == 2:
        config.id2label = {0: "bad", 1: "good"}
    CLASSES[kind](config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not template:
        for file in folder.glob("chat_template*"):
            file.unlink()
    return folder


def item(completion: str, prompt: Any = "q: 1+1?") -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "completion_ids": [], "columns": {}, "source": "s"}


COMPLETIONS = ["2", "it is two, I think", "", "2" * 60, "two"]


def alone(folder: Path, kind: str, texts: list[str]) -> list[torch.Tensor]:
    """Logits of each text by itself, of its last token."""
    model = CLASSES[kind].from_pretrained(folder).eval()
    out = []
    for text in texts:
        ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits
        out.append(logits[0] if kind == "sequence" else logits[0, -1])
    return out


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_each_row_has_the_score_that_it_has_alone(tmp_path: Path, kind: str, batch_tokens: int) -> None:
    folder = saved(tmp_path / "m", kind)
    score = make_function("reward_model", {"path": str(folder), "kind": kind, "batch_tokens": batch_tokens}, ".")
    found = score([item(text) for text in COMPLETIONS])
    expected = [float(row[0]) for row in alone(folder, kind, ["q: 1+1?" + text for text in COMPLETIONS])]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in found}) == len(found)


def test_of_several_labels_the_logprob_of_one(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", num_labels=2)
    (found,) = make_function("reward_model", {"path": str(folder), "label": "good"}, ".")([item("2")])
    assert found == pytest.approx(float(alone(folder, "sequence", ["q: 1+1?2"])[0].log_softmax(-1)[1]), abs=1e-5)


def test_messages_by_its_own_chat_template(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", template=True)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    whole = tiny.tokenizer().apply_chat_template([*messages, {"role": "assistant", "content": "A"}], tokenize=False)
    (found,) = make_function("reward_model", {"path": str(folder)}, ".")([item("A", messages)])
    assert found == pytest.approx(float(alone(folder, "sequence", [str(whole)])[0][0]), abs=1e-5)
    (plain,) = make_function("reward_model", {"path": str(folder), "chat": False}, ".")([item("A", messages)])
    assert plain == pytest.approx(float(alone(folder, "sequence", ["SQA"])[0][0]), abs=1e-5)


def test_reward_model_skips_too_long_texts(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    task = Task("t", "s", make_spec("reward_model", {"path": str(folder), "max_tokens": 40}), prompt="q: 1+1?")

    async def main() -> list[Any]:
        pool = RewardPool(RewardsConfig(num_workers=1, timeout_s=120, startup_timeout_s=300))
        try:
            return await pool.score([ScoreRequest(task, text) for text in COMPLETIONS])
        finally:
            await pool.close()

    rewards = asyncio.run(main())
    assert [reward.score is None for reward in rewards] == [False, False, False, True, False]
    assert "67 tokens, and max_tokens is 40" in str(rewards[3].error)


def test_damaged_reward_model_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    weights["score.weight"][0, 0] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="reward_model: .* cannot be loaded: .*score.weight has a number that is not"):
        make_function("reward_model", {"path": str(path)}, ".")
    (path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match="reward_model: .* cannot be loaded: TypeError"):
        make_function("reward_model", {"path": str(path)}, ".")


@pytest.mark.parametrize(
    ("changes", "num_labels", "why"),
    [
        ({"kind": "pair"}, 1, "kind = 'pair': expected one of sequence, token"),
        ({"dtype": "int8"}, 1, "dtype = 'int8'"),
        ({"label": "good"}, 1, "of a model with one number"),
        ({}, 2, "set label to one of bad, good"),
        ({"kind": "token"}, 1, "it is no model of this kind"),
        ({"path": "nowhere/at/all"}, 1, "nowhere/at/all cannot be loaded"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path: Path, changes: dict[str, Any], num_labels: int, why: str) -> None:
    path = tmp_path / "m"
    if changes.get("kind") == "token":  # of a language model, which has no value head
        tiny.save(path)
    else:
        saved(path, num_labels=num_labels)
    with pytest.raises(ValueError, match="reward_model") as error:
        make_function("reward_model", {"path": str(path)} | changes, ".")
    assert why in str(error.value)
