"""The reward `math`: math-verify (Hugging Face) compares the expressions in a completion with the reference.

math-verify's own limits of time turn into "wrong", by an alarm that it sets in the process. They are off: what takes
too long is ended with its worker at rewards.timeout_s, and its reward is missing.
"""

from __future__ import annotations

import logging
from typing import Any

from rollover.rewards.answers import reference_answer
from rollover.rewards.rules import Score, reference_of


def math(float_rounding: int = 6, strict: bool = True) -> Score:
    """1 where any expression or LaTeX of the completion equals the reference, else 0. An answer that cannot be read is
    wrong; a reference that cannot be is an error.

    `float_rounding`, `strict`: of math_verify.verify.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ValueError("the reward math needs the package math-verify: pip install 'rollover[math]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it says in each process that its limits are off
    of_reference, of_answer = [LatexExtractionConfig()], [ExprExtractionConfig(), LatexExtractionConfig()]

    def score(item: dict[str, Any]) -> float:
        text = reference_answer(reference_of(item, "math"))
        no_limit: Any = None
        reference = parse(f"\\boxed{{{text}}}", of_reference, parsing_timeout=no_limit)
        if not reference:
            raise ValueError(f"math-verify cannot read the answer {text!r:.100}")
        answer = parse(item["completion"], of_answer, parsing_timeout=no_limit)
        return float(any(equal(one, other) for one in reference for other in answer))

    def equal(reference: Any, answer: Any) -> bool:
        try:
            return verify(reference, answer, float_rounding, strict=strict, timeout_seconds=None, raise_on_error=True)
        except MemoryError:
            raise  # it says nothing about the answer
        except Exception:  # as math-verify: what it cannot compare is not equal
            return False

    return score
