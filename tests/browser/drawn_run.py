"""A run that never was, with all that the dashboard draws: steps, visits to an engine, evaluations, dropped groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recorded_run import write_run
from rollover.track.answers import Answer, write_answers
from rollover.track.trace import TRACE, TraceEvent, TraceFile

STEPS = 12


def make_run(path: Path, text: Callable[[int], str] = lambda step: f"the answer of step {step}") -> Path:
    """Of twelve of twenty steps."""
    path.mkdir(parents=True)
    write_run(path, steps=STEPS, num_steps=20, text=text)
    events = []
    for step in range(1, STEPS + 1):
        at = 100.0 * step
        events += [TraceEvent("generate_start", at, step - 1)]
        for number in (3 * step, 3 * step + 1):
            for sibling in range(2):
                start, end, segments = at + 1 + sibling, at + 30 + 5 * sibling, ((step - 1, 3),)
                events += [TraceEvent("start", start, step - 1, number, sibling)]
                events += [TraceEvent("finish", end, step - 1, number, sibling, tokens=3, segments=segments)]
        events += [TraceEvent("generate_end", at + 50, step - 1), TraceEvent("train_start", at + 50, step - 1)]
        events += [TraceEvent("train_end", at + 90, step - 1), TraceEvent("publish", at + 91, step)]
    TraceFile(path / TRACE).write(sorted(events, key=lambda event: event.seconds))
    (path / "evaluations").mkdir()
    for step, score in ((0, 0.0), (10, 1.0)):
        answers = [_answer(0, 0, score, text(step)), _answer(0, 1, 0.5, "eight"), _answer(1, 0, 0.25, text(step))]
        write_answers(path / "evaluations" / f"step-{step:06d}.jsonl", answers)
    return path


def _answer(task: int, sibling: int, score: float, text: str) -> Answer:
    return Answer(f"task-{task}", sibling, "sums", None, "7", "eos", 9, score, None, f"What is {task} + 5?", text)
