"""The built-in rewards that are verl's, on answers made at random around what their rules look for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rollover.algorithms.shaping import overlong
from rollover.rewards.built_in import BY_DATA_SOURCE, make_function, spec_by_data_source

rules = pytest.importorskip("verl.utils.reward_score")
gsm8k = pytest.importorskip("verl.utils.reward_score.gsm8k")
math_dapo = pytest.importorskip("verl.utils.reward_score.math_dapo")
math_reward = pytest.importorskip("verl.utils.reward_score.math_reward")
search = pytest.importorskip("verl.utils.reward_score.search_r1_like_qa_em")

NUMBERS = ("7", "-7", "0.5", ".5", "1,234", "1234", "72", "3.0", "12.", "$18", "50\\%", "7\\text{ cm}", "x=7", "x = 7")
LATEX = (
    "\\frac12", "\\frac{1}{2}", "\\dfrac{1}{2}", "1/2", "\\tfrac1{72}", "\\frac", "\\frac1", "\\sqrt3", "\\sqrt{3}",
    "\\sqrt", "\\sqrt2 + \\sqrt\\sqrt2", "90^\\circ", "90^{\\circ}", "\\left(1, 2\\right)", "(1,2)", "\\text{ odd }",
    "3 \\text{ m}\\text{ s}", "\\$5", "5\\!0", "\\\\frac12", "-1/2", "+1/2", "01/2", "{.5}", "", "\\boxed{7}",
    "\\overline{AB}", "\\text{and} 3", "12 dollars", "7 square units", "1 000", "10,\\!000", "\\mbox{no}", "y=x=2",
    "\\mathrm{th}", "\\text{m}^2", "a 7", "an 8", "7.$", '"7"', "\\ 7", "\\textbf{7}",
)  # fmt: skip
FRAMES = (
    "#### {}", "The answer is {}.", "Answer: {}", "answer : {}\nDone.", "\\boxed{{{}}}", "\\boxed {}$ as said",
    "so \\boxed{{1}} or \\boxed{{{}}}", "\\fbox{{{}}}", "\\boxed{{{}", "\\boxed5", "<answer>{}</answer>",
    "<answer>no</answer> <answer> {} </answer>", "{}", "", "####{}", "#### {} or #### 5", "Answer: ${}$",
    "Answer:\n{}", "ANSWER:{}", "Answer: [INVALID] \\boxed{{{}}}",
)  # fmt: skip


def cases(num: int = 3000) -> list[tuple[str, str]]:
    """(completion, reference)."""
    draw, out = random.Random(0), []
    for _ in range(num):
        value, other = draw.choice(NUMBERS + LATEX), draw.choice(NUMBERS + LATEX)
        frames = [
            draw.choice(FRAMES).format(draw.choice((value, other, value + " "))) for _ in range(draw.choice((1, 2)))
        ]
        filler = draw.choice(("", "word " * 15, "word " * 80))
        out.append((filler + "\n".join(frames) + draw.choice(("", "\n", " so." * 40)), value))
    return out


def ours(name: str, completion: str, reference: Any, **params: Any) -> Any:
    item = {"completion": completion, "columns": {"reward_model": {"ground_truth": reference}}}
    return make_function(name, params, ".")(item)


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_gsm8k(method: str) -> None:
    """Where the reference has no comma, as verl's preparation of the data takes them out."""
    agreed = {0.0: 0, 0.1: 0, 1.0: 0}
    for completion, value in cases():
        if "," in value or "boxed" in value or not value:
            continue
        expected = gsm8k.compute_score(completion, value, method=method, format_score=0.1)
        assert ours("gsm8k", completion, value, method=method, format_score=0.1) == expected, (completion, value)
        agreed[expected] += 1
    assert min(agreed.values()) > 10, "each of the three verdicts occurs"


@pytest.mark.parametrize("strict_box", [False, True])
def test_math_dapo(strict_box: bool) -> None:
    agreed = {1.0: 0, -1.0: 0}
    for completion, value in cases():
        expected = math_dapo.compute_score(completion, value, strict_box_verify=strict_box)
        got = ours("math_dapo", completion, value, strict_box=strict_box)
        assert (got["score"], got["acc"]) == (expected["score"], float(expected["acc"])), (completion, value)
        if expected["pred"] not in (None, "[INVALID]"):  # ours has the last box there, or nothing
            assert got["pred"] == expected["pred"], (completion, value)
        agreed[expected["score"]] += 1
    assert min(agreed.values()) > 50


def test_boxed_is_the_rule_of_math() -> None:
    """But for a reference with a box of its own: ours reads it (MATH's solutions), verl's data has none."""
    agreed = {0.0: 0, 1.0: 0}
    for completion, value in cases():
        if "boxed" in value:
            continue
        expected = math_reward.compute_score(completion, value)
        assert ours("boxed", completion, value) == expected, (completion, value)
        agreed[expected] += 1
    assert min(agreed.values()) > 50


def test_search_qa() -> None:
    agreed = {0.0: 0, 0.25: 0, 1.0: 0}
    draw = random.Random(1)
    words = ("The Beatles", "beatles", "a  beatle's", "U.S.A.", "usa", "Paris", "paris!", "")
    for _ in range(600):
        targets, said = draw.sample(words, 2), draw.choice(words)
        tags = "</answer>" * draw.choice((0, 0, 12))
        completion = f"<answer>{said}</answer>{tags}" if draw.random() < 0.9 else said
        expected = float(search.compute_score(completion, {"target": targets}))
        assert ours("search_qa", completion, {"target": targets}) == expected, completion
        agreed[expected] += 1
    assert min(agreed.values()) > 5


def test_data_sources_have_verls_rewards() -> None:
    """Each name of verl's table scores here as there, but for numina_* (math-verify for PRIME's grader)
    and programs, which run in a sandbox."""
    answers = {"search_qa": ("<answer>7</answer>", {"target": "7"}), "": ("Answer: 7\n#### 7 \\boxed{7}", "7")}
    for name in BY_DATA_SOURCE:
        source = name.replace("*", "nq" if name.startswith("searchR1") else "2024")
        reward = spec_by_data_source(source, {})
        assert reward is not None
        if reward in ("math", "code"):
            continue
        completion, reference = answers.get(reward, answers[""])
        for text in (completion, completion.replace("7", "8")):
            got = ours(reward, text, reference)
            got = got["score"] if isinstance(got, dict) else got
            peer = rules.default_compute_score(source, text, reference)
            assert got == (peer["score"] if isinstance(peer, dict) else peer), (source, text)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_the_overlong_penalty_is_that_of_verls_dapo_manager(factor: float) -> None:
    torch = pytest.importorskip("torch")
    verl = pytest.importorskip("verl")
    manager = pytest.importorskip("verl.workers.reward_manager.dapo")
    limit, buffer = 64, 16

    class Buffer:
        enable, len, penalty_factor, log = True, buffer, factor, True

    class Tokenizer:
        eos_token = "</s>"

        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            return ""

    scorer = manager.DAPORewardManager(
        Tokenizer(), 0, lambda **_: 1.0, max_resp_len=limit, overlong_buffer_cfg=Buffer()
    )
    lengths = [1, limit - buffer, limit - buffer + 1, limit - 3, limit]
    mask = torch.tensor([[1] * (1 + n) + [0] * (limit - n) for n in lengths])
    data = verl.DataProto.from_dict(
        tensors={"prompts": mask[:, :1], "responses": mask[:, 1:], "attention_mask": mask},
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * len(lengths), dtype=object),
            "data_source": np.array([""] * len(lengths), dtype=object),
            "extra_info": np.array([{} for _ in lengths], dtype=object),
        },
    )
    expected = scorer(data).sum(-1).tolist()
    assert [1.0 + overlong(n, limit, buffer, factor) for n in lengths] == pytest.approx(expected)
