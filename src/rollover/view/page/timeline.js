// Rollouts over time: the slots of the engines as lanes, coloured by the policy version that sampled, and above them
// what the loop did. From the whole run to one decode: each window is asked for as exactly as the screen can show it.

import { el, replace, button, announce } from "./dom.js";
import { duration, plural, short } from "./words.js";
import { themed, versionColour } from "./colours.js";
import { go, refine } from "./route.js";

const RESUMED = 1, PARKED = 2, DROPPED = 4, RUNS = 8; // of a bar's "how"
const SPANS = ["generate", "train", "weights", "checkpoint", "eval"];
const ROW = 14, AXIS = 22, LEFT = 76, CLOSE = 6, SHORTEST = 1e-4;

export class Timeline {
  constructor(page) {
    this.page = page;
    this.node = el("div", { class: "view" });
    this.told = null;
    this.timer = 0;
    this.pointers = new Map();
  }

  async open(route) {
    this.route = route;
    const number = (name) => (route.query[name] === undefined ? null : Number(route.query[name]));
    this.group = number("group");
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": "Slots of the engines over time. Left and right move, plus and minus zoom, 0 shows the whole run, n and p go from segment to segment, Enter opens the rollout" });
    this.hover = el("p", { class: "hover", role: "status", text: "Point at a segment; click it to read the rollout." });
    this.legend = el("p", { class: "legend" });
    this._listen();
    replace(this.node, el("h1", { text: "Rollouts over time" }),
      el("p", { class: "actions" },
        button("Earlier", () => this._pan(-0.5)), button("Later", () => this._pan(0.5)),
        button("Zoom in", () => this._zoom(0.5)), button("Zoom out", () => this._zoom(2)), button("Whole run", () => this._whole())),
      this.hover, el("div", { class: "lanes" }, this.canvas), this.legend);
    this.sized?.disconnect();
    this.sized = new ResizeObserver(() => this._later());
    this.sized.observe(this.canvas.parentElement);
    this.window = number("from") !== null && number("to") !== null ? [number("from"), number("to")] : null;
    if (this.group !== null && !this.window) await this._findGroup();
    await this._load();
  }

  async update(changed) {
    if (!changed.has("trace") || !this.told) return;
    const atEnd = !this.window || this.window[1] >= this.told.seconds - 1e-6;
    if (atEnd) await this._load(); // what is followed moves on; what somebody looks at stays
  }

  repaint() {
    this._draw();
  }

  close() {
    this.sized?.disconnect();
    clearTimeout(this.timer);
    this.asking?.abort();
  }

  async _load() {
    const width = this.canvas.parentElement.clientWidth - LEFT;
    if (width <= 0) return;
    this.asking?.abort();
    this.asking = new AbortController();
    const [from, to] = this.window ?? [];
    try {
      const told = await this.page.source.ask(this.page.run, "lanes", { from, to, columns: Math.min(4000, Math.round(width)) }, this.asking.signal);
      this.told = told;
      this.shown = [told.shownFrom ?? told.from, told.shownTo ?? told.to]; // a report has no finer window: it is shown closer
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      return;
    }
    this._draw();
    this._legend();
  }

  async _findGroup() {
    const told = await this.page.source.ask(this.page.run, "lanes", { columns: 1 });
    const life = await this._rowsOf(this.group);
    this.window = null;
    if (!life.length) return;
    const { life: events } = await this.page.source.ask(this.page.run, "rollout", { step: life[0].step, id: life[0].id, count: 1 });
    if (!events.length) return;
    const [begin, end] = [events[0].seconds, events[events.length - 1].seconds];
    const room = Math.max(0.5, (end - begin) * 0.1);
    this.window = [Math.max(0, begin - room), Math.min(told.seconds, end + room)];
  }

  async _rowsOf(group) {
    const told = await this.page.source.ask(this.page.run, "rollouts", { group_from: group, group_to: group, limit: 500 });
    return told.rows;
  }

  /** Show at once what there is of another window, and ask for it when the hand rests. */
  _move(from, to) {
    const whole = this.told?.seconds ?? 1;
    const length = Math.min(whole * 1.2, Math.max(SHORTEST, to - from));
    const middle = (from + to) / 2;
    const begin = Math.max(-0.1 * whole, Math.min(middle - length / 2, whole * 1.1 - length));
    this.window = this.shown = [begin, begin + length];
    refine(this.route, { ...this.route.query, from: begin.toFixed(6), to: (begin + length).toFixed(6) });
    this._draw();
    this._later();
  }

  _later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this._load().catch((error) => this.page.failed(error)), 120);
  }

  _pan(share) {
    const [from, to] = this.shown;
    this._move(from + share * (to - from), to + share * (to - from));
  }

  _zoom(by, at = 0.5) {
    const [from, to] = this.shown;
    const middle = from + at * (to - from);
    this._move(middle - (middle - from) * by, middle + (to - middle) * by);
  }

  _whole() {
    this.window = null;
    refine(this.route, {});
    this._load().catch((error) => this.page.failed(error));
  }

  // Drawing

  _rows() {
    return SPANS.filter((name) => this.told.spans[name]);
  }

  _layout() {
    const rows = this._rows(), lanes = Math.max(1, this.told.lanes.length);
    const height = Math.max(2, Math.min(18, Math.floor(560 / lanes)));
    const top = AXIS + rows.length * ROW + 18;
    return { rows, top, height, total: top + lanes * height + 8 };
  }

  _draw() {
    const { told, canvas } = this;
    if (!told) return;
    const layout = (this.layout = this._layout());
    const width = canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(layout.total * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${layout.total}px`;
    const ctx = (this.ctx = canvas.getContext("2d"));
    ctx.scale(ratio, ratio);
    ctx.font = `11px ${themed("font")}`;
    ctx.textBaseline = "middle";
    const [from, to] = this.shown;
    this.scale = (width - LEFT) / (to - from);
    this._drawAxis(ctx, width);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, width - LEFT, layout.total);
    ctx.clip();
    this._drawLoop(ctx, layout);
    if (told.bars) this._drawBars(ctx, layout);
    else this._drawCells(ctx, layout);
    this._drawMoments(ctx, layout);
    ctx.restore();
    this._drawNames(ctx, layout);
  }

  _x(seconds) {
    return LEFT + (seconds - this.shown[0]) * this.scale;
  }

  _drawAxis(ctx, width) {
    const [from, to] = this.shown;
    const wanted = (to - from) / Math.max(2, (width - LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= wanted);
    ctx.fillStyle = themed("quiet");
    ctx.strokeStyle = themed("grid");
    ctx.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = this._x(at);
      ctx.beginPath();
      ctx.moveTo(x, AXIS - 5);
      ctx.lineTo(x, this.layout.total);
      ctx.stroke();
      ctx.fillText(duration(at, step), x, AXIS / 2);
    }
  }

  _drawNames(ctx, layout) {
    ctx.fillStyle = themed("quiet");
    ctx.textAlign = "left";
    layout.rows.forEach((name, row) => ctx.fillText(name, 2, AXIS + row * ROW + ROW / 2));
    ctx.fillText("dropped", 2, layout.top - 9);
    const every = Math.max(1, Math.ceil(14 / layout.height));
    this.told.lanes.forEach(([engine, slot], lane) => {
      if (lane % every === 0) ctx.fillText(engine ? `${engine}: ${slot}` : `slot ${slot}`, 2, layout.top + lane * layout.height + layout.height / 2);
    });
  }

  _drawLoop(ctx, layout) {
    for (const [row, name] of layout.rows.entries()) {
      const spans = this.told.spans[name], y = AXIS + row * ROW + 2;
      ctx.fillStyle = themed(`span-${name}`);
      for (let i = 0; i < spans.start.length; i++) {
        const x = this._x(spans.start[i]);
        ctx.fillRect(x, y, Math.max(1, this._x(spans.end[i]) - x), ROW - 4);
      }
      if (name !== "train") continue;
      ctx.globalAlpha = 0.12;
      for (let i = 0; i < spans.start.length; i++) {
        const x = this._x(spans.start[i]);
        ctx.fillRect(x, layout.top, this._x(spans.end[i]) - x, layout.total - layout.top);
      }
      ctx.globalAlpha = 1;
    }
  }

  _drawBars(ctx, layout) {
    const { bars } = this.told;
    for (let i = 0; i < bars.lane.length; i++) {
      const x = this._x(bars.start[i]), width = Math.max(1, this._x(bars.end[i]) - x), how = bars.how[i];
      const y = layout.top + bars.lane[i] * layout.height, height = Math.max(1, layout.height - 1);
      ctx.fillStyle = versionColour(bars.version[i], how & DROPPED ? 0.35 : 1);
      ctx.fillRect(x, y, width, height);
      if (height < 3) continue;
      ctx.fillStyle = themed("text");
      if (how & PARKED) ctx.fillRect(x + width - 2, y, 2, height);
      if (how & RESUMED) ctx.fillRect(x, y + height / 2 - 0.5, Math.min(5, width), 1);
      if (this.group === bars.group[i] || this.current === i) {
        ctx.strokeStyle = themed("text");
        ctx.lineWidth = 1.5;
        ctx.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
      }
      if (width > 60 && height > 11) {
        ctx.fillStyle = "#111";
        ctx.textAlign = "left";
        ctx.fillText(`${bars.group[i]}-${bars.siblings[bars.sibling[i]]}`, x + 4, y + height / 2);
      }
    }
  }

  _drawCells(ctx, layout) {
    const { cells, from, to } = this.told;
    const width = (to - from) / cells.columns;
    for (let i = 0; i < cells.lane.length; i++) {
      const x = this._x(from + cells.column[i] * width);
      ctx.fillStyle = versionColour(cells.version[i], 0.15 + 0.85 * (cells.busy[i] / 20));
      ctx.fillRect(x, layout.top + cells.lane[i] * layout.height, this._x(from + (cells.column[i] + cells.length[i]) * width) - x + 0.3, Math.max(1, layout.height - (layout.height > 3 ? 1 : 0)));
    }
  }

  _drawMoments(ctx, layout) {
    const { published, drops } = this.told;
    ctx.strokeStyle = themed("quiet");
    ctx.lineWidth = 1;
    ctx.setLineDash([2, 3]);
    if (published.seconds.length < 400) {
      for (const seconds of published.seconds) {
        ctx.beginPath();
        ctx.moveTo(this._x(seconds), AXIS);
        ctx.lineTo(this._x(seconds), layout.total);
        ctx.stroke();
      }
    }
    ctx.setLineDash([]);
    ctx.fillStyle = themed("warning");
    for (const seconds of drops.seconds) {
      const x = this._x(seconds);
      ctx.beginPath();
      ctx.moveTo(x - 4, layout.top - 14);
      ctx.lineTo(x + 4, layout.top - 14);
      ctx.lineTo(x, layout.top - 6);
      ctx.fill();
    }
  }

  _legend() {
    const { told } = this;
    const seen = [...new Set(told.bars ? told.bars.version : told.cells.version)].sort((a, b) => a - b);
    const shown = seen.length > 12 ? [...seen.slice(0, 6), null, ...seen.slice(-5)] : seen;
    replace(this.legend, `${duration(told.from, 0.01)} to ${duration(told.to, 0.01)}. `,
      told.bars ? plural(told.bars.lane.length, "segment") : "Too many segments to draw each: a cell is coloured by the version that worked longest in it, and the paler the longer the slot was empty. ",
      " Versions: ", shown.map((version) => (version === null ? "… " : [el("span", { class: "swatch", style: { background: versionColour(version) } }), `${version} `])),
      told.bars ? " A dark end: it was interrupted and rolls over. A dash: it goes on. Pale: dropped later. Dotted lines: new weights. Grey bands: training." : null,
      told.drops.of ? ` ${plural(told.drops.of, "group")} dropped: ${told.reasons.join(", ")}.` : null);
  }

  // Hands

  _hit(x, y) {
    const { told, layout } = this;
    if (!told || !layout) return null;
    const seconds = this.shown[0] + (x - LEFT) / this.scale, near = CLOSE / this.scale;
    if (y > AXIS && y < layout.top - 18) {
      const name = layout.rows[Math.floor((y - AXIS) / ROW)], spans = told.spans[name];
      const i = spans ? spans.start.findIndex((start, place) => start <= seconds && seconds <= spans.end[place]) : -1;
      return i < 0 ? null : { text: `${name} at version ${spans.version[i]}: ${duration(spans.end[i] - spans.start[i], 0.01)} from ${duration(spans.start[i], 0.01)}` };
    }
    if (y >= layout.top - 18 && y < layout.top) {
      const i = told.drops.seconds.findIndex((at) => Math.abs(at - seconds) < near);
      return i < 0 ? null : { group: told.drops.group[i], text: `group ${told.drops.group[i]} dropped: ${told.reasons[told.drops.reason[i]]}, ${plural(told.drops.tokens[i], "token")} at ${duration(told.drops.seconds[i], 0.01)}` };
    }
    const lane = Math.floor((y - layout.top) / layout.height);
    if (lane < 0 || lane >= told.lanes.length) return null;
    if (told.cells) return { zoom: true, text: `${duration(seconds, 1 / this.scale)}: click to look closer` };
    const { bars } = told;
    for (let i = bars.lane.length - 1; i >= 0; i--) {
      if (bars.lane[i] === lane && bars.start[i] - near / 3 <= seconds && seconds <= bars.end[i] + near / 3) return { bar: i, text: this._barText(i) };
    }
    return null;
  }

  _barText(i) {
    const { bars } = this.told, how = bars.how[i];
    return [`rollout ${bars.group[i]}-${bars.siblings[bars.sibling[i]]}`, `version ${bars.version[i]}`, how & RUNS ? "still running" : plural(bars.tokens[i], "token"),
      `${duration(bars.end[i] - bars.start[i], 0.001)} from ${duration(bars.start[i], 0.001)}`, how & RESUMED ? "resumed" : "", how & PARKED ? "then interrupted: it rolls over" : "", how & DROPPED ? "its group was dropped" : ""].filter(Boolean).join(" · ");
  }

  async _openBar(i) {
    const { bars } = this.told;
    return this._openRollout(bars.group[i], `${bars.group[i]}-${bars.siblings[bars.sibling[i]]}`);
  }

  async _openRollout(group, id = null) {
    const rows = await this._rowsOf(group);
    const row = rows.find((of) => of.id === id) ?? (id === null ? rows[0] : null);
    if (row) go("rollout", this.page.run, { step: row.step, id: row.id });
    else this._say(`${id ?? `group ${group}`} has not left the run yet, or nothing was recorded of it (track.rollouts).`);
  }

  _say(text) {
    this.hover.textContent = text;
  }

  _listen() {
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const share = (x) => Math.max(0, Math.min(1, (x - LEFT) / (this.canvas.clientWidth - LEFT)));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && document.activeElement !== this.canvas) return; // the page scrolls
      event.preventDefault();
      if (event.shiftKey) this._pan(Math.sign(event.deltaY || event.deltaX) * 0.2);
      else this._zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), share(place(event)[0]));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, { began: place(event), at: place(event) });
      this.held = { window: [...this.shown], points: [...this.pointers.values()].map((of) => [...of.at]) };
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const pointer = this.pointers.get(event.pointerId), at = place(event);
      if (!pointer) {
        const hit = this._hit(...at);
        if (hit) this._say(hit.text);
        this.canvas.style.cursor = hit?.bar !== undefined || hit?.zoom || hit?.group !== undefined ? "pointer" : "grab";
        return;
      }
      pointer.at = at;
      this._drag();
    });
    const release = (event) => {
      const pointer = this.pointers.get(event.pointerId);
      this.pointers.delete(event.pointerId);
      if (event.type !== "pointerup" || !pointer || Math.hypot(pointer.at[0] - pointer.began[0], pointer.at[1] - pointer.began[1]) > CLOSE) return;
      const hit = this._hit(...pointer.at);
      if (hit?.bar !== undefined) this._openBar(hit.bar).catch((error) => this.page.failed(error));
      else if (hit?.group !== undefined) this._openRollout(hit.group).catch((error) => this.page.failed(error));
      else if (hit?.zoom) this._zoom(0.2, share(pointer.at[0]));
    };
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) this.canvas.addEventListener(name, release);
    this.canvas.addEventListener("dblclick", (event) => this._zoom(0.3, share(place(event)[0])));
    this.canvas.addEventListener("keydown", (event) => this._key(event));
  }

  _drag() {
    const now = [...this.pointers.values()].map((of) => of.at), [from, to] = this.held.window, before = this.held.points;
    const perPixel = (to - from) / (this.canvas.clientWidth - LEFT);
    if (now.length === 1 && before.length === 1) {
      const moved = (before[0][0] - now[0][0]) * perPixel;
      if (Math.abs(now[0][0] - before[0][0]) > CLOSE) this._move(from + moved, to + moved);
    } else if (now.length === 2 && before.length === 2) {
      const by = Math.max(20, Math.abs(before[0][0] - before[1][0])) / Math.max(20, Math.abs(now[0][0] - now[1][0]));
      const middle = from + ((before[0][0] + before[1][0]) / 2 - LEFT) * perPixel;
      this._move(middle - (middle - from) * by, middle + (to - middle) * by);
    }
  }

  _key(event) {
    const { told } = this;
    if (!told) return;
    const acts = { ArrowLeft: () => this._pan(-0.25), ArrowRight: () => this._pan(0.25), "+": () => this._zoom(0.5), "=": () => this._zoom(0.5), "-": () => this._zoom(2), 0: () => this._whole() };
    if (event.key in acts) acts[event.key]();
    else if ((event.key === "n" || event.key === "p") && told.bars?.lane.length) {
      const last = told.bars.lane.length - 1, next = (this.current ?? (event.key === "n" ? -1 : last + 1)) + (event.key === "n" ? 1 : -1);
      this.current = Math.max(0, Math.min(last, next));
      this._say(this._barText(this.current));
      announce(this._barText(this.current));
      this._draw();
    } else if (event.key === "Enter" && this.current !== undefined && told.bars) this._openBar(this.current).catch((error) => this.page.failed(error));
    else return;
    event.preventDefault();
  }
}
