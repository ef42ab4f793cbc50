"""From logits to a token: LogitsProcessing (config/logits.py), truncation, and the draw.

One uniform number per token, from a counter, and the inverse CDF. A row's result depends only on its own logits and
uniform, never on the batch. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from rollover.config.logits import LogitsProcessing
from rollover.engine.embedded.structures import Structures
from rollover.engine.protocol import ExtendRequest
from rollover.models.devices import widest_float
from rollover.models.kernels import Kernels
from rollover.types import SamplingParams

_NOTHING = LogitsProcessing()


class LogitsProcessor:
    """Logits processing of one `extend`. It reads all tokens from the prompt on, so that interruptions change nothing.

    `structures`: needed for an answer with a structure. Raises ValueError for invalid options.
    """

    def __init__(self, request: ExtendRequest, vocab_size: int, structures: Structures | None) -> None:
        self._options = request.processing
        self._check(request, vocab_size)
        self._answer_start = len(request.prompt) + request.text_start
        self._stop_ids = torch.tensor(sorted(t for t in request.stop.token_ids if t < vocab_size), dtype=torch.long)
        self._bias_V = _bias(self._options, vocab_size)
        self._seen_V = torch.zeros(vocab_size, dtype=torch.bool)
        self._times_V = torch.zeros(vocab_size)
        self._num_read = 0
        self._matcher = None
        if self._options.structured:
            if structures is None:
                raise ValueError("rollout.logits: a structure needs the engine's tokenizer")
            self._matcher = structures.matcher(self._options, vocab_size)
        self._read([*request.prompt.ids, *request.generated_ids])

    def apply(self, logits_V: torch.Tensor, tokens: Seq[int]) -> None:
        """Change the logits of the token that comes after `tokens` (the prompt's and all generated), in place."""
        self._read(tokens)
        options, num_answer = self._options, len(tokens) - self._answer_start
        out_V = logits_V.float().cpu()
        if self._bias_V is not None:
            out_V = out_V + self._bias_V
        if options.repetition_penalty != 1:
            repeated_V = torch.where(out_V > 0, out_V / options.repetition_penalty, out_V * options.repetition_penalty)
            out_V = torch.where(self._seen_V, repeated_V, out_V)
        if options.presence_penalty or options.frequency_penalty:
            out_V = out_V - options.presence_penalty * (self._times_V > 0) - options.frequency_penalty * self._times_V
        if num_answer < len(options.forced_token_ids):
            out_V = _only(out_V, torch.tensor([options.forced_token_ids[num_answer]]))
        elif num_answer < options.min_new_tokens:
            out_V = out_V.index_fill(0, self._stop_ids, float("-inf"))
        if self._matcher is not None:
            allowed_V = self._matcher.allowed()
            may_stop = self._matcher.complete and num_answer >= options.min_new_tokens
            allowed_V[self._stop_ids] = may_stop or not bool((allowed_V & (out_V > float("-inf"))).any())
            out_V = out_V.masked_fill(~allowed_V, float("-inf"))
        if not bool((out_V > float("-inf")).any()) and len(self._stop_ids):  # everything is banned: it ends
            out_V = _only(logits_V.float().cpu(), self._stop_ids)
        logits_V.copy_(out_V)

    def _check(self, request: ExtendRequest, vocab_size: int) -> None:
        options = self._options
        ids = (*options.forced_token_ids, *(token for token, _ in options.logit_bias))
        if ids and max(ids) >= vocab_size:
            raise ValueError(f"rollout.logits names the token {max(ids)}, and the model has {vocab_size} tokens")
        if options.structured and not request.stop.token_ids:
            raise ValueError("rollout.logits: an answer with a structure has to end by a stop token, and there is none")

    def _read(self, tokens: Seq[int]) -> None:
        new = list(tokens[self._num_read :])
        if not new:
            return
        self._seen_V[new] = True
        answer = new[max(0, self._answer_start - self._num_read) :]
        self._num_read = len(tokens)
        if answer:
            self._times_V += torch.bincount(torch.tensor(answer), minlength=len(self._times_V))
            if self._matcher is not None:
                self._matcher.read(answer)


def _bias(options: LogitsProcessing, vocab_size: int) -> torch.Tensor | None:
    """Return the bias [V]; None without one."""
    if not options.logit_bias:
        return None
    bias_V = torch.zeros(vocab_size)
    tokens, values = zip(*options.logit_bias, strict=True)
    bias_V[list(tokens)] = torch.tensor(values, dtype=torch.float32)
    return bias_V


def _only(logits_V: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Set the logits of all other tokens to -inf."""
    out_V = torch.full_like(logits_V, float("-inf"))
    out_V[tokens] = logits_V[tokens]
    return out_V


def make_processor(request: ExtendRequest, vocab_size: int, structures: Structures | None) -> LogitsProcessor | None:
    """Return the request's processor; None if its logits are not changed. Raises ValueError as LogitsProcessor."""
    return None if request.processing == _NOTHING else LogitsProcessor(request, vocab_size, structures)


def process_logits(logits_BV: torch.Tensor, processors: Seq[LogitsProcessor | None], tokens: Seq[Seq[int]]) -> None:
    """Change each row that has a processor, in place. `tokens`: all so far, of each row."""
    for row, processor in enumerate(processors):
        if processor is not None:
            processor.apply(logits_BV[row], tokens[row])


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256


def uniforms(seeds: Seq[int], indices: Seq[int]) -> np.ndarray:
    """Uniform doubles in [0, 1): SplitMix64 (Steele et al. 2014) of seed at counter index. One per row."""
    with np.errstate(over="ignore"):
        z = np.asarray(seeds, dtype=np.uint64) + (np.asarray(indices, dtype=np.uint64) + np.uint64(1)) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _truncate(scaled_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set the logits of tokens removed by top-k, then top-p, then min-p to -inf. The likeliest token always stays."""
    sorted_BV, order_BV = torch.sort(scaled_BV, dim=-1, descending=True, stable=True)
    if params.top_k > 0:
        sorted_BV[:, params.top_k :] = float("-inf")
    probs_BV = torch.softmax(sorted_BV, dim=-1)
    remove_BV = torch.zeros_like(probs_BV, dtype=torch.bool)
    if params.top_p < 1.0:
        remove_BV |= probs_BV.cumsum(-1) - probs_BV >= params.top_p
    if params.min_p > 0.0:
        remove_BV |= probs_BV < params.min_p * probs_BV[:, :1]
    remove_BV[:, 0] = False
    sorted_BV = sorted_BV.masked_fill(remove_BV, float("-inf"))
    return torch.empty_like(scaled_BV).scatter_(1, order_BV, sorted_BV)


def _draw(scaled_BV: torch.Tensor, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling from softmax(scaled), in two levels so that no cumulative sum over V is needed."""
    rows, vocab = scaled_BV.shape
    peak_B1, likeliest_B1 = scaled_BV.max(-1, keepdim=True)
    weights_BV = (scaled_BV - peak_B1).exp_()
    if vocab % _BLOCK:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights_BV.view(rows, -1, _BLOCK)
    wide = widest_float(scaled_BV.device)
    cumulative = blocks.sum(-1).to(wide).cumsum(-1)
    total_B1 = cumulative[:, -1:]
    target_B1 = uniforms_B[:, None].to(wide).to(cumulative.device) * total_B1
    block_B1 = torch.searchsorted(cumulative, target_B1, right=True).clamp_(max=blocks.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, cumulative.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block_B1[:, :, None].expand(rows, 1, _BLOCK)).squeeze(1).to(wide).cumsum(-1)
    offset_B1 = torch.searchsorted(inside, target_B1 - before_B1, right=True).clamp_(max=_BLOCK - 1)
    tokens_B1 = block_B1 * _BLOCK + offset_B1
    # Rounding at a block's edge could pick a token of probability 0: take the likeliest one instead.
    tokens_B1 = torch.where(weights_BV.gather(1, tokens_B1) > 0, tokens_B1, likeliest_B1)
    logprobs_B1 = scaled_BV.gather(1, tokens_B1) - peak_B1 - total_B1.log().float()
    return tokens_B1.squeeze(1), logprobs_B1.squeeze(1)


def sample(
    logits_BV: torch.Tensor, params: Seq[SamplingParams], uniforms_B: np.ndarray, kernels: Kernels | None = None
) -> tuple[list[int], list[float]]:
    """Return token and behavior log-prob per row, under the sampled distribution (with temperature and truncation).

    Greedy rows (temperature 0) sample a point mass: log-prob 0. `kernels` do the same without sorting the vocabulary.
    """
    draws_B = torch.from_numpy(uniforms_B)
    if kernels is not None:
        drawn, drawn_logprobs = kernels.draw(logits_BV, params, draws_B)
        return drawn.tolist(), drawn_logprobs.tolist()
    logits_BV = logits_BV.float()
    rows_of: dict[SamplingParams, list[int]] = {}
    for row, p in enumerate(params):
        rows_of.setdefault(p, []).append(row)
    found: list[torch.Tensor] = []
    for p, rows in rows_of.items():
        part_BV = logits_BV if len(rows) == len(params) else logits_BV[rows]
        if p.temperature == 0:
            part_tokens = part_BV.argmax(-1)
            part_logprobs = torch.zeros_like(part_tokens)
        else:
            scaled_BV = part_BV if p.temperature == 1 else part_BV / p.temperature
            if p.truncated:
                scaled_BV = _truncate(scaled_BV, p)
            part_tokens, part_logprobs = _draw(scaled_BV, draws_B[rows])
        wide = widest_float(part_tokens.device)
        found.append(torch.stack((part_tokens.to(wide), part_logprobs.to(wide))))
    # One transfer from the device. Exact in either dtype: token ids are below 2^24.
    tokens_B, logprobs_B = torch.cat(found, 1).tolist()
    drawn_rows = [row for rows in rows_of.values() for row in rows]
    tokens, logprobs = [0] * len(params), [0.0] * len(params)
    for row, token, logprob in zip(drawn_rows, tokens_B, logprobs_B, strict=True):
        tokens[row], logprobs[row] = int(token), logprob
    return tokens, logprobs
