"""Bias and variance of every off-policy correction, on a bandit that is small enough to be enumerated.

    .venv/bin/python experiments/bandit.py             writes the table into docs/algorithms.md and docs/bandit.svg
    .venv/bin/python experiments/bandit.py --table     prints the table only, needs no matplotlib

A rollout is a sequence of T tokens out of V. The policy is a softmax over its own logits for every prefix, so that all
V^T sequences, their probabilities and the exact policy gradient can be written down. The reward comes at the end. Each
token is sampled by an older policy, the version of its segment; versions are steps of a random walk of the logits. The
gradient estimate of one rollout y is

    g(y) = sum over t of w_t * (R(y) - b) * gradient of log pi(y_t | y_<t),    b = J(pi), a constant,

with the weights w_t of rollover.algorithms.correction. "Exact" is the gradient of J(pi) = E_pi[R]: the tokens before t
are distributed as pi draws them, and so are token t and those after it, which decide the reward.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from rollover.algorithms.correction import effective_sample_size, importance_weights  # noqa: E402

DOC, FIGURE = ROOT / "docs" / "algorithms.md", ROOT / "docs" / "bandit.svg"
BEGIN, END = "<!-- table: experiments/bandit.py -->", "<!-- end of table -->"
V, T = 3, 8
SEGMENT_T = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
DRIFT, DRAWS, SEED = 0.5, 10_000, 0
# Row of the table: (mode, cap). "prefix" is no mode of the library: the product of the ratios up to and including t.
ROWS: dict[str, tuple[str, float]] = {
    "none": ("none", math.inf),
    "token, no cap": ("token_truncate", math.inf),
    "token_truncate": ("token_truncate", 2.0),
    "token_mask": ("token_mask", 2.0),
    "icepop": ("icepop", 2.0),
    "prefix, no cap": ("prefix", math.inf),
    "segment, no cap": ("segment_truncate", math.inf),
    "segment_truncate": ("segment_truncate", 2.0),
    "segment_mask": ("segment_mask", 2.0),
    "sequence, no cap": ("sequence_truncate", math.inf),
    "sequence_truncate": ("sequence_truncate", 2.0),
    "sequence_mask": ("sequence_mask", 2.0),
    "geometric_mask": ("geometric_mask", 1.2),
}
UNBIASED = "sequence, no cap"
HEADER = ("weights", "cap", "bias", "deviation", "drawn: bias", "drawn: deviation", "effective share", "better below")


def prefix_index(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Which logits each token was drawn from: one row of them per prefix, shorter prefixes first [B, T]."""
    index_BT = torch.zeros_like(tokens_BT)
    for t in range(1, T):
        index_BT[:, t] = index_BT[:, t - 1] * V + tokens_BT[:, t - 1] + 1
    return index_BT


EVERY_BT = torch.cartesian_prod(*[torch.arange(V)] * T)
NUM_PREFIXES = sum(V**t for t in range(T))


def logprobs(logits_PV: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits_PV, -1)[prefix_index(tokens_BT), tokens_BT]


@dataclass(frozen=True)
class Bandit:
    """`policies`: logits [P, V] of the version of each segment, and last those of the policy to be improved."""

    reward: torch.Tensor
    policies: tuple[torch.Tensor, ...]

    @property
    def current(self) -> torch.Tensor:
        return self.policies[-1]

    def behavior_logprobs(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        per_version_KBT = torch.stack([logprobs(policy, tokens_BT) for policy in self.policies[:-1]])
        return per_version_KBT[SEGMENT_T, :, torch.arange(T)].T

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Rollouts, each token sampled from the version of its segment [count, T]."""
        tokens_BT = torch.zeros(count, T, dtype=torch.long)
        for t in range(T):
            probabilities_PV = torch.softmax(self.policies[int(SEGMENT_T[t])], -1)
            rows_BV = probabilities_PV[prefix_index(tokens_BT)[:, t]]
            tokens_BT[:, t] = torch.multinomial(rows_BV, 1, generator=generator)[:, 0]
        return tokens_BT

    def rewards(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.reward[(tokens_BT * V ** torch.arange(T - 1, -1, -1)).sum(-1)]

    def weights(self, tokens_BT: torch.Tensor, mode: str, cap: float) -> torch.Tensor:
        current_BT, behavior_BT = logprobs(self.current, tokens_BT), self.behavior_logprobs(tokens_BT)
        if mode == "none":
            return torch.ones_like(current_BT)
        if mode == "prefix":
            return (current_BT - behavior_BT).cumsum(-1).exp()
        mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        versions_BT = SEGMENT_T.expand_as(tokens_BT)
        weights_BT = importance_weights(
            current_BT,
            behavior_BT,
            mask_BT,
            mode=mode,  # type: ignore[arg-type]
            cap=cap,
            versions_BT=versions_BT,
        )
        return weights_BT.double()

    def factors(self, tokens_BT: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
        """w_t * (R - b) [B, T]: what multiplies the gradient of the log-prob of each token."""
        probability_S = logprobs(self.current, EVERY_BT).sum(-1).exp()
        baseline = (probability_S * self.reward).sum()
        return weights_BT * (self.rewards(tokens_BT) - baseline)[:, None]

    def mean_gradient(self, tokens_BT: torch.Tensor, weights_BT: torch.Tensor, share_B: torch.Tensor) -> torch.Tensor:
        """sum over rollouts of share * g [P, V]. Gradient of log softmax: one-hot of the token - probabilities."""
        factors_BT = self.factors(tokens_BT, weights_BT) * share_B[:, None]
        index_BT = prefix_index(tokens_BT)
        onehot_PV = torch.zeros(NUM_PREFIXES * V, dtype=torch.float64)
        onehot_PV.index_add_(0, (index_BT * V + tokens_BT).flatten(), factors_BT.flatten())
        sums_P = torch.zeros(NUM_PREFIXES, dtype=torch.float64).index_add_(0, index_BT.flatten(), factors_BT.flatten())
        return onehot_PV.view(-1, V) - sums_P[:, None] * torch.softmax(self.current, -1)

    def squared_norms(self, tokens_BT: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
        """|g|^2 of each rollout [B]: its tokens have different prefixes, so their gradients are orthogonal."""
        probability_PV = torch.softmax(self.current, -1)
        token_BT = probability_PV[prefix_index(tokens_BT), tokens_BT]
        length_BT = probability_PV.square().sum(-1)[prefix_index(tokens_BT)] - 2 * token_BT + 1
        return (self.factors(tokens_BT, weights_BT).square() * length_BT).sum(-1)

    def along(self, tokens_BT: torch.Tensor, weights_BT: torch.Tensor, direction_PV: torch.Tensor) -> torch.Tensor:
        """Inner product of each rollout's g with a direction [B]."""
        mean_P = (torch.softmax(self.current, -1) * direction_PV).sum(-1)
        index_BT = prefix_index(tokens_BT)
        return (self.factors(tokens_BT, weights_BT) * (direction_PV[index_BT, tokens_BT] - mean_P[index_BT])).sum(-1)

    def exact_gradient(self) -> torch.Tensor:
        probability_S = logprobs(self.current, EVERY_BT).sum(-1).exp()
        return self.mean_gradient(EVERY_BT, torch.ones(len(EVERY_BT), T, dtype=torch.float64), probability_S)

    def moments(self, row: str) -> tuple[torch.Tensor, float]:
        """(mean [P, V], variance: trace of the covariance) of g under the sampling policies, enumerated."""
        probability_S = self.behavior_logprobs(EVERY_BT).sum(-1).exp()
        weights_BT = self.weights(EVERY_BT, *ROWS[row])
        mean_PV = self.mean_gradient(EVERY_BT, weights_BT, probability_S)
        second = (probability_S * self.squared_norms(EVERY_BT, weights_BT)).sum()
        return mean_PV, float(second - mean_PV.square().sum())


def make_bandit(drift: float = DRIFT) -> Bandit:
    """Versions one step of a random walk apart (standard deviation `drift` per logit); the last is the current one."""
    generator = torch.Generator().manual_seed(SEED)
    reward_S = torch.rand(len(EVERY_BT), generator=generator, dtype=torch.float64)
    logits_PV = torch.randn(NUM_PREFIXES, V, generator=generator, dtype=torch.float64)
    policies = [logits_PV]
    for _ in range(int(SEGMENT_T.max()) + 1):
        policies.append(policies[-1] + drift * torch.randn(NUM_PREFIXES, V, generator=generator, dtype=torch.float64))
    return Bandit(reward_S, tuple(policies))


@dataclass(frozen=True)
class Result:
    """Bias and standard deviation of one rollout's gradient, over the norm of the exact one: enumerated, and drawn.

    `better_below`: with fewer rollouts than this the squared error bias^2 + deviation^2 / n is less than without bias.
    """

    bias: float
    deviation: float
    drawn_bias: float
    drawn_deviation: float
    effective_share: float
    better_below: float


def measure(bandit: Bandit, row: str, drawn_BT: torch.Tensor) -> Result:
    exact_PV = bandit.exact_gradient()
    norm = float(exact_PV.norm())
    mean_PV, variance = bandit.moments(row)
    bias = float((mean_PV - exact_PV).norm()) / norm
    weights_BT = bandit.weights(drawn_BT, *ROWS[row])
    share_B = torch.full((len(drawn_BT),), 1 / len(drawn_BT), dtype=torch.float64)
    drawn_PV = bandit.mean_gradient(drawn_BT, weights_BT, share_B)
    drawn_variance = float(bandit.squared_norms(drawn_BT, weights_BT).mean() - drawn_PV.square().sum())
    # The mean of n draws is variance / n away from its expectation on average: what is beyond it is bias.
    drawn_bias = max(0.0, float((drawn_PV - exact_PV).square().sum()) - drawn_variance / len(drawn_BT)) ** 0.5
    gain = bandit.moments(UNBIASED)[1] - variance
    return Result(
        bias=bias,
        deviation=variance**0.5 / norm,
        drawn_bias=drawn_bias / norm,
        drawn_deviation=drawn_variance**0.5 / norm,
        effective_share=float(effective_sample_size(weights_BT, torch.ones_like(drawn_BT), level="token")),
        better_below=math.inf if row == UNBIASED else max(0.0, gain / norm**2 / bias**2),
    )


def results(bandit: Bandit) -> dict[str, Result]:
    drawn_BT = bandit.draw(DRAWS, torch.Generator().manual_seed(SEED + 1))
    return {row: measure(bandit, row, drawn_BT) for row in ROWS}


def table(of: dict[str, Result]) -> str:
    lines = [HEADER, ("---",) * len(HEADER)]
    for row, result in of.items():
        cap = ROWS[row][1]
        lines.append(
            (
                row.replace("none", "none (w = 1)") if cap == math.inf else f"`{row}`",
                "" if cap == math.inf else f"{cap}",
                f"{result.bias:.2f}",
                f"{result.deviation:.1f}",
                f"{result.drawn_bias:.2f}",
                f"{result.drawn_deviation:.1f}",
                f"{result.effective_share:.2f}",
                "" if row == UNBIASED else f"{result.better_below:.0f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw_figure(of: dict[str, Result], path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("the figure needs matplotlib: pip install matplotlib, or use --table") from error
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rollover", "font.size": 9})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    colors = {"none": "k", "token": "C0", "icepop": "C0", "prefix": "C4", "segment": "C2", "sequence": "C3"}
    markers = {"none": "x", "truncate": "s", "mask": "v", "icepop": "^"}
    for row, result in of.items():
        color = colors.get(re.split("[,_]", row)[0], "C5")
        marker = markers.get(row.split("_")[-1], "o")
        left.plot(result.bias, result.deviation, marker, color=color, label=row, markersize=6, alpha=0.8)
    left.set(xlabel="bias", ylabel="deviation of one rollout", title=f"drift {DRIFT}", xlim=(-0.05, 1.1), ylim=(0, 24))
    left.legend(fontsize=6.5, ncols=2, loc="lower left")
    drifts = [0.05 * step for step in range(1, 17)]
    bandits = [make_bandit(drift) for drift in drifts]
    norms = [float(bandit.exact_gradient().norm()) for bandit in bandits]
    for row in ("none", "token_truncate", "segment_truncate", "sequence_truncate", UNBIASED, "geometric_mask"):
        errors = []
        for bandit, norm in zip(bandits, norms, strict=True):
            mean_PV, variance = bandit.moments(row)
            errors.append(float((mean_PV - bandit.exact_gradient()).square().sum() + variance / 1024) ** 0.5 / norm)
        right.plot(
            drifts,
            errors,
            label=row,
            color=colors.get(re.split("[,_]", row)[0], "C5"),
            linestyle="--" if row == UNBIASED else "-",
        )
    right.set(xlabel="drift of a version", ylabel="error of the mean of 1024 rollouts", ylim=(0, 1.3))
    right.legend(fontsize=7, loc="lower left")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--table", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    of = results(make_bandit())
    if arguments.table:
        print(table(of))
        return
    draw_figure(of, FIGURE)
    text = DOC.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{DOC} lacks the lines {BEGIN} and {END}")
    DOC.write_text(pattern.sub(lambda _: f"{BEGIN}\n{table(of)}\n\n{END}", text))


if __name__ == "__main__":
    main()
