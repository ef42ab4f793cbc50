"""The reward `reward_model`: a Hugging Face sequence classifier, or a model with one value per token, scores prompt and
completion. Each reward worker loads it in its own process, on the given device.

Shapes: B rows of a batch, T tokens of the longest, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rollover.types import content_text

Kind = Literal["sequence", "token"]


def reward_model(  # noqa: PLR0913 - the parameters of the reward
    path: str,
    kind: Kind = "sequence",
    label: str = "",
    revision: str = "",
    device: str = "cpu",
    dtype: str = "float32",
    batch_tokens: int = 8192,
    max_tokens: int = 4096,
    chat: bool = True,
    trust_remote_code: bool = False,
    base_dir: str = ".",
) -> Callable[[Sequence[dict[str, Any]]], list[Any]]:
    """Return the reward function of a group's items. ValueError for a model of another kind.

    path: a folder, or an id of the hub. kind: sequence (AutoModelForSequenceClassification) scores by its number, or
    with several labels by the log-probability of `label`; token (AutoModelForTokenClassification) by the value of the
    last token, as in verl. batch_tokens: of a forward pass, padding included. max_tokens: longer texts are not scored.
    chat: format prompt and completion by the model's chat template, if it has one; else as one text.
    """
    what = "the reward reward_model"
    import torch
    import transformers

    from rollover.models.load import check_finite

    classes = {
        "sequence": transformers.AutoModelForSequenceClassification,
        "token": transformers.AutoModelForTokenClassification,
    }
    if kind not in classes:
        raise ValueError(f"{what}: kind = {kind!r}: expected one of {', '.join(classes)}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"{what}: dtype = {dtype!r}: expected float32 or bfloat16")
    where = str(Path(base_dir) / path) if (Path(base_dir) / path).is_dir() else path
    options = {"revision": revision or None, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        model, loading = classes[kind].from_pretrained(
            where, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, **options
        )
        check_finite(model.named_parameters())
    except Exception as error:  # boundary: a damaged file raises errors of any kind
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{what}: {path} cannot be loaded: {type(error).__name__}: {reason}") from error
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"{what}: {path} has no {missing[0]}, which scores: it is no model of this kind")
    index = _index_of(model.config, kind, label, what)
    model = model.to(device).eval()

    def score(items: Sequence[dict[str, Any]]) -> list[Any]:
        rows = [_ids(item, tokenizer, chat=chat) for item in items]
        scores: list[Any] = [
            {"error": f"{what}: {len(row)} tokens, and max_tokens is {max_tokens}"} if len(row) > max_tokens else None
            for row in rows
        ]
        for batch in _batches([i for i, s in enumerate(scores) if s is None], rows, batch_tokens):
            for i, value in zip(batch, values_of(model, [rows[i] for i in batch], kind, index), strict=True):
                scores[i] = value
        return scores

    return score


def values_of(model: Any, rows: Sequence[Sequence[int]], kind: Kind, index: int | None) -> list[float]:
    """Return the score of each row of token ids. `index`: of the label; None: the model has one number."""
    import torch

    longest, last = max(map(len, rows)), {row[-1] for row in rows}
    # A classifier takes the last token that is not padding: no row may end with the padding token.
    padding = next(token for token in range(len(last) + 1) if token not in last)
    ids_BT = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=model.device)
    lengths_B = torch.tensor([len(row) for row in rows], device=model.device)
    mask_BT = torch.arange(longest, device=model.device) < lengths_B[:, None]
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = padding
    with torch.no_grad():
        logits = model(input_ids=ids_BT, attention_mask=mask_BT.long()).logits.float()
    if kind == "token":
        return logits[torch.arange(len(rows), device=model.device), lengths_B - 1, 0].tolist()
    return (logits[:, 0] if index is None else logits.log_softmax(-1)[:, index]).tolist()


def _index_of(config: Any, kind: Kind, label: str, what: str) -> int | None:
    """Return the index of the label; None: the model has one number. ValueError if they do not match."""
    if config.num_labels == 1:
        if label:
            raise ValueError(f"{what}: label = {label!r} of a model with one number. Remove it")
        return None
    names = [str(config.id2label[i]) for i in range(config.num_labels)]
    if kind == "token":
        raise ValueError(f"{what}: the model has {len(names)} numbers a token, and a value is one")
    if label not in names:
        raise ValueError(f"{what}: the model has several labels: set label to one of {', '.join(names)}")
    return names.index(label)


def _ids(item: dict[str, Any], tokenizer: Any, *, chat: bool) -> list[int]:
    """Encode prompt and completion in the model's training format."""
    prompt = item["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(_as_text, prompt))
    if chat and getattr(tokenizer, "chat_template", None):
        whole = [*messages, {"role": "assistant", "content": item["completion"]}]
        ids = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=True)["input_ids"]
    else:
        text = "".join(message["content"] for message in messages) + item["completion"]
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise ValueError("prompt and completion have no token")
    return list(ids)


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": content_text(message["content"])}


def _batches(indices: list[int], rows: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Batch rows of similar length, within `batch_tokens`. A longer row is a batch of its own."""
    batches: list[list[int]] = []
    for i in sorted(indices, key=lambda i: len(rows[i])):
        if batches and (len(batches[-1]) + 1) * len(rows[i]) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
