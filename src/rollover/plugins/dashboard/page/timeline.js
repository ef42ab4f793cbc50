// Rollouts over time: the slots of the engines as lanes, coloured by the policy version that sampled, and above them
// what the loop did. From the whole run to one decode: each window is asked for as exactly as the screen can show it.

import { el, replace, button, announce } from "./dom.js";
import { duration, percent, plural, short } from "./words.js";
import { versionColour } from "./colours.js";
import { LANES_LEFT, LanesPicture } from "./lanes.js";
import { go, refine } from "./route.js";

const CLOSE = 6, SHORTEST = 1e-4;

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
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": "Slots of the engines over time. Left and right move, plus and minus zoom, 0 shows the whole run, n and p go from segment to segment, Enter opens the rollout" });
    this.picture = new LanesPicture(this.canvas);
    this.picture.group = number("group");
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
    if (this.picture.group !== null && !this.window) await this._findGroup();
    await this._load();
  }

  async update(changed) {
    if (!changed.has("trace") || !this.told) return;
    const atEnd = !this.window || this.window[1] >= this.told.seconds - 1e-6;
    if (atEnd || this.told.read < 1) await this._load(); // what is followed moves on; what somebody looks at stays
  }

  repaint() {
    this.picture?.draw();
  }

  close() {
    this.sized?.disconnect();
    clearTimeout(this.timer);
    this.asking?.abort();
  }

  async _load() {
    const width = this.canvas.parentElement.clientWidth - LANES_LEFT;
    if (width <= 0) return;
    this.asking?.abort();
    this.asking = new AbortController();
    const [from, to] = this.window ?? [];
    try {
      const told = await this.page.source.ask(this.page.run, "lanes", { from, to, columns: Math.min(4000, Math.round(width)) }, this.asking.signal);
      this.told = told;
      this.picture.set(told, [told.shownFrom ?? told.from, told.shownTo ?? told.to]); // a report has no finer window: it is shown closer
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      return;
    }
    this._legend();
  }

  async _findGroup() {
    const told = await this.page.source.ask(this.page.run, "lanes", { columns: 1 });
    const life = await this._rowsOf(this.picture.group);
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
    this.window = this.picture.shown = [begin, begin + length];
    refine(this.route, { ...this.route.query, from: begin.toFixed(6), to: (begin + length).toFixed(6) });
    this.picture.draw();
    this._later();
  }

  _later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this._load().catch((error) => this.page.failed(error)), 120);
  }

  _pan(share) {
    const [from, to] = this.picture.shown;
    this._move(from + share * (to - from), to + share * (to - from));
  }

  _zoom(by, at = 0.5) {
    const [from, to] = this.picture.shown;
    const middle = from + at * (to - from);
    this._move(middle - (middle - from) * by, middle + (to - middle) * by);
  }

  _whole() {
    this.window = null;
    refine(this.route, {});
    this._load().catch((error) => this.page.failed(error));
  }

  _legend() {
    const { told } = this;
    const seen = [...new Set(told.bars ? told.bars.version : told.cells.version)].sort((a, b) => a - b);
    const shown = seen.length > 12 ? [...seen.slice(0, 6), null, ...seen.slice(-5)] : seen;
    replace(this.legend, `${duration(told.from, 0.01)} to ${duration(told.to, 0.01)}. `, told.read < 1 ? `Still reading the trace: ${percent(told.read)} of it so far. ` : null,
      told.bars ? plural(told.bars.lane.length, "segment") : "Too many segments to draw each: a cell is coloured by the version that worked longest in it, and the paler the longer the slot was empty. ",
      " Versions: ", shown.map((version) => (version === null ? "… " : el("span", { class: "of" }, el("span", { class: "swatch", style: { background: versionColour(version) } }), `${version} `))),
      told.bars ? " A dark end: it was interrupted and rolls over. A dash: it goes on. Lines join the two (dashed: its turn had ended, and an environment or agent was at work). Pale: dropped later. Dotted lines: new weights. Shaded bands: training." : null,
      told.drops.of ? ` ${plural(told.drops.of, "group")} dropped: ${told.reasons.join(", ")}.` : null);
  }

  // Hands

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
    replace(this.hover, text);
  }

  _listen() {
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const share = (x) => Math.max(0, Math.min(1, (x - LANES_LEFT) / (this.canvas.clientWidth - LANES_LEFT)));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && document.activeElement !== this.canvas) return; // the page scrolls
      event.preventDefault();
      if (event.shiftKey) this._pan(Math.sign(event.deltaY || event.deltaX) * 0.2);
      else this._zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), share(place(event)[0]));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, { began: place(event), at: place(event) });
      this.held = { window: [...this.picture.shown], points: [...this.pointers.values()].map((of) => [...of.at]) };
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const pointer = this.pointers.get(event.pointerId), at = place(event);
      if (!pointer) {
        const hit = this.picture.at(...at);
        if (hit) this._say(hit.text);
        if (hit?.bar !== this.picture.hovered) {
          this.picture.hovered = hit?.bar;
          this.picture.draw();
        }
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
      const hit = this.picture.at(...pointer.at);
      if (hit?.bar !== undefined) this._openBar(hit.bar).catch((error) => this.page.failed(error));
      else if (hit?.group !== undefined) this._openRollout(hit.group, hit.id ?? null).catch((error) => this.page.failed(error));
      else if (hit?.zoom) this._zoom(0.2, share(pointer.at[0]));
    };
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) this.canvas.addEventListener(name, release);
    this.canvas.addEventListener("dblclick", (event) => this._zoom(0.3, share(place(event)[0])));
    this.canvas.addEventListener("keydown", (event) => this._key(event));
  }

  _drag() {
    const now = [...this.pointers.values()].map((of) => of.at), [from, to] = this.held.window, before = this.held.points;
    const perPixel = (to - from) / (this.canvas.clientWidth - LANES_LEFT);
    if (now.length === 1 && before.length === 1) {
      const moved = (before[0][0] - now[0][0]) * perPixel;
      if (Math.abs(now[0][0] - before[0][0]) > CLOSE) this._move(from + moved, to + moved);
    } else if (now.length === 2 && before.length === 2) {
      const by = Math.max(20, Math.abs(before[0][0] - before[1][0])) / Math.max(20, Math.abs(now[0][0] - now[1][0]));
      const middle = from + ((before[0][0] + before[1][0]) / 2 - LANES_LEFT) * perPixel;
      this._move(middle - (middle - from) * by, middle + (to - middle) * by);
    }
  }

  _key(event) {
    const { told } = this;
    if (!told) return;
    const acts = { ArrowLeft: () => this._pan(-0.25), ArrowRight: () => this._pan(0.25), "+": () => this._zoom(0.5), "=": () => this._zoom(0.5), "-": () => this._zoom(2), 0: () => this._whole() };
    if (event.key in acts) acts[event.key]();
    else if ((event.key === "n" || event.key === "p") && told.bars?.lane.length) {
      const last = told.bars.lane.length - 1, next = (this.picture.current ?? (event.key === "n" ? -1 : last + 1)) + (event.key === "n" ? 1 : -1);
      this.picture.current = Math.max(0, Math.min(last, next));
      this._say(this.picture.barText(this.picture.current));
      announce(this.picture.barText(this.picture.current));
      this.picture.draw();
    } else if (event.key === "Enter" && this.picture.current !== undefined && told.bars) this._openBar(this.picture.current).catch((error) => this.page.failed(error));
    else return;
    event.preventDefault();
  }
}
