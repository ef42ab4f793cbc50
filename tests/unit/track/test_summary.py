"""print_summary: the numbers that end a run, on a terminal and in a log file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollover.track.bottleneck import Bottleneck
from rollover.track.summary import RunSummary, SampleAnswer, print_summary, run_summary


def evaluation(mean: float, **more) -> dict:
    source = {"mean": mean, "ci": [mean - 0.05, mean + 0.05], "pass@1": mean}
    return {**source, "pass@4": mean + 0.1, "sources": {"chain_sum": source, "countdown": source}, **more}


FULL = RunSummary(
    title="quickstart",
    steps=40,
    eval_before=evaluation(0.2),
    eval_after=evaluation(0.55),
    samples=[SampleAnswer("What is 3 + 4?", "Let me\nthink. [b]6[/b]", "7", 0.0, 1.0)],
    last_row={
        "step": 40,
        "tokens/generated": 1000,
        "tokens/trained": 800,
        "tokens/dropped": 150,
        "dropped/stale/tokens": 100,
        "dropped/stale/groups": 2,
        "dropped/too_few_rewards/tokens": 50,
        "tokens/held": 50,
        "engine/reprefill_tokens": 250,
    },
    partial_share=0.34,
    time_s={"generate": 300.0, "score": 3.0, "train": 97.0},
    waits=Bottleneck("generation", "generation-bound: 300 s", "more engine.threads"),
    paths={"model": "/runs/quickstart-1/model", "metrics": "/runs/quickstart-1/metrics.jsonl"},
    view_command="rollover view runs/quickstart-1",
)


def text_of(summary: RunSummary, width: int = 80, terminal: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_summary(summary, Console(file=file, force_terminal=terminal, width=width, color_system=None))
    file.flush()
    return raw.getvalue().decode(encoding)


def squeezed(text: str) -> list[str]:
    """Lines with the cells of tables separated by one space."""
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


@pytest.mark.parametrize("terminal", [False, True])
def test_numbers(terminal: bool) -> None:
    lines = squeezed(text_of(FULL, 100, terminal))
    for expected in (
        "quickstart: 40 steps",
        "mean reward 0.200 [0.150, 0.250] 0.550 [0.500, 0.600] +0.350",
        "pass@1 0.200 0.550 +0.350",
        "pass@4 0.300 0.650 +0.350",
        "countdown 0.200 [0.150, 0.250] 0.550 [0.500, 0.600] +0.350",
        "What is 3 + 4?",
        "before [0.00] Let me think. [b]6[/b]",
        "after [1.00] 7",
        "generated 1,000 100%",
        "trained 800 80%",
        "dropped: stale 100 10%",
        "dropped: too_few_rewards 50 5%",
        "held, unfinished or not trained 50 5%",
        "prefilled again (cost) 250 25%",
        "rollouts of >= 2 policy versions 34%",
        "total 6:40 100%",
        "generate 5:00 75%",
        "generation-bound: 300 s (try more engine.threads)",
        "model /runs/quickstart-1/model",
        "To see it in a browser: rollover view runs/quickstart-1",
    ):
        assert expected in lines, expected


def test_what_is_zero_has_no_line() -> None:
    """A synchronous run without an accident: nothing dropped, held, prefilled again or of two versions."""
    zeros = {f"dropped/{reason}/tokens": 0 for reason in ("stale", "filtered", "masked")}
    counts = {"tokens/generated": 90, "tokens/trained": 90, "tokens/dropped": 0, "tokens/held": 0}
    row = {"step": 3, **counts, **zeros, "engine/reprefill_tokens": 0}
    times = {"generate": 6.0, "score": 0.01, "schedule": 0.02, "train": 4.0}
    lines = squeezed(text_of(RunSummary("sync", 3, last_row=row, partial_share=0.0, time_s=times)))
    assert [line for line in lines if line] == [
        "sync: 3 steps",
        "Tokens",
        "tokens share of generated",
        "generated 90 100%",
        "trained 90 100%",
        "Time",
        "time share",
        "total 0:10 100%",
        "generate 0:06 60%",
        "train 0:04 40%",
    ]


def test_the_verdict_is_on_the_sums_of_all_steps() -> None:
    counts = {"groups/consumed": 2, "rollouts/partial_share": 0.0, "reward/mean": None}
    first = {"time/step_s": 10.0, "time/generate_s": 8.0, "wait/engine_for_trainer_s": 0.0}
    second = {"time/step_s": 20.0, "time/generate_s": 1.0, "wait/engine_for_trainer_s": 10.0}
    rows = [{"step": step, **counts, **row} for step, row in enumerate((first, second), 1)]
    waits = run_summary("run", rows, [], {}).waits
    assert waits is not None and waits.text == "trainer-bound: the engine stood idle 10.0 of 30.0 s"
    assert run_summary("run", [], [], {}).waits is None


def test_plain_is_ascii_and_never_wrapped() -> None:
    text = text_of(FULL, width=30)
    assert text.isascii()
    assert any(len(line) > 60 for line in text.splitlines())


def test_a_run_without_evaluation_or_steps() -> None:
    text = text_of(RunSummary("empty", 0))
    assert text == "\nempty: 0 steps\n"


def test_one_sided_evaluation_and_a_single_source() -> None:
    after = evaluation(0.5, sources={"chain_sum": evaluation(0.5)})
    lines = squeezed(text_of(RunSummary("run", 1, eval_after=after)))
    assert "mean reward - 0.500 [0.450, 0.550] -" in lines
    assert not any("chain_sum" in line for line in lines), "one source is the total"


def test_missing_scores_are_dashes() -> None:
    text = text_of(RunSummary("run", 1, samples=[SampleAnswer("p", "b", "a")], last_row={"tokens/generated": 0}))
    assert "before [-] b" in text
    assert "generated 0 -" in squeezed(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_printed_answers_are_escaped_and_encodable(terminal: bool) -> None:
    answer = SampleAnswer("\x1b[2Jp", "\u2192 ü \x07", "x" * 1000)
    text = text_of(RunSummary("run", 1, samples=[answer]), terminal=terminal, encoding="ascii")
    assert "\x1b[2J" not in text and "\x07" not in text
    assert "? ?" in text
    assert "x" * 397 + "..." in text and "x" * 398 not in text


def test_failed_rewards_are_told_if_there_are_any() -> None:
    text = "4 of 5 rewards failed; most often (3 times): KeyError: 0 (mine.py:7)"
    assert f"Rewards: {text}" in text_of(RunSummary("run", 3, reward_errors=text))
    assert "Rewards:" not in text_of(RunSummary("run", 3))


def test_tasks_left_out_of_an_evaluation_have_a_line() -> None:
    summary = RunSummary("r", 1, eval_before=evaluation(0.2), eval_after=evaluation(0.3, left_out=4))
    assert "left out (prompts too long) - 4" in squeezed(text_of(summary))
    assert "left out" not in text_of(FULL)
