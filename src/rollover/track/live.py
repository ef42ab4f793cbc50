"""The live view of a run in the terminal: a panel on a TTY, one plain line a step elsewhere.

Owns how metric rows look while a run goes on. It computes no metric beyond a trend and an ETA, and a key that a row
does not have is shown as a dash.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollover.track.shown import shown_lines
from rollover.track.tracker import Cut, Row, RunInfo, Tracker
from rollover.track.waits import Verdict, verdict

Mode = Literal["auto", "rich", "plain", "off"]

_SPARKS = "▁▂▃▄▅▆▇█"
_DASH = "-"
_EMA_DECAY = 0.8
_ETA_STEPS = 20
# (label, key, colour) of the time split; what is left of time/step_s is "other".
TIME_SPLIT = (
    ("generate", "time/generate_s", "cyan"),
    ("score", "time/score_s", "magenta"),
    ("train", "time/train_s", "green"),
    ("weights", "time/weights_s", "yellow"),
    ("checkpoint", "time/checkpoint_s", "blue"),
    ("eval", "time/eval_s", "blue"),
)
_NOT_EVERY_STEP = ("checkpoint", "eval")  # shown in the steps that have them
_SHARES_A_LINE = 5  # of the time split, in a panel of 80 columns


def count(value: float | None) -> str:
    """1234567 as 1.23M; None as a dash."""
    if value is None or not math.isfinite(value):
        return _DASH
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if abs(scaled) < 999.5 else f"{scaled:.0f}{unit}"
    return f"{value:,.0f}"


def decimal(value: float | None, digits: int = 3) -> str:
    return _DASH if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return _DASH if share is None or not math.isfinite(share) else f"{100 * share:.0f}%"


def duration(seconds: float | None) -> str:
    """75 as 1:15, 4000 as 1:06:40; None as a dash."""
    if seconds is None or not math.isfinite(seconds):
        return _DASH
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as bars between their smallest and largest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_SPARKS[int((v - low) / span * (len(_SPARKS) - 1) + 0.5)] if span > 0 else _SPARKS[0] for v in shown)


def time_split(row: Row) -> list[tuple[str, float]]:
    """Shares of time/step_s by label, "other" last; empty if the row has no times.

    Checkpoint and evaluation are left out of a step that had none.
    """
    total = row.get("time/step_s")
    if not total:
        return []
    seconds = [(label, row.get(key) or 0.0) for label, key, _ in TIME_SPLIT]
    shares = [(label, s / total) for label, s in seconds if s or label not in _NOT_EVERY_STEP]
    return [*shares, ("other", max(0.0, 1 - sum(share for _, share in shares)))]


class LiveView(Tracker):
    """Shows a run as it goes.

    `mode` is track.live: "auto" is "rich" on a terminal that can show it, otherwise "plain"; "off" shows only messages.
    `num_steps` is the last step's number; `clock` gives seconds.
    """

    def __init__(
        self,
        mode: Mode,
        num_steps: int,
        title: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
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
        self._verdict: Verdict | None = None
        self._rewards: deque[float] = deque(maxlen=512)
        self._trend: float | None = None
        self._previous_trend: float | None = None
        self._step_times: deque[float] = deque(maxlen=_ETA_STEPS)
        self._live: Live | None = None

    def on_start(self, run: RunInfo) -> None:
        if self.mode == "rich":
            # Twice a second: the view must not take a core from the matrix products.
            self._live = Live(
                get_renderable=self.render, console=self._console, refresh_per_second=2, vertical_overflow="crop"
            )
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_phase(self, name: str) -> None:
        """Shown with its duration, on a terminal only."""
        if name != self._phase:
            self._phase = name
            self._phase_start = self._clock()

    def truncate(self, cut: Cut) -> None:
        self._row, self._verdict, self._trend, self._previous_trend = {}, None, None, None
        self._rewards.clear()
        self._step_times.clear()

    def on_step(self, row: Row) -> None:
        self._row, self._verdict = row, verdict(row)
        reward = row.get("reward/mean")
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
            self._previous_trend = self._trend
            self._trend = reward if self._trend is None else _EMA_DECAY * self._trend + (1 - _EMA_DECAY) * reward
        if step_time := row.get("time/step_s"):
            self._step_times.append(step_time)
        if self.mode == "plain":
            self._print(self._plain_line())

    def on_message(self, text: str) -> None:
        """Printed above the view if there is one, where it stays."""
        self._print(text)

    def _print(self, text: str) -> None:
        try:
            self._console.print(Text(shown_lines(text, self._console)), soft_wrap=True)
        except BrokenPipeError:
            raise  # the reader went away, as it may
        except OSError:
            pass  # a full disk, where the output goes to a file: the run is worth more than a line of it

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the pace of the latest ones; None before the first."""
        if not self._step_times:
            return None
        left = max(0, self._num_steps - int(self._row.get("step") or 0))
        return left * sum(self._step_times) / len(self._step_times)

    def _get(self, key: str) -> float | None:
        return self._row.get(key)

    def _trend_change(self) -> float | None:
        if self._trend is None or self._previous_trend is None:
            return None
        return self._trend - self._previous_trend

    def _staleness(self) -> str:
        return f"{count(self._get('staleness/max'))}/{count(self._get('staleness/bound'))}"

    def _plain_line(self) -> str:
        split = " ".join(f"{label} {percent(share)}" for label, share in time_split(self._row)) or _DASH
        parts = [
            f"step {count(self._get('step'))}/{self._num_steps}",
            f"reward {decimal(self._get('reward/mean'))} (trend {decimal(self._trend)})",
            f"{count(self._get('speed/generated_tokens_per_s'))} tok/s",
            f"generated {count(self._get('tokens/generated'))} trained {count(self._get('tokens/trained'))}"
            f" dropped {count(self._get('tokens/dropped'))} held {count(self._get('tokens/held'))}",
            f"staleness {self._staleness()}",
            *([f"acting {count(acting)}"] if (acting := self._get("rollouts/acting")) is not None else []),
            f"resumed {count(self._get('rollouts/resumed'))} partial {percent(self._get('rollouts/partial_share'))}",
            split,
            self._verdict.text if self._verdict is not None else _DASH,
            f"{decimal(self._get('time/step_s'), 1)} s",
            f"ETA {duration(self.eta_s)}",
        ]
        return " | ".join(parts)

    # ---- the panel

    def render(self) -> RenderableType:
        """The panel as it is now."""
        width = self._console.width
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        rows.add_row("now", Text(f"{self._phase} ({duration(self._clock() - self._phase_start)})", "bold"))
        rows.add_row("reward", self._reward(width))
        rows.add_row("speed", self._speed())
        rows.add_row("tokens", self._tokens())
        rows.add_row("staleness", self._partial())
        for label, line in zip(("time", ""), self._time(), strict=False):
            rows.add_row(label, line)
        if self._verdict is not None:
            rows.add_row("waits", Text(self._verdict.text))
            if self._verdict.advice:
                rows.add_row("try", Text(self._verdict.advice))
        title = Text.assemble(("rollover", "bold"), f"  {self._title}" if self._title else "")
        return Panel(Group(self._progress(), Text(), rows), title=title, title_align="left", width=min(width, 120))

    def _progress(self) -> RenderableType:
        step = int(self._get("step") or 0)
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
        change = self._trend_change()
        text = Text.assemble((decimal(self._get("reward/mean")), "bold"), f"   trend {decimal(self._trend)} ")
        if change is not None:
            arrow, colour = ("▲", "green") if change > 0 else ("▼", "red") if change < 0 else ("=", "dim")
            text.append(f"{arrow} {change:+.3f}", colour)
        text.append("   " + sparkline(list(self._rewards), 60 if width >= 110 else 24), "green")
        return text

    def _speed(self) -> Text:
        return Text(
            f"{count(self._get('speed/generated_tokens_per_s'))} tok/s generating"
            f"   {count(self._get('speed/trained_tokens_per_s'))} training"
            f"   {count(self._get('speed/step_tokens_per_s'))} overall"
        )

    def _tokens(self) -> Text:
        dropped = self._get("tokens/dropped")
        return Text.assemble(
            f"{count(self._get('tokens/generated'))} generated = {count(self._get('tokens/trained'))} trained + ",
            (f"{count(dropped)} dropped", "red" if dropped else ""),
            f" + {count(self._get('tokens/held'))} held",
        )

    def _partial(self) -> Text:
        acting = self._get("rollouts/acting")
        return Text(
            f"max/bound {self._staleness()}   mean {decimal(self._get('staleness/mean'), 2)}"
            f"   resumed {count(self._get('rollouts/resumed'))}"
            f"   partial {percent(self._get('rollouts/partial_share'))}"
            + (f"   acting {count(acting)}" if acting is not None else "")
        )

    def _time(self) -> list[Text]:
        """The time split, on one line or two."""
        colours = {label: colour for label, _, colour in TIME_SPLIT}
        split = time_split(self._row)
        shares = [Text(f"{label} {percent(share)}", colours.get(label, "dim")) for label, share in split]
        lines = [shares[:_SHARES_A_LINE], shares[_SHARES_A_LINE:]]
        return [Text("  ").join(line) for line in lines if line] or [Text(_DASH)]
