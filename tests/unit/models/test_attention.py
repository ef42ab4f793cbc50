"""Shared prompts: a row that holds each prompt once gives the same log-probs and gradients as full rows."""

from __future__ import annotations

import pytest
import torch

import tiny
from rollover.models.attention import PackedAttention, check_model, hidden_states
from rollover.models.logprobs import Head, chunked_logprobs


def _loss(model, flat: list[int], positions: list[int], attention: PackedAttention, at: list[int], targets: list[int]):
    hidden = hidden_states(model, torch.tensor(flat), torch.tensor(positions), attention)
    logprobs, _ = chunked_logprobs(
        hidden[torch.tensor(at)], Head.from_model(model), torch.tensor(targets), torch.ones(len(at))
    )
    weights = torch.linspace(0.5, 1.5, len(at))
    return logprobs, (logprobs * weights).sum()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_shared_prompt_equals_full_rows(family: str) -> None:
    model = tiny.model(family)
    generator = torch.Generator().manual_seed(5)

    def ids(n: int) -> list[int]:
        return torch.randint(2, 100, (n,), generator=generator).tolist()

    groups = [(ids(11), [ids(7), ids(1), ids(20)]), (ids(1), [ids(3), ids(12)]), (ids(30), [ids(5)])]
    full: tuple[list[int], list[int], list[int], list[int], list[int]] = ([], [], [], [], [])
    shared: tuple[list[int], list[int], list[int], list[int | None]] = ([], [], [], [])
    shared_at: list[int] = []
    for prompt, answers in groups:
        prompt_block, prompt_end = len(shared[2]), len(shared[0]) + len(prompt)
        shared[0].extend(prompt)
        shared[1].extend(range(len(prompt)))
        shared[2].append(len(prompt))
        shared[3].append(None)
        for answer in answers:
            row, start = [*prompt, *answer][:-1], len(full[0])
            full[0].extend(row)
            full[1].extend(range(len(row)))
            full[2].append(len(row))
            full[3].extend(range(start + len(prompt) - 1, start + len(row)))
            full[4].extend(answer)
            shared_at.append(prompt_end - 1)
            if len(answer) > 1:
                shared_at.extend(range(len(shared[0]), len(shared[0]) + len(answer) - 1))
                shared[0].extend(answer[:-1])
                shared[1].extend(range(len(prompt), len(prompt) + len(answer) - 1))
                shared[2].append(len(answer) - 1)
                shared[3].append(prompt_block)
    a, loss_a = _loss(model, full[0], full[1], PackedAttention(full[2]), full[3], full[4])
    grads_a = torch.autograd.grad(loss_a, list(model.parameters()))
    b, loss_b = _loss(model, shared[0], shared[1], PackedAttention(shared[2], shared[3]), shared_at, full[4])
    grads_b = torch.autograd.grad(loss_b, list(model.parameters()))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    for x, y in zip(grads_a, grads_b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5 * float(x.abs().max() + 1), rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.3])
def test_chunked_logprobs_equal_log_softmax_and_its_gradient(softcap: float | None, multiplier: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, requires_grad=True)
    weight = torch.randn(301, 16, requires_grad=True)
    bias = torch.randn(301, requires_grad=True)
    targets, temperature = torch.randint(0, 301, (37,)), torch.rand(37) + 0.5
    got, entropy = chunked_logprobs(
        hidden, Head(weight, bias, softcap, multiplier), targets, temperature, chunk_bytes=4 * 301 * 5
    )
    logits = torch.nn.functional.linear(hidden, weight, bias) * multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    plain = torch.log_softmax(logits / temperature[:, None], -1)
    torch.testing.assert_close(got, plain.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1), atol=1e-4, rtol=1e-4)
    factors = torch.randn(2, 37)
    picked = plain.gather(1, targets[:, None])[:, 0]
    plain_entropy = -(plain.exp() * plain).sum(-1)
    pairs = [((factors[0] * got).sum(), (factors[0] * picked).sum())]  # of the log-probs alone, which has a kernel
    pairs += [(pairs[0][0] + (factors[1] * entropy).sum(), pairs[0][1] + (factors[1] * plain_entropy).sum())]
    for pair in pairs:
        ours, wanted = (torch.autograd.grad(x, (hidden, weight, bias), retain_graph=True) for x in pair)
        for x, y in zip(ours, wanted, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("vocab_size", [2, 5, 9])
def test_a_model_of_few_tokens_is_supported(vocab_size: int) -> None:
    check_model(tiny.model(vocab_size=vocab_size, pad_token_id=0, bos_token_id=0, eos_token_id=1))
