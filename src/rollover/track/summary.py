"""The summary at the end of a run: change of the reward, use of tokens and time, files. Opens no files of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollover.track.bottleneck import Bottleneck, find_bottleneck
from rollover.track.console import excerpt, new_console, shown, shown_lines
from rollover.track.figures import count, decimal, duration, percent, with_interval
from rollover.track.metrics import aggregate
from rollover.track.statistics import PER_K, parts_of

_DROPPED_TOKENS = re.compile(r"dropped/(.+)/tokens")
_PHASES = ("generate", "score", "schedule", "train", "weights", "sleep", "checkpoint", "eval", "other")


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """A held-out task and the model's answers before and after training. A score is None if missing."""

    prompt: str
    before: str
    after: str
    before_score: float | None = None
    after_score: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Plain data of a run.

    `eval_before`, `eval_after`: {"mean", "ci": [low, high], "pass@1", ..., "sources": {name: the same}} or None.
    `last_row`: the last metrics row (its counters give the waste report). `time_s`: seconds by phase; with streaming
    they sum to more than `total_s`. `waits`: the bottleneck over all steps. `partial_share`: share of trained rollouts
    with segments of >= 2 policy versions. `paths`: by label. `reward_errors`: number of failed rewards and the most
    frequent error. `enough`: the reason of an early end, else "". `view_command`: the command that shows the run in a
    browser. `now`: current state by label (`rollover show`).
    """

    title: str
    steps: int
    eval_before: Mapping[str, Any] | None = None
    eval_after: Mapping[str, Any] | None = None
    samples: Sequence[SampleAnswer] = ()
    last_row: Mapping[str, float | int | None] = field(default_factory=dict)
    partial_share: float | None = None
    time_s: Mapping[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    waits: Bottleneck | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    reward_errors: str = ""
    enough: str = ""
    view_command: str = ""
    now: Mapping[str, str] = field(default_factory=dict)


def run_summary(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
    paths: Mapping[str, str],
    reward_errors: str = "",
    enough: str = "",
    view_command: str = "",
) -> RunSummary:
    """Summarise a run, resumptions included, from the rows of metrics.jsonl and eval.jsonl."""
    before = evals[0] if evals and evals[0].get("step", 0) == 0 else None  # missing with eval.at_start = false
    after = evals[-1] if evals and evals[-1] is not before else None
    if after is None:
        before = None
    answers = {s["prompt"]: s for s in after.get("samples") or ()} if after is not None else {}
    samples = [
        SampleAnswer(s["prompt"], s["completion"], a["completion"], s["score"], a["score"])
        for s in (before.get("samples") or () if before is not None else ())
        if (a := answers.get(s["prompt"])) is not None
    ]
    time_s = {phase: sum(row.get(f"time/{phase}_s") or 0.0 for row in rows) for phase in _PHASES} if rows else {}
    evaluated = sum(e.get("seconds", 0.0) for e in evals)
    total_s = sum((row.get("time/step_s") or 0.0) - (row.get("time/eval_s") or 0.0) for row in rows) + evaluated
    time_s["eval"] = evaluated
    consumed = [0.0, *(row.get("groups/consumed") or 0.0 for row in rows)]  # missing in runs of older versions
    shares = [row.get("rollouts/partial_share") or 0.0 for row in rows]
    partial = sum((b - a) * share for a, b, share in zip(consumed, consumed[1:], shares, strict=False))
    return RunSummary(
        title=title,
        steps=rows[-1]["step"] if rows else 0,
        eval_before=before,
        eval_after=after,
        samples=samples,
        last_row=rows[-1] if rows else {},
        partial_share=partial / consumed[-1] if consumed[-1] else None,
        time_s={phase: seconds for phase, seconds in time_s.items() if seconds > 0},
        total_s=total_s,
        waits=find_bottleneck(
            aggregate({k: v for k, v in row.items() if k.startswith(("time/", "wait/"))} for row in rows)
        ),
        paths=paths,
        reward_errors=reward_errors,
        enough=enough,
        view_command=view_command,
    )


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print the summary: tables on a terminal, plain aligned lines elsewhere (never wrapped, without colour).

    Shares of tokens are relative to the generated ones; `prefilled again` is a cost, not one of their accounts. Zero
    accounts, costs and phases have no line.
    """
    console = console or new_console()
    plain = not console.is_terminal
    _print(console, Text(f"\n{summary.title}: {summary.steps} steps", style="" if plain else "bold"))
    if summary.enough:
        _print(console, Text(f"It ended early: {summary.enough}"))
    for title, header, rows in (
        ("Run", (), list(summary.now.items())),
        ("Held-out tasks", ("", "before", "after", "change"), _eval_rows(summary)),
        ("Tokens", ("", "tokens", "share of generated"), _waste_rows(summary)),
        ("Time", ("", "time", "share"), _time_rows(summary)),
        ("Files", (), list(summary.paths.items())),
    ):
        if rows:
            # A table would fold paths, so that they could not be copied.
            _print_table(console, title, header, rows, plain or title in ("Run", "Files"))
        if title == "Held-out tasks":
            _print_samples(console, summary.samples, plain)
        if title == "Time" and summary.waits is not None:
            hint = f" (try {summary.waits.advice})" if summary.waits.advice else ""
            _print(console, Text(f"  {summary.waits.text}{hint}"))
    if summary.reward_errors:
        _print(console, Text(f"\nRewards: {summary.reward_errors}"))
    if summary.view_command:
        _print(console, Text(f"\nTo see it in a browser: {summary.view_command}"))


def _print(console: Console, text: Text) -> None:
    text.plain = shown_lines(text.plain, console)  # the run may be untrusted
    console.print(text, soft_wrap=True)


def _print_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], plain: bool
) -> None:
    rows = [[shown(cell, console) for cell in row] for row in rows]
    if plain:
        table = [list(header), *rows] if header else rows
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        _print(console, Text(f"\n{title}"))
        for row in table:
            _print(console, Text("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()))
        return
    table = Table(title=title, title_justify="left", title_style="bold", show_header=bool(header), header_style="dim")
    for i in range(len(rows[0])):
        table.add_column(header[i] if header else "", justify="right" if header and i else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style="bold" if header and row is rows[0] else "") for cell in row))
    console.print()
    console.print(table)


def _eval_rows(summary: RunSummary) -> list[list[str]]:
    before, after = summary.eval_before, summary.eval_after
    if before is None and after is None:
        return []
    rows = [["mean reward", _with_ci(before), _with_ci(after), _change(before, after, "mean")]]
    keys = dict.fromkeys(k for e in (before, after) if e for k in e if PER_K.fullmatch(k))
    for key in keys:
        rows.append([key, _number(before, key), _number(after, key), _change(before, after, key)])
    parts = [parts_of(e) if e else {} for e in (before, after)]
    names = dict.fromkeys(name for part in parts for name in part)
    for name in names if len(names) > 1 else ():
        b, a = (part.get(name) for part in parts)
        rows.append([f"  {name}", _with_ci(b), _with_ci(a), _change(b, a, "mean")])
    left_out = [e.get("left_out") if e else None for e in (before, after)]
    if any(left_out):
        rows.append(["left out (prompts too long)", *map(count, left_out), ""])
    return rows


def _number(evaluation: Mapping[str, Any] | None, key: str) -> str:
    return decimal(evaluation.get(key) if evaluation else None)


def _with_ci(evaluation: Mapping[str, Any] | None) -> str:
    return with_interval(evaluation.get("mean"), evaluation.get("ci")) if evaluation else decimal(None)


def _change(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, key: str) -> str:
    old, new = (e.get(key) if e else None for e in (before, after))
    return decimal(None) if old is None or new is None else f"{new - old:+.3f}"


def _waste_rows(summary: RunSummary) -> list[list[str]]:
    row = summary.last_row
    generated = row.get("tokens/generated")
    if generated is None:
        return []
    accounts = [("generated", generated), ("trained", row.get("tokens/trained"))]
    accounts += [(f"dropped: {match[1]}", row[key]) for key in row if (match := _DROPPED_TOKENS.fullmatch(key))]
    if len(accounts) == 2:
        accounts.append(("dropped", row.get("tokens/dropped")))
    accounts.append(("held, unfinished or not trained", row.get("tokens/held")))
    # Not an account of the ledger: work done twice.
    accounts.append(("prefilled again (cost)", row.get("engine/reprefill_tokens")))
    rows = [
        [label, count(tokens), percent(tokens / generated) if generated and tokens is not None else decimal(None)]
        for label, tokens in accounts
        if tokens != 0 or label in ("generated", "trained")
    ]
    if summary.partial_share:
        rows.append(["rollouts of >= 2 policy versions", "", percent(summary.partial_share)])
    return rows


def _time_rows(summary: RunSummary) -> list[list[str]]:
    total = summary.total_s or sum(summary.time_s.values())
    if total <= 0:
        return []
    return [["total", duration(total), "100%"]] + [
        [phase, duration(seconds), percent(seconds / total)]
        for phase, seconds in summary.time_s.items()
        if round(seconds) or round(100 * seconds / total)
    ]


def _print_samples(console: Console, samples: Sequence[SampleAnswer], plain: bool) -> None:
    if not samples:
        return
    _print(console, Text("\nAnswers before and after", style="" if plain else "bold"))
    for sample in samples:
        _print(console, Text("  " + excerpt(sample.prompt, console), style="" if plain else "dim"))
        for label, answer, score in (
            ("before", sample.before, sample.before_score),
            ("after", sample.after, sample.after_score),
        ):
            style = "" if plain or score is None else "green" if score > 0 else "red"
            _print(
                console, Text.assemble(f"    {label:6} ", (f"[{decimal(score, 2)}] ", style), excerpt(answer, console))
            )
