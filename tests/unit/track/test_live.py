"""LiveView: what a step looks like on a terminal of 80 and of 120 columns, and as plain lines."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rollover.track.figures import count, decimal, duration, percent, sparkline, time_split
from rollover.track.live import Heartbeat, LiveView, Progress
from rollover.track.metrics import validate
from rollover.track.tracker import RunInfo, Trackers

ROW = {
    "step": 12,
    "reward/mean": 0.412,
    "speed/generated_tokens_per_s": 812.4,
    "speed/trained_tokens_per_s": 1022.0,
    "speed/step_tokens_per_s": 455.0,
    "tokens/generated": 1_234_567,
    "tokens/trained": 1_100_000,
    "tokens/dropped": 4_567,
    "tokens/held": 130_000,
    "staleness/max": 2,
    "staleness/bound": 3,
    "staleness/mean": 0.4,
    "rollouts/resumed": 14,
    "rollouts/partial_share": 0.22,
    "time/step_s": 10.0,
    "time/generate_s": 6.2,
    "time/score_s": 0.3,
    "time/train_s": 3.0,
    "time/weights_s": 0.2,
}


def rich_console(width: int) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None, legacy_windows=False
    )


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@contextmanager
def running(view: LiveView) -> Iterator[LiveView]:
    """As a run has it."""
    with Trackers() as trackers:
        trackers.add("live", view)
        trackers.on_start(RunInfo("demo", Path("."), {}, False))
        yield view


def panel(view: LiveView, console: Console) -> list[str]:
    with console.capture() as capture:
        console.print(view.render())
    return capture.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [80, 120])
def test_panel_shows_everything_within_the_width(width: int) -> None:
    validate(ROW)
    console = rich_console(width)
    now = [0.0]
    view = LiveView("rich", 100, "demo", console, clock=lambda: now[0])
    for i in range(100):
        view.on_step({**ROW, "reward/mean": 0.1 + i / 1000})
    view.on_step(ROW)
    view.on_phase("training")
    now[0] = 75.0
    lines = panel(view, console)
    assert {cell_len(line) for line in lines} == {width}
    text = "\n".join(lines)
    for part in (
        "rollover  demo",
        "step 12/100",
        "10.0 s/step",
        "ETA 14:40",
        "training (1:15)",
        "0.412",
        "▲ +0.0",
        "█",
        "812 tok/s generating",
        "1.23M generated = 1.1M trained + 4,567 dropped + 130k held",
        "max/bound 2/3",
        "mean 0.40",
        "resumed 14",
        "partial 22%",
        "generate 62%  score 3%  train 30%  weights 2%  other 3%",
        "in turns: generation 6.2 of 10.0 s; overlap saves at most 3.3 s",
        "rollout.overlap with rollout.max_staleness = 1",
    ):
        assert part in text, part
    assert "…" not in text, "something was cut off"


def test_rich_live_draws_messages_above_and_the_final_state() -> None:
    console = rich_console(80)
    with running(LiveView("rich", 12, console=console)) as view:
        view.on_phase("generating")
        view.on_message("evaluated [0.25]")
        view.on_step(ROW)
    shown = output(console)
    assert "evaluated [0.25]" in shown
    assert "done (0:00)" in shown and "step 12/12" in shown


def test_an_error_leaves_the_view_stopped() -> None:
    console = rich_console(80)
    with pytest.raises(KeyboardInterrupt), running(LiveView("rich", 12, console=console)):
        raise KeyboardInterrupt
    assert "stopped" in output(console)


def test_plain_is_one_line_a_step() -> None:
    console = plain_console()
    with running(LiveView("auto", 100, console=console)) as view:
        assert view.mode == "plain"
        view.on_phase("generating")
        view.on_step({**ROW, "step": 11, "reward/mean": 0.5})
        view.on_step(ROW)
        view.on_message("a [bold]message[/bold] " + "x" * 100)
    lines = output(console).splitlines()
    assert len(lines) == 3
    assert lines[1] == (
        "step 12/100 | reward 0.412 (trend 0.482) | 10.0 s, ETA 14:40 | 812 tok/s | staleness 2/3 | partial 22%"
        " | dropped 0%"
    )
    assert lines[1].isascii()
    assert lines[2] == "a [bold]message[/bold] " + "x" * 100


def test_plain_line_of_an_empty_row() -> None:
    console = plain_console()
    LiveView("plain", 5, console=console).on_step({"step": 1, "reward/mean": None, "loss": float("nan")})
    expected = "step 1/5 | reward - (trend -) | - s, ETA - | - tok/s | staleness -/- | partial - | dropped -\n"
    assert output(console) == expected


def test_verbose_is_one_line_a_step_with_all_figures() -> None:
    console = plain_console()
    view = LiveView("verbose", 100, console=console)
    view.on_step({**ROW, "step": 11, "reward/mean": 0.5})
    view.on_step(ROW)
    assert output(console).splitlines()[1] == (
        "step 12/100 | reward 0.412 (trend 0.482) | 812 tok/s | generated 1.23M trained 1.1M dropped 4,567 held 130k"
        " | staleness 2/3 | resumed 14 partial 22% | generate 62% score 3% train 30% weights 2% other 3%"
        " | in turns: generation 6.2 of 10.0 s; overlap saves at most 3.3 s | 10.0 s | ETA 14:40"
    )


@given(st.dictionaries(st.sampled_from(sorted(ROW)), st.none() | st.floats(-1e12, 1e12)), st.integers(1, 10**7))
def test_the_step_line_fits_120_columns(changes: dict[str, float | None], num_steps: int) -> None:
    console = plain_console()
    view = LiveView("plain", num_steps, console=console)
    view.on_step({**ROW, **changes, "step": num_steps})
    (line,) = output(console).splitlines()
    assert len(line) <= 120 and line.startswith("step ")


def test_a_bar_shows_how_far_the_step_is() -> None:
    console = rich_console(100)
    view = LiveView("rich", 100, console=console)
    generated = 1_000_000
    view.watch(lambda: Progress(3, 8, generated))
    view.on_phase("generating")  # of a run that goes on: the first million is not this step's
    generated += 1234
    text = "\n".join(panel(view, console))
    assert (
        "generating (0:00)" in text and "3 of 8 groups ready, 1,234 tokens" in text and "━" in text and "…" not in text
    )
    view.on_step({**ROW, "tokens/generated": generated - 34})
    assert "3 of 8 groups ready, 34 tokens" in "\n".join(panel(view, console))
    view.on_phase("evaluating")
    text = "\n".join(panel(view, console))
    assert "evaluating (0:00)" in text and "groups" not in text.partition("reward")[0]


def test_training_is_told_in_tokens() -> None:
    console, made = rich_console(100), Progress(8, 8, 500, 2310, 4900)
    view = LiveView("rich", 100, console=console)
    view.watch(lambda: made)
    view.on_phase("training")
    text = "\n".join(panel(view, console))
    assert "training (0:00)" in text and "2,310 of 4,900 tokens" in text and "groups" not in text.partition("reward")[0]
    plain = plain_console()
    view = LiveView("plain", 100, console=plain, heartbeat_s=0.02)
    view.watch(lambda: made)
    view.on_phase("training")
    eventually(lambda: "training (0:00): 2,310 of 4,900 tokens\n" in output(plain))
    made = Progress(8, 8, 500)  # of a backend that does not count them
    eventually(lambda: "training (0:00): 8 of 8 groups ready, 0 tokens\n" in output(plain))
    view.close()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_plain_lines_say_what_takes_long() -> None:
    console = plain_console()
    view = LiveView("plain", 100, console=console, heartbeat_s=0.02)
    view.watch(lambda: Progress(3, 8, 500))
    view.on_phase("evaluating")
    eventually(lambda: output(console).count("evaluating (0:00)\n") >= 2)
    view.on_phase("generating")
    eventually(lambda: "generating (0:00): 3 of 8 groups ready, 0 tokens\n" in output(console))
    view.close()
    said = output(console)
    time.sleep(0.2)
    assert output(console).count("\n") <= said.count("\n") + 1, "at most what was being said"


def test_the_pauses_grow() -> None:
    said: list[float] = []
    still = Heartbeat(said.append, first_s=0.01)
    still.begin()
    eventually(lambda: len(said) >= 4)
    still.end()
    assert said[:4] == pytest.approx([0.01, 0.02, 0.04, 0.08])


def test_auto_is_rich_on_a_terminal_that_can_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert LiveView("auto", 1, console=rich_console(80)).mode == "rich"
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert LiveView("auto", 1, console=Console(file=ascii_file, force_terminal=True)).mode == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert LiveView("auto", 1, console=rich_console(80)).mode == "plain"


def test_eta_uses_the_latest_steps() -> None:
    view = LiveView("off", 100, console=plain_console())
    assert view.eta_s is None
    view.on_step({"step": 1, "time/step_s": 1000.0})
    for step in range(2, 51):
        view.on_step({"step": step, "time/step_s": 2.0})
    assert view.eta_s == 100.0
    view.on_step({"step": 101, "time/step_s": 2.0})
    assert view.eta_s == 0.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (9_999, "9,999"), (12_345, "12.3k"), (999_900, "1000k"), (1_234_567, "1.23M"), (2e9, "2G")],
)
def test_count(value: float | None, text: str) -> None:
    assert count(value) == text


def test_formats() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 3599, 4000)] == ["-", "0:00", "1:00", "59:59", "1:06:40"]
    assert [percent(s) for s in (None, 0.0, 0.225, 1)] == ["-", "0%", "22%", "100%"]
    assert [decimal(x) for x in (None, float("nan"), 0.1234)] == ["-", "-", "0.123"]


def test_sparkline() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([1, 1], 5) == "▁▁"
    assert sparkline([9, 0, 0.5, 1], 3) == "▁▅█"


@given(st.lists(st.floats(0, 5, allow_nan=False), min_size=4, max_size=4))
def test_time_split_adds_up(seconds: list[float]) -> None:
    keys = ("time/generate_s", "time/score_s", "time/train_s", "time/weights_s")
    split = time_split({**dict(zip(keys, seconds, strict=True)), "time/step_s": sum(seconds) + 1.0})
    assert [label for label, _ in split] == ["generate", "score", "train", "weights", "other"]
    assert sum(share for _, share in split) == pytest.approx(1)
    assert time_split({"time/step_s": 0.0}) == []


class FullDisk(io.StringIO):
    """The output goes to a file on a disk that has no room, until `full` is False."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_line_that_cannot_be_printed_does_not_end_the_run() -> None:
    file = FullDisk()
    with running(LiveView("plain", 10, console=Console(file=file, force_terminal=False, width=80))) as view:
        view.on_message("lost, perhaps")
        view.on_step(ROW)
        file.full = False
        view.on_message("there is room again")
    assert file.getvalue().endswith("there is room again\n")
