"""Structured answers (regex, JSON schema): which tokens may come next, by llguidance. Imported at the first use.

Shapes: V vocabulary of the model, which may be larger than the tokenizer's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rollover.config.logits import LogitsProcessing


class Matcher:
    """State of one answer in its structure. `complete`: it may end here."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    def read(self, tokens: list[int]) -> None:
        """Advance by these tokens. Raises ValueError if the structure forbids them."""
        if not self._matcher.consume_tokens(tokens):
            raise ValueError(
                "rollout.logits: the answer so far has not the required structure"
                f" ({self._matcher.get_error() or 'it was begun without one'})"
            )

    def allowed(self) -> torch.Tensor:
        """Return a bool mask [V] of the tokens that may come next, without those that end an answer."""
        allowed_V = torch.zeros(self._vocab_size, dtype=torch.bool)
        if not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
            allowed_V[: len(bits)] = torch.from_numpy(bits.astype(bool))
        return allowed_V


class _TextTokens:
    """Adapter for llguidance of a tokenizer in which each token decodes to a text by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = list(tokenizer.all_special_ids)
        self.tokens = [tokenizer.decode([token]).encode() for token in range(len(tokenizer))]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


class Structures:
    """Cache of compiled structures. `tokenizer`: a fast one of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._compiled = lru_cache(maxsize=16)(self._compile)

    def matcher(self, asked: LogitsProcessing, vocab_size: int) -> Matcher:
        """Return a matcher at the start of an answer. Raises ValueError if llguidance is missing or rejects it."""
        return Matcher(self._compiled(asked.regex, asked.json_schema).deep_copy(), vocab_size)

    def _compile(self, regex: str, json_schema: str) -> Any:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise ValueError(
                "rollout.logits: a structure needs llguidance: pip install 'rollover[structured]'"
            ) from error
        if self._vocabulary is None:
            try:
                self._vocabulary = llguidance.hf.from_tokenizer(self._tokenizer)
            except ValueError:  # it supports byte-level tokenizers, and those with byte fallback
                self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_TextTokens(self._tokenizer)))
        matcher = llguidance.LLMatcher
        key = "json_schema" if json_schema else "regex"
        try:
            grammar = (
                matcher.grammar_from_json_schema(json_schema) if json_schema else matcher.grammar_from_regex(regex)
            )
            made = matcher(self._vocabulary, grammar)
        except ValueError as error:
            raise ValueError(f"rollout.logits.{key}: {error}") from None
        if made.is_error():
            raise ValueError(f"rollout.logits.{key}: {made.get_error()}")
        return made
