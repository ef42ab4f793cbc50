// Curves, drawn by uPlot. A chart is reached by the keyboard: arrows go from point to point and say it, Enter picks one.

import { el, replace, announce } from "./dom.js";
import { short, duration, count, AXES } from "./words.js";
import { themed, lineColour } from "./colours.js";

const HEIGHT = 180;
const CLOSE_PX = 8;
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((by) => by * 10 ** power)).flat(); // there is no step 2.5

/**
 * `keys`: metrics, one line each, with `labels` of the same number. `onPick(first, last)`: a point was chosen, which is of
 * these steps. `onZoom(from, to)`: a range of x was drawn, or (null, null) for all of it.
 */
export class Chart {
  constructor({ title, hint = "", keys, labels = keys, xName = "step", log = false, onPick = null, onZoom = null, group = "steps" }) {
    Object.assign(this, { title, keys, labels, xName, log, onPick, onZoom, group });
    this.hidden = new Set();
    this.told = { steps: [], x: [], columns: {} };
    this.marks = [];
    this.band = null;
    this.points = [];
    this.canvas = el("div", { class: "plot", tabindex: "0", role: "application", "aria-label": `${title}: arrow keys go from point to point, Enter opens the step's rollouts, Escape shows all steps`, on: { keydown: (event) => this._key(event) } });
    this.values = el("div", { class: "legend" });
    this.node = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", { text: title, title: hint })), this.canvas, this.values);
    this.plot = null;
    this.place = null;
    this.sized = new ResizeObserver(() => this._resize());
    this.sized.observe(this.canvas);
    this._legend();
  }

  /** `told`: the answer to "metrics". `marks`: [{step, text}]; `points`: [{step, mean, ci}] of evaluations; `band`: {steps, low, high}. */
  set(told, { marks = [], points = [], band = null } = {}) {
    Object.assign(this, { told, marks, points, band });
    if (this.plot) {
      this.plot.setData(this._data());
    } else if (this.canvas.clientWidth) this._draw();
    this._legend();
  }

  /** Draw again, in the colours of the theme. */
  repaint() {
    if (!this.plot) return;
    this.plot.destroy();
    this.plot = null;
    this._draw();
    this._legend();
  }

  close() {
    this.sized.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  _data() {
    return [this.told.x, ...this.keys.map((key) => this.told.columns[key] ?? this.told.x.map(() => null))];
  }

  _draw() {
    const axis = { stroke: themed("quiet"), grid: { stroke: themed("grid"), width: 1 }, ticks: { stroke: themed("grid"), width: 1 }, font: `11px ${themed("font")}` };
    const say = this.xName === "time" ? (value) => duration(value) : count;
    const options = {
      width: this.canvas.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: this.group }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, focus: { prox: 24 } },
      scales: { x: { time: false, range: (plot, low, high) => this._across(low, high) }, y: { distr: this.log ? 3 : 1, range: (plot, low, high) => this._range(low, high) } },
      axes: [
        { ...axis, values: (plot, splits) => splits.map(say), size: 30, ...(this.xName === "time" ? {} : { incrs: WHOLE }) },
        { ...axis, values: (plot, splits) => splits.map((value) => (value === null ? "" : short(value))), size: 56 },
      ],
      series: [{}, ...this.keys.map((key, number) => this._line(key, number))],
      hooks: {
        drawAxes: [(plot) => this._drawBand(plot)],
        draw: [(plot) => this._drawMore(plot)],
        setCursor: [(plot) => { this.place = plot.cursor.idx; this._sayValues(); }],
        setSelect: [(plot) => this._zoom(plot)],
        ready: [(plot) => this._listen(plot)],
      },
    };
    this.plot = new uPlot(options, this._data(), this.canvas);
  }

  _line(key, number) {
    const few = this.told.steps.length < 40;
    return { label: this.labels[number], stroke: lineColour(number), width: 1.5, show: !this.hidden.has(key), spanGaps: true, points: { show: few, size: 4 } };
  }

  /** An evaluation before the first step is shown, too. */
  _across(low, high) {
    const first = this.xName === "step" && this.points.length ? this.points[0].step : low;
    return low === null ? [0, 1] : [this._x(first) === null ? low : Math.min(low, first), high > low ? high : low + 1];
  }

  _range(low, high) {
    const bounds = this.band ? this.band.steps.flatMap((step, place) => (this._x(step) === null ? [] : [[this.band.low[place], this.band.high[place]]])) : [];
    for (const values of [...this.points.map(({ mean, ci }) => ci ?? [mean]), ...bounds]) {
      for (const value of values) {
        if (value === null || value === undefined) continue;
        low = low === null ? value : Math.min(low, value);
        high = high === null ? value : Math.max(high, value);
      }
    }
    if (low === null || high === null) return [0, 1];
    if (this.log) return [low > 0 ? low / 1.2 : 1e-9, high > 0 ? high * 1.2 : 1];
    const room = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  /** Where a step lies on the axis; null where it is not shown. */
  _x(step) {
    const { steps, x } = this.told;
    if (!steps.length || step < steps[0] - 1 || step > steps[steps.length - 1] + 1) return null;
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    return this.xName === "step" ? step : x[low];
  }

  _drawBand(plot) {
    if (!this.band) return;
    const { ctx, bbox } = plot, { steps, low, high } = this.band;
    const inside = steps.map((step, place) => [this._x(step), place]).filter(([x]) => x !== null);
    if (inside.length < 2) return;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.beginPath();
    for (const [x, place] of inside) ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(high[place], "y", true));
    for (const [x, place] of inside.reverse()) ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(low[place], "y", true));
    ctx.globalAlpha = 0.18;
    ctx.fillStyle = lineColour(0);
    ctx.fill();
    ctx.restore();
  }

  _drawMore(plot) {
    const { ctx } = plot;
    const ratio = devicePixelRatio;
    const { top, height } = plot.bbox;
    ctx.save();
    for (const { step } of this.marks) {
      const at = this._x(step);
      if (at === null) continue;
      const x = plot.valToPos(at, "x", true);
      ctx.strokeStyle = ctx.fillStyle = themed("warning");
      ctx.lineWidth = ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.beginPath();
      ctx.moveTo(x - 5 * ratio, top);
      ctx.lineTo(x + 5 * ratio, top);
      ctx.lineTo(x, top + 8 * ratio);
      ctx.fill();
    }
    ctx.strokeStyle = ctx.fillStyle = themed("evaluation");
    ctx.lineWidth = 1.5 * ratio;
    for (const { step, mean, ci } of this.points) {
      const at = this._x(step);
      if (at === null || mean === null) continue;
      const x = plot.valToPos(at, "x", true);
      if (ci) {
        ctx.beginPath();
        ctx.moveTo(x, plot.valToPos(ci[0], "y", true));
        ctx.lineTo(x, plot.valToPos(ci[1], "y", true));
        ctx.stroke();
      }
      const y = plot.valToPos(mean, "y", true), size = 4 * ratio;
      ctx.beginPath();
      ctx.moveTo(x, y - size);
      ctx.lineTo(x + size, y);
      ctx.lineTo(x, y + size);
      ctx.lineTo(x - size, y);
      ctx.fill();
    }
    ctx.restore();
  }

  _listen(plot) {
    let down = null;
    plot.over.addEventListener("pointerdown", (event) => { down = [event.clientX, event.clientY]; });
    plot.over.addEventListener("pointerup", (event) => {
      const still = down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) < CLOSE_PX;
      down = null;
      if (still && event.button === 0) this._pick();
    });
    plot.over.addEventListener("dblclick", () => this.onZoom?.(null, null));
    if (this.onPick) plot.over.style.cursor = "pointer";
  }

  _pick() {
    const { first, last } = this.told;
    if (first?.[this.place ?? -1] !== undefined && this.onPick) this.onPick(first[this.place], last[this.place]);
  }

  _zoom(plot) {
    const { left, width } = plot.select;
    if (width >= CLOSE_PX && this.onZoom) {
      const [from, to] = [plot.posToIdx(left), plot.posToIdx(left + width)];
      this.onZoom(this.told.steps[from], this.told.steps[to]);
    }
    if (width) plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  _key(event) {
    const last = this.told.steps.length - 1;
    if (last < 0 || !this.plot) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const from = this.place ?? (moves[event.key] < 0 ? last + 1 : -1);
      const place = Math.max(0, Math.min(last, from + moves[event.key]));
      this.plot.setCursor({ left: this.plot.valToPos(this.told.x[place], "x"), top: HEIGHT / 2 });
      this.place = place; // of several points at one x the plot takes one
      this._sayValues();
      announce(`${this._where(this.place)}: ${this.keys.map((key, number) => `${this.labels[number]} ${short(this.told.columns[key]?.[this.place])}`).join(", ")}${this._marksAt(this.place).map((of) => `. Warning: ${of.text}`).join("")}`);
    } else if (event.key === "Enter") this._pick();
    else if (event.key === "Escape") this.onZoom?.(null, null);
    else return;
    event.preventDefault();
  }

  _legend() {
    const lines = this.keys.map((key, number) => {
      const value = el("span", { class: "value" });
      const swatch = el("span", { class: "swatch", style: { background: lineColour(number) } });
      const toggle = el("button", { type: "button", class: "line", title: key, "aria-pressed": String(!this.hidden.has(key)), on: { click: () => this._toggle(key, number) } }, swatch, this.labels[number], " ", value);
      return { key, value, toggle };
    });
    this.shown = lines;
    this.step = el("span", { class: "at" });
    this.warned = el("p", { class: "warned", hidden: true });
    replace(this.values, this.step, lines.map((of) => of.toggle), this.band?.steps.length ? el("span", { text: "band: 95 % interval over groups" }) : null,
      this.points.length ? el("span", { class: "evaluated", text: "◆ held-out evaluation, 95 % interval" }) : null, this.warned);
    this._sayValues();
  }

  _sayValues() {
    const last = this.told.steps.length - 1;
    if (last < 0 || !this.shown) return;
    const place = this.place ?? last;
    this.step.textContent = this._where(place);
    const said = this.place === null ? [] : this._marksAt(place);
    this.warned.textContent = said.map((of) => `▼ ${of.text}`).join(" ");
    this.warned.hidden = !said.length;
    for (const { key, value } of this.shown) value.textContent = short(this.told.columns[key]?.[place]);
  }

  /** What a point is of, in words: a step, the steps that are one with it, or a place on another axis. */
  _where(place) {
    if (this.xName !== "step") return `${short(this.told.x[place])} ${AXES[this.xName]}`;
    const [first, last] = [this.told.first[place], this.told.last[place]];
    return first === last ? `step ${first}` : `steps ${first} to ${last}, the least and the largest`;
  }

  /** The warnings at a point: of its step, and of those that are one with it. */
  _marksAt(place) {
    const { steps } = this.told, before = place ? steps[place - 1] : -Infinity;
    return this.marks.filter(({ step }) => step <= steps[place] && (step > before || step === steps[place]));
  }

  _toggle(key, number) {
    if (this.hidden.has(key)) this.hidden.delete(key);
    else this.hidden.add(key);
    this.plot?.setSeries(number + 1, { show: !this.hidden.has(key) });
    this._legend();
  }

  _resize() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else if (this.told.steps.length) this._draw();
  }
}
