"""The live view of a run in the terminal: a panel on a TTY, one plain line per step elsewhere.

Computes no metric beyond a trend and an ETA. A missing value is shown as a dash. Where lines are plain, a heartbeat
reports phases that take long.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollover import logs
from rollover.track.bottleneck import Bottleneck, find_bottleneck
from rollover.track.console import new_console, shown, shown_lines
from rollover.track.figures import DASH, TIME_SPLIT, count, decimal, duration, percent, sparkline, time_split
from rollover.track.tracker import Cut, Row, RunInfo, Tracker

Mode = Literal["auto", "rich", "plain", "verbose", "off"]
COLUMNS = 120  # of a plain line
_BETWEEN = " | "
_STEP_PHASES = ("generating", "training")
_EMA_DECAY = 0.8
_ETA_STEPS = 20
_SHARES_A_LINE = 5  # of the time split, in a panel of 80 columns


def step_line(row: Row, num_steps: int, trend: float | None, eta_s: float | None) -> str:
    """Format a step in at most COLUMNS characters, the most important values first."""
    if "sft/loss" in row:
        return _sft_line(row, num_steps, eta_s)
    dropped, generated = row.get("tokens/dropped"), row.get("tokens/generated")
    parts = [
        f"step {count(row.get('step'))}/{num_steps}",
        f"reward {decimal(row.get('reward/mean'))} (trend {decimal(trend)})",
        f"{decimal(row.get('time/step_s'), 1)} s, ETA {duration(eta_s)}",
        f"{count(row.get('speed/generated_tokens_per_s'))} tok/s",
        f"staleness {staleness(row)}",
        f"partial {percent(row.get('rollouts/partial_share'))}",
        f"dropped {percent(dropped / generated if generated and dropped is not None else None)}",
    ]
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(_BETWEEN) + len(part) > COLUMNS:
            break
        line += _BETWEEN + part
    return line


def full_line(row: Row, num_steps: int, trend: float | None, eta_s: float | None) -> str:
    """Format all values of a step (track.live = "verbose")."""
    if "sft/loss" in row:
        return _sft_line(row, num_steps, eta_s)
    split = " ".join(f"{label} {percent(share)}" for label, share in time_split(row)) or DASH
    bottleneck = find_bottleneck(row)
    parts = [
        f"step {count(row.get('step'))}/{num_steps}",
        f"reward {decimal(row.get('reward/mean'))} (trend {decimal(trend)})",
        f"{count(row.get('speed/generated_tokens_per_s'))} tok/s",
        f"generated {count(row.get('tokens/generated'))} trained {count(row.get('tokens/trained'))}"
        f" dropped {count(row.get('tokens/dropped'))} held {count(row.get('tokens/held'))}",
        f"staleness {staleness(row)}",
        *([f"acting {count(acting)}"] if (acting := row.get("rollouts/acting")) is not None else []),
        f"resumed {count(row.get('rollouts/resumed'))} partial {percent(row.get('rollouts/partial_share'))}",
        split,
        bottleneck.text if bottleneck is not None else DASH,
        f"{decimal(row.get('time/step_s'), 1)} s",
        f"ETA {duration(eta_s)}",
    ]
    return _BETWEEN.join(parts)


def _sft_line(row: Row, num_steps: int, eta_s: float | None) -> str:
    held_out = row.get("eval/sft_loss")
    parts = [
        f"step {count(row.get('step'))}/{num_steps}",
        f"loss {decimal(row.get('sft/loss'))}",
        *([f"held-out loss {decimal(held_out)}"] if held_out is not None else []),
        f"pass {decimal(row.get('sft/epoch'), 2)}",
        f"{decimal(row.get('time/step_s'), 1)} s, ETA {duration(eta_s)}",
        f"{count(row.get('speed/trained_tokens_per_s'))} tok/s",
    ]
    return _BETWEEN.join(parts)


def staleness(row: Row) -> str:
    """Format the largest staleness of the step and the bound."""
    return f"{count(row.get('staleness/max'))}/{count(row.get('staleness/bound'))}"


class Heartbeat:
    """Calls `report(seconds)` in its own thread after `first_s`, then whenever the elapsed time has doubled."""

    def __init__(self, report: Callable[[float], None], first_s: float = 30.0) -> None:
        self._report, self._first_s = report, first_s
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Restart the clock."""
        self.end()
        self._wait(0.0, self._first_s)

    def end(self) -> None:
        """Stop reporting."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wait(self, so_far: float, pause: float) -> None:
        with self._lock:
            timer = self._timer = threading.Timer(pause, lambda: self._again(timer, so_far + pause))
            timer.daemon = True
            timer.start()

    def _again(self, timer: threading.Timer, so_far: float) -> None:
        with self._lock:
            if self._timer is not timer:
                return  # stopped or restarted meanwhile
        self._report(so_far)
        with self._lock:
            if self._timer is not timer:
                return
        self._wait(so_far, so_far)


class Progress(NamedTuple):
    """Progress of the current step: `ready` of `wanted` groups, `trained` of `to_train` loss tokens (0 if the backend
    does not report them). `generated`: sampled tokens of the whole run."""

    ready: int
    wanted: int
    generated: int
    trained: int = 0
    to_train: int = 0


class LiveView(Tracker):
    """The tracker behind track.live.

    `mode`: "auto" is "rich" on a capable terminal, otherwise "plain"; "verbose" is "plain" with longer lines; "off"
    shows only messages. `num_steps`: number of the last step. `clock` returns seconds. `heartbeat_s`: plain lines
    report phases that take longer.
    """

    def __init__(
        self,
        mode: Mode,
        num_steps: int,
        title: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_s: float = 30.0,
    ) -> None:
        self._console = console or new_console()
        if mode in ("auto", "rich") and logs.is_json():
            mode = "plain"
        if mode == "auto":
            capable = self._console.is_terminal and not self._console.is_dumb_terminal
            mode = "rich" if capable and not self._console.options.ascii_only else "plain"
        self.mode: Mode = mode
        self._num_steps = num_steps
        self._title = title
        self._clock = clock
        self._phase = "starting"
        self._phase_start = clock()
        self._row: Row = {}
        self._bottleneck: Bottleneck | None = None
        self._rewards: deque[float] = deque(maxlen=512)
        self._trend: float | None = None
        self._previous_trend: float | None = None
        self._step_times: deque[float] = deque(maxlen=_ETA_STEPS)
        self._live: Live | None = None
        self._heartbeat = Heartbeat(self._print_heartbeat, heartbeat_s)
        self._progress_of: Callable[[], Progress] | None = None
        self._generated_before = 0.0

    def on_start(self, run: RunInfo) -> None:
        if self.mode == "rich":
            # Twice a second: the view must not take a core from the matrix products.
            self._live = Live(
                get_renderable=self.render, console=self._console, refresh_per_second=2, vertical_overflow="crop"
            )
            self._live.start()

    def watch(self, progress: Callable[[], Progress], num_steps: int | None = None) -> None:
        """Show `progress()` of the current step; any thread may call it.

        `num_steps`: of the run, if the data decide it (sft.epochs).
        """
        self._progress_of = progress
        self._num_steps = self._num_steps if num_steps is None else num_steps

    def close(self) -> None:
        self._heartbeat.end()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_phase(self, name: str) -> None:
        if name != self._phase:
            self._phase = name
            self._phase_start = self._clock()
            if not self._row and self._progress_of is not None:  # a resumed run has generated before
                self._generated_before = self._progress_of().generated
            if self.mode in ("plain", "verbose"):
                self._heartbeat.begin()

    def truncate(self, cut: Cut) -> None:
        self._row, self._bottleneck, self._trend, self._previous_trend = {}, None, None, None
        self._rewards.clear()
        self._step_times.clear()

    def on_step(self, row: Row) -> None:
        self._row, self._bottleneck = row, find_bottleneck(row)
        self._generated_before = row.get("tokens/generated") or 0.0
        reward = row.get("reward/mean")
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
            self._previous_trend = self._trend
            self._trend = reward if self._trend is None else _EMA_DECAY * self._trend + (1 - _EMA_DECAY) * reward
        if step_time := row.get("time/step_s"):
            self._step_times.append(step_time)
        if self.mode in ("plain", "verbose"):
            line = step_line if self.mode == "plain" else full_line
            self._print(line(row, self._num_steps, self._trend, self.eta_s))

    def on_message(self, text: str) -> None:
        if not logs.is_json():  # the handler of the logger prints JSON, with its level
            self._print(text)

    def _print(self, text: str) -> None:
        if logs.is_json():
            return logs.print_json(__name__, "INFO", text, self._console.file)
        with contextlib.suppress(OSError):  # no reader, or a full disk: no reason to end the run
            self._console.print(Text(shown_lines(text, self._console)), soft_wrap=True)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the recent pace; None before the first step."""
        if not self._step_times:
            return None
        left = max(0, self._num_steps - int(self._row.get("step") or 0))
        return left * sum(self._step_times) / len(self._step_times)

    def _print_heartbeat(self, seconds: float) -> None:
        progress = self._step_progress()
        text = f": {self._progress_shown(progress)[-1]}" if progress is not None else ""
        self._print(f"{self._phase} ({duration(seconds)}){text}")

    def _step_progress(self) -> Progress | None:
        return self._progress_of() if self._progress_of is not None and self._phase in _STEP_PHASES else None

    def _progress_shown(self, progress: Progress) -> tuple[int, int, str]:
        """Return (done, total, text)."""
        if self._phase == "training" and progress.to_train:
            text = f"{count(progress.trained)} of {count(progress.to_train)} tokens"
            return progress.trained, progress.to_train, text
        tokens = count(max(0.0, progress.generated - self._generated_before))
        ready, wanted = progress.ready, progress.wanted
        return ready, wanted, f"{ready} of {wanted} groups ready, {tokens} tokens"

    def render(self) -> RenderableType:
        """Render the panel."""
        width = self._console.width
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        rows.add_row("now", self._now())
        rows.add_row("reward", self._reward(width))
        rows.add_row("speed", _speed(self._row))
        rows.add_row("tokens", _tokens(self._row))
        rows.add_row("staleness", _partial(self._row))
        for label, line in zip(("time", ""), self._time(), strict=False):
            rows.add_row(label, line)
        if self._bottleneck is not None:
            rows.add_row("waits", Text(self._bottleneck.text))
            if self._bottleneck.advice:
                rows.add_row("try", Text(self._bottleneck.advice))
        title = Text.assemble(("rollover", "bold"), f"  {shown(self._title, self._console)}" if self._title else "")
        return Panel(Group(self._progress(), Text(), rows), title=title, title_align="left", width=min(width, 120))

    def _now(self) -> RenderableType:
        doing = Text(f"{self._phase} ({duration(self._clock() - self._phase_start)})", "bold")
        if (progress := self._step_progress()) is None:
            return doing
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        done, total, words = self._progress_shown(progress)
        grid.add_row(doing, ProgressBar(total=max(1, total), completed=min(done, total)), words)
        return grid

    def _progress(self) -> RenderableType:
        step = int(self._row.get("step") or 0)
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        pace = sum(self._step_times) / len(self._step_times) if self._step_times else None
        grid.add_row(
            Text(f"step {step}/{self._num_steps}", "bold"),
            ProgressBar(total=max(1, self._num_steps), completed=step),
            f"{decimal(pace, 1)} s/step   ETA {duration(self.eta_s)}",
        )
        return grid

    def _reward(self, width: int) -> Text:
        known = self._trend is not None and self._previous_trend is not None
        change = self._trend - self._previous_trend if known else None  # type: ignore[operator]
        text = Text.assemble((decimal(self._row.get("reward/mean")), "bold"), f"   trend {decimal(self._trend)} ")
        if change is not None:
            arrow, colour = ("▲", "green") if change > 0 else ("▼", "red") if change < 0 else ("=", "dim")
            text.append(f"{arrow} {change:+.3f}", colour)
        text.append("   " + sparkline(list(self._rewards), 60 if width >= 110 else 24), "green")
        return text

    def _time(self) -> list[Text]:
        colours = {label: colour for label, _, colour in TIME_SPLIT}
        split = time_split(self._row)
        shares = [Text(f"{label} {percent(share)}", colours.get(label, "dim")) for label, share in split]
        lines = [shares[:_SHARES_A_LINE], shares[_SHARES_A_LINE:]]
        return [Text("  ").join(line) for line in lines if line] or [Text(DASH)]


def _speed(row: Row) -> Text:
    return Text(
        f"{count(row.get('speed/generated_tokens_per_s'))} tok/s generating"
        f"   {count(row.get('speed/trained_tokens_per_s'))} training"
        f"   {count(row.get('speed/step_tokens_per_s'))} overall"
    )


def _tokens(row: Row) -> Text:
    dropped = row.get("tokens/dropped")
    return Text.assemble(
        f"{count(row.get('tokens/generated'))} generated = {count(row.get('tokens/trained'))} trained + ",
        (f"{count(dropped)} dropped", "red" if dropped else ""),
        f" + {count(row.get('tokens/held'))} held",
    )


def _partial(row: Row) -> Text:
    acting = row.get("rollouts/acting")
    return Text(
        f"max/bound {staleness(row)}   mean {decimal(row.get('staleness/mean'), 2)}"
        f"   resumed {count(row.get('rollouts/resumed'))}"
        f"   partial {percent(row.get('rollouts/partial_share'))}"
        + (f"   acting {count(acting)}" if acting is not None else "")
    )
