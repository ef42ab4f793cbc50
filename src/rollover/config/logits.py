"""[rollout.logits]: what is done to the logits before a token is drawn, and the rules about it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.config.table import Inert, Refused, Rule, Table, option, wrong

_MOST_BIAS = 100.0  # as in OpenAI's and vLLM's APIs; a server takes no more


@dataclass(frozen=True, slots=True)
class LogitsProcessing:
    """Processing of logits before temperature and truncation, in this order; by default nothing.

    The answer is the text generated since the prompt, or since the environment's last text.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit); -inf: it is never sampled."""
    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt and of all generated ones are divided by it if positive, else multiplied (Keskar
    et al. 2019, as in transformers and vLLM)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the answer has a token."""
    min_new_tokens: int = 0
    """The stop tokens cannot be sampled before the answer has so many tokens."""
    forced_token_ids: tuple[int, ...] = ()
    """What an answer begins with."""
    regex: str = ""
    """The answer matches it as a whole."""
    json_schema: str = ""
    """A JSON schema that the answer follows, as JSON."""

    @property
    def structured(self) -> bool:
        return bool(self.regex or self.json_schema)


class LogitsConfig(Table):
    """[rollout.logits]: penalties, bans and structure. Behavior log-probs are those of the processed distribution, so
    each option requires a correction, as truncation does."""

    repetition_penalty: float = option(
        1.0,
        "Divide positive logits of tokens in prompt and answer by this, and multiply negative ones; 1 = off.",
        gt=0,
    )
    presence_penalty: float = option(0.0, "Subtract from the logits of tokens that occur in the answer; 0 = off.")
    frequency_penalty: float = option(0.0, "Subtract from a token's logit for each occurrence in the answer; 0 = off.")
    min_new_tokens: int = option(0, "Minimum number of tokens before an answer may end.", ge=0)
    banned_token_ids: list[int] = option([], "Tokens that are never sampled.")
    forced_token_ids: list[int] = option([], "First tokens of every answer.")
    logit_bias: dict[str, float] = option(
        {}, f"Bias added to the logits of tokens, by token id: {-_MOST_BIAS:g} to {_MOST_BIAS:g}."
    )
    regex: str = option("", "Regular expression that every answer matches as a whole (needs rollover[structured]).")
    json_schema: str = option(
        "",
        "JSON schema of every answer: a file, or the schema itself (needs rollover[structured]).",
    )

    @property
    def alters(self) -> bool:
        """Whether tokens are sampled from another distribution than the policy's."""
        return self.model_dump() != LogitsConfig().model_dump()

    def processing(self) -> LogitsProcessing:
        """Return the options in the form for engines. ValueError for a schema that cannot be read."""
        bias = {int(token): float(value) for token, value in self.logit_bias.items()}
        bias |= dict.fromkeys(self.banned_token_ids, float("-inf"))
        return LogitsProcessing(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_new_tokens=self.min_new_tokens,
            forced_token_ids=tuple(self.forced_token_ids),
            logit_bias=tuple(sorted(bias.items())),
            regex=self.regex,
            json_schema=_schema(self.json_schema) if self.json_schema else "",
        )


def _schema(given: str) -> str:
    """Return the schema, as JSON. ValueError that names the option."""
    key = "rollout.logits.json_schema"
    try:
        text = given if given.lstrip().startswith("{") else Path(given).expanduser().read_text()
        schema = json.loads(text)
    except OSError as error:
        raise ValueError(
            f"{key}: {given} cannot be read ({error.strerror}); give a file, or the schema itself"
        ) from None
    except ValueError as error:
        raise ValueError(f"{key}: {given[:80]!r} is no JSON ({error})") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{key}: a schema is a JSON object, and {given[:80]!r} is none")
    return json.dumps(schema, sort_keys=True)


def _no_schema(config: Any) -> str:
    """Return the error of the schema; "" if it can be read."""
    try:
        config.rollout.logits.processing()
    except ValueError as error:
        return str(error)
    return ""


def _no_bias(config: Any) -> str:
    """Return the first token of logit_bias that is no id, or whose bias is out of bounds; "" if all are sound."""
    for token, bias in config.rollout.logits.logit_bias.items():
        if not token.isdecimal() or not abs(bias) <= _MOST_BIAS:
            return token
    return ""


def _shortest_evaluated(config: Any) -> int | None:
    """Return the lowest token limit of evaluations; None without evaluation, or with agents."""
    if not config.eval.num_tasks or config.workflow.agent:
        return None
    return min(config.eval.tokens_of(of, config.rollout.max_new_tokens) for of in config.eval.every_setting)


def _banned_and_forced(config: Any) -> set[int]:
    return set(config.rollout.logits.banned_token_ids) & set(config.rollout.logits.forced_token_ids)


# What a server cannot know of an answer that it goes on with: all tokens so far come to it as a prompt.
_NOT_OVER_HTTP: dict[str, Callable[[LogitsConfig], bool]] = {
    "presence_penalty": lambda t: t.presence_penalty != 0,
    "frequency_penalty": lambda t: t.frequency_penalty != 0,
    "forced_token_ids": lambda t: bool(t.forced_token_ids),
    "regex": lambda t: bool(t.regex),
    "json_schema": lambda t: bool(t.json_schema),
}


def _not_over_http(name: str) -> Refused:
    key = f"rollout.logits.{name}"
    return Refused(
        (key, "engine.kind"),
        lambda c: c.engine.kind == "remote" and _NOT_OVER_HTTP[name](c.rollout.logits),
        lambda c: (
            f'{key} with engine.kind = "remote": an interrupted answer continues elsewhere from its tokens, and'
            ' a server does not know where it began. Remove it, or set engine.kind = "process"'
        ),
    )


RULES: tuple[Rule, ...] = (
    *map(_not_over_http, _NOT_OVER_HTTP),
    Refused(
        ("rollout.logits.logit_bias",),
        lambda c: bool(_no_bias(c)),
        lambda c: (
            f"rollout.logits.logit_bias.{_no_bias(c)} = {c.rollout.logits.logit_bias[_no_bias(c)]:g}: expected the"
            f" id of a token and a bias of {-_MOST_BIAS:g} to {_MOST_BIAS:g}. To ban a token name it in"
            " rollout.logits.banned_token_ids"
        ),
    ),
    Refused(
        ("rollout.logits.banned_token_ids", "rollout.logits.forced_token_ids"),
        lambda c: bool(_banned_and_forced(c)),
        lambda c: (
            f"rollout.logits.banned_token_ids and forced_token_ids both have the token {min(_banned_and_forced(c))}."
            " Remove it from one"
        ),
    ),
    Refused(
        ("rollout.logits.banned_token_ids", "rollout.logits.forced_token_ids"),
        lambda c: any(token < 0 for t in (c.rollout.logits,) for token in (*t.banned_token_ids, *t.forced_token_ids)),
        "rollout.logits: a token's id is 0 or more. Remove the negative one",
    ),
    Refused(
        ("rollout.logits.min_new_tokens", "rollout.max_new_tokens"),
        lambda c: c.rollout.logits.min_new_tokens > c.rollout.max_new_tokens,
        lambda c: (
            f"rollout.logits.min_new_tokens = {c.rollout.logits.min_new_tokens} is above rollout.max_new_tokens ="
            f" {c.rollout.max_new_tokens}: no answer could end. Lower it"
        ),
    ),
    Refused(
        ("rollout.logits.min_new_tokens", "eval.max_new_tokens", "eval.settings"),
        lambda c: (
            (shortest := _shortest_evaluated(c)) is not None
            and shortest < c.rollout.logits.min_new_tokens <= c.rollout.max_new_tokens
        ),
        lambda c: (
            f"rollout.logits.min_new_tokens = {c.rollout.logits.min_new_tokens} is above the {_shortest_evaluated(c)}"
            " tokens of an evaluation's answers, none of which could end. Lower it, or raise eval.max_new_tokens (also"
            " in [[eval.settings]])"
        ),
    ),
    Refused(
        ("rollout.logits.forced_token_ids", "rollout.max_new_tokens"),
        lambda c: len(c.rollout.logits.forced_token_ids) >= c.rollout.max_new_tokens,
        lambda c: (
            f"rollout.logits.forced_token_ids names {len(c.rollout.logits.forced_token_ids)} tokens, and"
            f" rollout.max_new_tokens = {c.rollout.max_new_tokens} leaves none to be sampled. Shorten it"
        ),
    ),
    Refused(
        ("rollout.logits.json_schema", "rollout.logits.regex"),
        lambda c: bool(c.rollout.logits.json_schema and c.rollout.logits.regex),
        "rollout.logits.json_schema with rollout.logits.regex: an answer has one structure. Remove one of the two",
    ),
    wrong(("rollout.logits.json_schema",), lambda c: "" if _no_bias(c) else _no_schema(c)),
    Inert(
        ("rollout.logits.forced_token_ids",),
        ("rollout.logits.json_schema", "rollout.logits.regex"),
        lambda c: bool(c.rollout.logits.json_schema or c.rollout.logits.regex),
        "with a structure, which says how an answer begins",
        "Put the beginning into rollout.logits.regex",
    ),
)
