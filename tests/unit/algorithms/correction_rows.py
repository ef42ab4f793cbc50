"""Log-probs that the tests of corrections share: two rows worked out by hand, and random ones."""

from __future__ import annotations

import torch

# Ratios 3, 0.5, 1 and (second row) 0.1, 2; the last position of row two is no loss token.
PROXIMAL = torch.tensor([[3.0, 0.5, 1.0], [0.1, 2.0, 7.0]]).log()
BEHAVIOR = torch.zeros(2, 3)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()


def random_batch(seed: int, rows: int = 5, tokens: int = 7):
    """(proximal, behavior, mask, versions): ragged, with tokens that are no loss tokens inside, and one empty row."""
    generator = torch.Generator().manual_seed(seed)
    proximal, behavior = (-3 * torch.rand(rows, tokens, generator=generator) for _ in range(2))
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[0] = False
    versions = torch.randint(0, 3, (rows, tokens), generator=generator).sort(-1).values
    return proximal, behavior, mask, versions
