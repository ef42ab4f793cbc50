"""From loss per token to one number.

Shapes: B rows, T tokens. `denominator` is the global count of what a mode divides by, given by the trainer, so that the
sum over any micro-batches and ranks is the loss of the whole.
"""

from __future__ import annotations

from typing import Literal

import torch

from rollover.algorithms.elementwise import masked
from rollover.config.traits import Aggregation

# What each mode divides the sum over rows by: how many of these have a loss token. None: by nothing.
COUNTED: dict[Aggregation, Literal["tokens", "sequences", "groups"] | None] = {
    "token-mean": "tokens",
    "token-sum": None,
    "seq-mean-token-sum": "sequences",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum-norm": "sequences",
    "prompt-mean": "groups",
}


def aggregate(  # noqa: PLR0913 - one count for each mode
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: Aggregation,
    *,
    denominator: float | None = None,
    group_B: torch.Tensor | None = None,
    group_tokens_B: torch.Tensor | None = None,
    sequence_tokens_B: torch.Tensor | None = None,
    norm: float | None = None,
) -> torch.Tensor:
    """Scalar loss. Without `denominator` this batch is all there is. A row without a loss token is no sequence.

    A sequence is a trajectory, which may have several rows: one that the agent did not cut into contexts, and the same
    tokens in several rows, have one loss. `sequence_tokens_B`: loss tokens of the row's whole sequence, and then
    `denominator` is the number of sequences; None: a row is a sequence.

    - token-mean: sum of tokens / tokens (DAPO, arXiv 2503.14476, eq. 8, taken over the batch instead of each prompt's
      group, as in verl and TRL's dapo). denominator: tokens.
    - token-sum: sum of tokens; no denominator.
    - seq-mean-token-sum: mean over sequences of their token sums. denominator: sequences.
    - seq-mean-token-mean: mean over sequences of their token means (GRPO, arXiv 2402.03300, eq. 3).
      denominator: sequences.
    - seq-mean-token-sum-norm: seq-mean-token-sum divided by the constant `norm` (Dr. GRPO, arXiv 2503.20783: no
      division by the sequence's own length; norm is the token limit). denominator: sequences. The default norm, T as
      in verl, changes with padding: give it. TRL's dr_grpo divides by rows * max_completion_length, the same but for
      rows without loss tokens, which TRL counts (as its grpo does in the mean).
    - prompt-mean: mean over groups of their token means: eq. 8 of DAPO to the letter, the expectation over prompts.
      `group_B`: group of each row; `group_tokens_B`: loss tokens of the row's whole group (needed where a group is
      split). denominator: groups.
    """
    if mask_BT.shape != loss_BT.shape:
        raise ValueError(f"mask_BT is {list(mask_BT.shape)}: give it the shape of loss_BT, {list(loss_BT.shape)}")
    if mode not in COUNTED:
        raise ValueError(f"mode = {mode!r} is not an aggregation: use one of {', '.join(COUNTED)}")
    mask_BT = mask_BT.bool()
    loss_BT = masked(loss_BT, mask_BT)
    tokens_B = mask_BT.sum(-1)
    if mode in ("token-mean", "token-sum"):
        total = loss_BT.sum()
    elif mode == "prompt-mean":
        if group_B is None:
            raise ValueError("prompt-mean needs group_B: the group id of each row")
        total = (loss_BT.sum(-1) / _tokens_of(tokens_B, group_B, group_tokens_B).clamp(min=1)).sum()
    elif mode == "seq-mean-token-mean":
        total = (loss_BT.sum(-1) / (tokens_B if sequence_tokens_B is None else sequence_tokens_B).clamp(min=1)).sum()
    elif mode == "seq-mean-token-sum-norm":
        total = (loss_BT.sum(-1) / (loss_BT.shape[1] if norm is None else norm)).sum()
    else:
        total = loss_BT.sum(-1).sum()
    counted = COUNTED[mode]
    if counted is None:
        return total
    # What is counted here is asked for only where it is not given: on a GPU that would wait for the whole forward pass.
    return total / max(1.0, _count(counted, tokens_B, group_B) if denominator is None else denominator)


def _count(what: str, tokens_B: torch.Tensor, group_B: torch.Tensor | None) -> float:
    """How many tokens, sequences or groups of this batch are in the loss."""
    if what == "tokens":
        return float(tokens_B.sum())
    in_loss_B = tokens_B > 0
    return float(in_loss_B.sum() if what == "sequences" or group_B is None else len(torch.unique(group_B[in_loss_B])))


def _tokens_of(tokens_B: torch.Tensor, group_B: torch.Tensor, given_B: torch.Tensor | None) -> torch.Tensor:
    """Loss tokens of the group of each row [B]: as given, else those of the rows that are here."""
    if given_B is not None:
        return given_B
    ids, index_B = torch.unique(group_B, return_inverse=True)
    return torch.zeros(len(ids), device=tokens_B.device).index_add_(0, index_B, tokens_B.float())[index_B]


def geometric_row_mean(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """exp(mean over the row's tokens of log(w + 1e-10)), at all of them [B, T]; 0 where masked.

    The weight of a row from those of its tokens, for a loss that belongs to the row as a whole (GMPO): as verl does. A
    token of weight 0 makes the row's small, not 0.
    """
    mask_BT = mask_BT.bool()
    logs_BT = masked(torch.log(weights_BT.float() + 1e-10), mask_BT)
    mean_B1 = logs_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return masked(mean_B1.exp(), mask_BT)
