"""Built-in rewards that compare an answer with the reference, or check the form of a completion.

Each factory takes the reward's parameters and returns the reward function of an item. rewards/built_in.py has their
names, math_rules.py those for LaTeX; docs/rewards.md lists their limits.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollover.rewards.answers import RULES, answer_of, extract_answer, reference_answer, same_answer

Item = dict[str, Any]
Score = Callable[[Item], float]

_GSM8K_CHARS = 300  # of the completion's end, which are searched
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_ANY_NUMBER = re.compile(r"(-?[0-9.,]+)")
_LETTERS = "ABCDEFGHIJ"
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_SEARCH_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MAX_TAGS = 10


def reference_of(item: Item, name: str) -> Any:
    """Return an item's reference answer. ValueError without one."""
    reference = answer_of(item["columns"])
    if reference is None:
        raise ValueError(
            f"{name} needs an answer (reward_model.ground_truth, answer, solution or ground_truth); the task's columns"
            f" are {', '.join(item['columns']) or 'none'}. If another has it, set tasks.sources.answer_column"
        )
    return reference


def exact_match(rule: str = "last_number") -> Score:
    """Score 1 if the answer that `rule` reads equals the reference as a number or as text, else 0."""
    _one_of("exact_match", "rule", rule, RULES)

    def score(item: Item) -> float:
        reference = reference_answer(reference_of(item, "exact_match"))
        answer = extract_answer(item["completion"], rule)
        return float(answer is not None and same_answer(answer, reference))

    return score


def last_number() -> Score:
    """Score like `exact_match` of the last number, regardless of tasks.answer_rule."""
    return exact_match("last_number")


def reasoning_gym(rule: str = "last_number") -> Score:
    """Score the answer that `rule` reads by the generator's score_answer."""
    _one_of("reasoning_gym", "rule", rule, RULES)

    def score(item: Item) -> float:
        columns = item["columns"]
        dataset = _generator(columns["generator"], json.dumps(columns["params"]), columns["seed"], columns["size"])
        return dataset.score_answer(extract_answer(item["completion"], rule), _entry(dataset, columns["index"]))

    return score


@lru_cache(maxsize=64)
def _generator(name: str, params: str, seed: int, size: int) -> Any:
    import reasoning_gym  # takes a second: only when such a task is scored

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(params))


@lru_cache(maxsize=256)
def _entry(dataset: Any, index: int) -> dict[str, Any]:
    return dataset[index]


def gsm8k(method: str = "strict", format_score: float = 0.0) -> Score:
    """Score GSM8K like verl (verl/utils/reward_score/gsm8k.py), by comparing the texts of two numbers.

    `method`: strict reads the last number after "#### ", without its commas; flexible the last number, as it is
    written. `format_score`: of a wrong answer; a missing one scores 0.
    """
    _one_of("gsm8k", "method", method, ("strict", "flexible"))

    def score(item: Item) -> float:
        reference = reference_answer(reference_of(item, "gsm8k")).replace(",", "")
        tail = item["completion"][-_GSM8K_CHARS:]
        if method == "strict":
            found = [number.replace(",", "") for number in _MARKED.findall(tail)]
        else:
            numbers = _ANY_NUMBER.findall(tail)
            found = [number for number in numbers if number != "."] or numbers
        if not found:
            return 0.0
        return 1.0 if found[-1] == reference else format_score

    return score


def column(name: str = "score") -> Score:
    """Return the number in the task's column `name`; dots name nested columns (extra_info.score)."""

    def score(item: Item) -> float:
        value: Any = item["columns"]
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                raise ValueError(f"the reward column: the task has no column {name!r}. Set its parameter name")
            value = value[key]
        return value

    return score


def multiple_choice(letters: str = _LETTERS) -> Score:
    """Score 1 if the chosen letter is the reference's, else 0.

    The choice is the letter inside the last \\boxed{...}; else after the last "answer" ("the answer is (B)", "Answer:
    **B**"); else that of a last line which is a choice ("B", "(B).", "B) Paris"). The reference is a letter, a text
    that begins with one ("B) Paris"), or an index from 0.
    """
    if not letters or not letters.isalpha() or len(set(letters.upper())) != len(letters):
        raise ValueError(f"the reward multiple_choice: letters = {letters!r}: give different letters, such as 'ABCD'")
    known = letters.upper()
    # Possessive quantifiers: with backtracking, runs of spaces would take O(length^4).
    one = rf"(?:\\text(?:bf)?+\{{)?+\s*+[*(]*+([{known}{known.lower()}])(?![\w'])"
    boxed = re.compile(rf"\\boxed\{{\s*+{one}")
    said = re.compile(rf"answer(?:\s++is)?+\s*+[:=]?+\s*+(?:option\s++|choice\s++)?+\**+\s*+{one}", re.IGNORECASE)
    alone = re.compile(rf"\s*+{one}\s*+(?:[).:*].*)?")

    def choice(text: str) -> str | None:
        last_line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        whole = alone.fullmatch(last_line)
        for found in (boxed.findall(text), said.findall(text), whole.groups() if whole else ()):
            if found:
                return found[-1].upper()
        return None

    def score(item: Item) -> float:
        reference = reference_of(item, "multiple_choice")
        if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(known):
            right = known[reference]
        else:
            found = re.match(rf"\s*\(?([{known}{known.lower()}])(?![\w'])", str(reference))
            if found is None:
                raise ValueError(f"the answer {str(reference)!r:.100} begins with none of the letters {known}")
            right = found[1].upper()
        return float(choice(item["completion"]) == right)

    return score


def search_qa() -> Score:
    """Score Search-R1 like verl (search_r1_like_qa_em.py): 1 if the last <answer> equals one of the references, without
    regard to case, punctuation, articles and white space; 0.25 with more than 10 of either tag; else 0.

    A reference is a text, a list of texts, or a table whose `target` is one of these.
    """

    def score(item: Item) -> float:
        reference = reference_of(item, "search_qa")
        targets = reference.get("target") if isinstance(reference, dict) else reference
        targets = [targets] if isinstance(targets, str) else targets
        if not isinstance(targets, list) or not targets:
            raise ValueError(f"the answer {str(reference)!r:.100} has no target: a text, or a list of them")
        text = item["completion"]
        found = _SEARCH_ANSWER.findall(text)
        if not found or _bare(found[-1]) not in map(_bare, map(str, targets)):
            return 0.0
        return 0.25 if max(text.count("<answer>"), text.count("</answer>")) > _MAX_TAGS else 1.0

    return score


def _bare(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", text).split())


def _one_of(reward: str, param: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"the reward {reward}: {param} = {value!r} is none of {', '.join(known)}")


_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL | re.IGNORECASE)


def json_text(schema: Any = None, fenced: bool = True, base_dir: str = ".") -> Callable[[dict[str, Any]], float]:
    """Score 1 if the whole completion is JSON (RFC 8259: no NaN) and fits `schema`, else 0.

    `schema`: a JSON schema as a table, or the path of a file; its references to other documents are not fetched.
    `fenced`: of a completion with exactly one fenced Markdown block, only that block counts.
    """
    fits = None if schema is None else _validator(schema, base_dir)

    def score(item: dict[str, Any]) -> float:
        text = item["completion"]
        blocks = _FENCED.findall(text) if fenced else []
        try:
            value = json.loads(blocks[0] if len(blocks) == 1 else text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return 0.0
        return float(fits is None or fits(value))

    return score


def pattern(pattern: str, match: str = "full") -> Callable[[dict[str, Any]], float]:
    """Score 1 if the completion matches the regular expression `pattern` of Python's re, else 0.

    `match`: full (the whole completion), start, or search (anywhere). A dot matches no line break, unless the pattern
    begins with (?s).
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"the reward format: pattern = {pattern!r} is no regular expression: {error}") from None
    matches = {"full": compiled.fullmatch, "start": compiled.match, "search": compiled.search}.get(match)
    if matches is None:
        raise ValueError(f"the reward format: match = {match!r} is none of full, start, search")
    return lambda item: float(matches(item["completion"]) is not None)


def _validator(schema: Any, base_dir: str) -> Callable[[Any], bool]:
    try:
        import jsonschema.exceptions
        import jsonschema.validators
        import referencing
    except ImportError as error:
        raise ValueError(
            "the reward json with a schema needs the package jsonschema: pip install 'rollover[json]'"
        ) from error
    if isinstance(schema, str):
        try:
            schema = json.loads((Path(base_dir) / schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"the reward json: schema = {schema!r} cannot be read: {error}") from None
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise ValueError(f"the reward json: schema is no JSON schema: {error.message}") from None
    return kind(schema, registry=referencing.Registry()).is_valid


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not of JSON")
