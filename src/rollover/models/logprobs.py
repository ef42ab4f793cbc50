"""Token log-probs from hidden states, without ever holding [tokens, vocabulary] whole.

Shapes: N tokens, C tokens of a chunk, E hidden size, V vocabulary. Owns the definition that engine and trainer share:
log softmax(logits / T) over the full vocabulary, in float32 except for the matmul of bfloat16 weights (ShiftedHead on a
CPU; a GPU's matmul returns its float32 sums).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rollover.models import kernels
from rollover.models.packed import ShiftedHead, float32_product
from rollover.models.vision import placeholder_ids

# Bytes of float32 logits at once: fits a CPU's cache, and keeps a GPU busy.
CHUNK_BYTES = 64 * 2**20
_CHUNK_BYTES_ON_GPU = 512 * 2**20
# A logit whose probability is 0. An infinite one would make 0 x infinity in entropies and gradients.
_NEVER = -1e9


@dataclass(frozen=True)
class Head:
    """The output layer: logits = softcap(hidden @ weight^T * multiplier + bias).

    `float32_sums`: bfloat16 weights whose products are not rounded. `never`: ids of image placeholders, which have
    probability 0: an answer cannot show an image.
    """

    weight_VE: torch.Tensor
    bias_V: torch.Tensor | None
    softcap: float | None
    multiplier: float
    shifted: ShiftedHead | None = None
    float32_sums: bool = False
    never: tuple[int, ...] = ()

    @classmethod
    def from_model(cls, model: Any) -> Head:
        """Return the head of a Hugging Face causal LM, with Gemma's softcap, Granite's and Cohere's scales."""
        linear = model.get_output_embeddings()
        config = model.config.get_text_config()
        multiplier = 1.0
        if getattr(config, "logits_scaling", None):
            multiplier = 1.0 / config.logits_scaling
        if getattr(config, "logit_scale", None):
            multiplier = config.logit_scale
        # peft wraps the linear layer when an adapter sits on it.
        linear = getattr(linear, "base_layer", linear)
        softcap, never = getattr(config, "final_logit_softcapping", None), placeholder_ids(model.config)
        return cls(linear.weight, linear.bias, softcap, multiplier, never=never)

    def precise(self, rows: int | None = None) -> Head:
        """Return a head without autograd whose logits are precise enough for log-probs, also with bfloat16 weights.

        On a CPU that needs a copy of them. `rows`: pack it for about this many tokens at a time. A softcap depends on
        the absolute logit, so capped logits are computed in float32, as with float32 weights.
        """
        weight_VE, bias_V = self.weight_VE.detach(), None if self.bias_V is None else self.bias_V.detach()
        narrow = weight_VE.dtype == torch.bfloat16
        if narrow and self.softcap is None and weight_VE.device.type != "cuda":
            return replace(self, weight_VE=weight_VE, bias_V=bias_V, shifted=ShiftedHead(weight_VE, bias_V, rows))
        bias_V = None if bias_V is None else bias_V.float()
        if narrow and weight_VE.device.type == "cuda":
            return replace(self, weight_VE=weight_VE, bias_V=bias_V, float32_sums=True)
        return replace(self, weight_VE=weight_VE.float(), bias_V=bias_V)

    @cached_property
    def kept(self) -> Head:
        """`precise()` of the weights at the first call; TrainedHead makes a new head when they change."""
        return self.precise()

    def logits(self, hidden_CE: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [C, V], before the temperature; if shifted, up to a constant per row."""
        return self.narrow_logits(hidden_CE).float()

    def narrow_logits(self, hidden_CE: torch.Tensor) -> torch.Tensor:
        """Return `logits` in the dtype in which they are computed."""
        if self.shifted is not None:
            logits_CV = self.shifted(hidden_CE)
        elif self.float32_sums:
            logits_CV = float32_product(hidden_CE.to(self.weight_VE.dtype), self.weight_VE.T)
            if self.bias_V is not None:
                logits_CV += self.bias_V
        else:
            logits_CV = torch.nn.functional.linear(hidden_CE.to(self.weight_VE.dtype), self.weight_VE, self.bias_V)
        if self.multiplier != 1.0:
            logits_CV = logits_CV.float() * self.multiplier
        if self.softcap is not None:
            logits_CV = self.softcap * torch.tanh(logits_CV.float() / self.softcap)
        if self.never:
            logits_CV[:, list(self.never)] = _NEVER
        return logits_CV


class TrainedHead:
    """The head of a model in training: `Head.precise` copies after a change of the weights, not at every micro-batch.

    A change is detected by the tensors' memory and autograd's count of changes in place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._of: list[tuple[int, int]] = []
        self._memory: list[torch.Tensor] = []  # referenced, so that no other tensor reuses the memory

    def now(self) -> Head:
        """Return the head, whose `kept` is of the current weights."""
        head = Head.from_model(self._model)
        tensors = [x for x in (head.weight_VE, head.bias_V) if x is not None]
        state = [(x.data_ptr(), x._version) for x in tensors]
        if state != self._of:
            self._of, self._memory, self._head = state, [x.detach() for x in tensors], head
        assert self._head.kept is not None
        return self._head


def _logits_gradient(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    temperature_C: torch.Tensor,
    log_z_C: torch.Tensor,
    grad_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_entropy_C: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient [C, V] of sum(grad * log-probs + grad_entropy * entropies) with respect to the logits.

    `logits_CV`: divided by the temperature; overwritten.
    """
    # d logprob / d (logits / T) = onehot(target) - softmax
    scale_C = grad_C / temperature_C
    logits_CV.sub_(log_z_C[:, None])
    if grad_entropy_C is None:
        grad_CV = logits_CV.exp_().mul_(-scale_C[:, None])
    else:
        # d entropy / d (logits / T) = -p (log p + entropy)
        factor_CV = scale_C[:, None] + (grad_entropy_C / temperature_C)[:, None] * (logits_CV + entropy_C[:, None])
        grad_CV = logits_CV.exp_().mul_(-factor_CV)
    return grad_CV.scatter_add_(1, targets_C[:, None], scale_C[:, None])


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps only log Z per token; backward computes each chunk's logits again.

    `head`: of the same weights, without autograd. `unit`: all temperatures are 1.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - tensors of one formula
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature_N: torch.Tensor,
        head: Head,
        chunk: int,
        unit: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = hidden_NE.shape[0]
        logprobs_N = torch.empty(num, dtype=torch.float32, device=hidden_NE.device)
        entropy_N = torch.empty_like(logprobs_N)
        log_z_N = torch.empty_like(logprobs_N)
        compiled = kernels.for_device(hidden_NE.device.type)
        for start in range(0, num, chunk):
            part = slice(start, start + chunk)
            if compiled is not None:
                narrow_CV = head.narrow_logits(hidden_NE[part])
                found = compiled.logprobs(narrow_CV, targets_N[part], 1 / temperature_N[part])
                logprobs_N[part], entropy_N[part], log_z_N[part] = found
                continue
            logits_CV = head.logits(hidden_NE[part])
            if not unit:
                logits_CV /= temperature_N[part, None]
            peak_C = logits_CV.amax(-1)
            logits_CV -= peak_C[:, None]
            picked_C = logits_CV.gather(1, targets_N[part, None]).squeeze(1)
            weights_CV = torch.exp(logits_CV)
            total_C = weights_CV.sum(-1)
            logprobs_N[part] = picked_C - total_C.log()
            log_z_N[part] = peak_C + total_C.log()
            # H = log Z - E[logit]; rows of a batched dot product, without a third [C, V] tensor.
            expected_C = torch.bmm(weights_CV[:, None, :], logits_CV[:, :, None]).flatten() / total_C
            entropy_N[part] = total_C.log() - expected_C
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, targets_N, temperature_N, log_z_N, entropy_N)
        ctx.head, ctx.chunk, ctx.unit = head, chunk, unit
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NE, weight_VE, bias_V, targets_N, temperature_N, log_z_N, entropy_N = ctx.saved_tensors
        grad_N, grad_entropy_N = torch.zeros_like(log_z_N) if grads[0] is None else grads[0], grads[1]
        head: Head = ctx.head
        grad_hidden_NE = torch.empty_like(hidden_NE)
        need_weight, need_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        grad_weight_VE = (
            torch.zeros(weight_VE.shape, dtype=torch.float32, device=weight_VE.device) if need_weight else None
        )
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        plain = head.softcap is None and grad_entropy_N is None
        compiled = kernels.for_device(hidden_NE.device.type) if plain else None
        for start in range(0, hidden_NE.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            if compiled is not None:
                narrow_CV = head.narrow_logits(hidden_NE[part])
                scales_C = 1 / temperature_N[part]
                compiled.logprobs_backward(
                    narrow_CV, targets_N[part], scales_C, log_z_N[part], grad_N[part].contiguous()
                )
            else:
                logits_CV = head.logits(hidden_NE[part])
                slope_CV = None if head.softcap is None else 1 - (logits_CV / head.softcap) ** 2
                if not ctx.unit:
                    logits_CV /= temperature_N[part, None]
                narrow_CV = _logits_gradient(
                    logits_CV, targets_N[part], temperature_N[part], log_z_N[part], grad_N[part], entropy_N[part],
                    None if grad_entropy_N is None else grad_entropy_N[part],
                )  # fmt: skip
                if slope_CV is not None:
                    narrow_CV *= slope_CV
            if head.multiplier != 1.0:
                narrow_CV *= head.multiplier
            narrow_CV = narrow_CV.to(weight_VE.dtype)
            grad_hidden_NE[part] = (narrow_CV @ weight_VE).to(hidden_NE.dtype)
            if grad_weight_VE is not None:
                grad_weight_VE += narrow_CV.T @ hidden_NE[part].to(weight_VE.dtype)
            if grad_bias_V is not None:
                grad_bias_V += narrow_CV.float().sum(0)
        return (
            grad_hidden_NE,
            None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
            None,
        )


@torch.no_grad()
def chunked_squares(
    hidden_NE: torch.Tensor, head: Head, temperature_N: torch.Tensor, *, chunk_bytes: int = 0
) -> torch.Tensor:
    """Return the sum of squared probabilities over the vocabulary for each token (float32 [N]), without a gradient.

    It is the probability that two draws are equal. `chunk_bytes`: see `chunked_logprobs`.
    """
    chunk = _chunk_of(hidden_NE, head, chunk_bytes)
    out_N = torch.empty(len(hidden_NE), dtype=torch.float32, device=hidden_NE.device)
    for start in range(0, len(hidden_NE), chunk):
        part = slice(start, start + chunk)
        logits_CV = head.kept.logits(hidden_NE[part]) / temperature_N[part, None]
        out_N[part] = logits_CV.softmax(-1).square().sum(-1)
    return out_N


def _chunk_of(hidden_NE: torch.Tensor, head: Head, chunk_bytes: int) -> int:
    """Return the tokens of a chunk with at most `chunk_bytes` of float32 logits (0: device default)."""
    chunk_bytes = chunk_bytes or (CHUNK_BYTES if hidden_NE.device.type == "cpu" else _CHUNK_BYTES_ON_GPU)
    return max(1, chunk_bytes // (4 * head.weight_VE.shape[0]))


def chunked_logprobs(
    hidden_NE: torch.Tensor,
    head: Head,
    targets_N: torch.Tensor,
    temperature_N: torch.Tensor,
    *,
    unit: bool = False,
    chunk_bytes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each target and the entropy of its distribution (nats, float32 [N]).

    At most `chunk_bytes` of float32 logits exist at once (0: device default). `unit`: all temperatures are 1, which
    saves a pass over the logits. Differentiable in hidden_NE and the head's weight and bias.
    """
    chunk = _chunk_of(hidden_NE, head, chunk_bytes)
    out = _ChunkedLogprobs.apply(
        hidden_NE, head.weight_VE, head.bias_V, targets_N, temperature_N, head.kept, chunk, unit
    )
    return out  # type: ignore[return-value]
