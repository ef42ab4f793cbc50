// Up to eight runs beside each other: settings that differ, curves over one axis, evaluations paired by task.

import { el, replace, labelled, table } from "./dom.js";
import { short, decimal, listed, namesIn, AXES } from "./words.js";
import { lineColour } from "./colours.js";
import { Chart } from "./charts.js";
import { go } from "./route.js";

export class Compare {
  constructor(page) {
    this.page = page;
    this.charts = [];
    this.node = el("div", { class: "view" });
  }

  async open(route) {
    this.route = route;
    this.close();
    const { source, runs } = this.page;
    if (runs.length < 2) {
      replace(this.node, el("h1", { text: "Compare" }), el("p", { text: "There is one run here. Give several: rollover view RUN_DIR RUN_DIR" }));
      return;
    }
    const chosen = route.query.runs ?? runs.map((_, number) => number).join(",");
    this.numbers = chosen.split(",").map(Number);
    const x = route.query.x ?? "step", keys = namesIn(route.query.keys ?? "reward/mean,length/mean");
    const [config, told, evaluated, known] = await Promise.all([
      source.compare("config", { runs: chosen }), source.compare("metrics", { runs: chosen, keys: listed(keys), x }),
      source.compare("evaluations", { runs: chosen }), source.ask(this.numbers[0], "keys")]);
    this.charts = keys.map((key) => this._chart(key, told, x));
    replace(this.node, el("h1", { text: "Compare" }), this._choices(known, keys, x),
      el("section", { class: "charts" }, this.charts.map((chart) => chart.node)), this._differences(config), this._evaluations(evaluated));
    for (const chart of this.charts) chart.set(this._joined(chart.metric, told));
  }

  repaint() {
    if (this.route) this.open(this.route).catch((error) => this.page.failed(error));
  }

  /** All runs are followed, whichever is shown. What somebody chose or typed stays. */
  get followsAll() {
    return true;
  }

  async update(changed) {
    if (!changed.has("metrics") || !this.charts.length) return;
    const x = this.route.query.x ?? "step", keys = this.charts.map((chart) => chart.metric), { charts } = this;
    const told = await this.page.source.compare("metrics", { runs: this.numbers.join(","), keys: listed(keys), x });
    if (charts === this.charts) for (const chart of charts) chart.set(this._joined(chart.metric, told));
  }

  close() {
    for (const chart of this.charts) chart.close();
    this.charts = [];
  }

  _name(number) {
    return `${number}: ${this.page.runs[number]?.name ?? "?"}`;
  }

  _chart(key, told, x) {
    const chart = new Chart({ title: key, keys: this.numbers.map(String), labels: this.numbers.map((number) => this._name(number)), xName: x, group: `compare-${x}` });
    chart.metric = key;
    return chart;
  }

  /** One x for all: uPlot draws lines over the same places. A run that generated nothing in a step has two steps at one x:
   *  as many places are there as the run has that has most. */
  _joined(key, told) {
    const nth = told.map((of) => repeats(of.x)), most = new Map();
    told.forEach((of, number) => of.x.forEach((value, place) => most.set(value, Math.max(most.get(value) ?? 0, nth[number][place] + 1))));
    const places = [], at = new Map();
    for (const value of [...most.keys()].filter((value) => value !== null).sort((a, b) => a - b)) {
      at.set(value, places.length);
      places.push(...Array(most.get(value)).fill(value));
    }
    const columns = {}, first = [...places], last = [...places];
    told.forEach((of, number) => {
      const column = places.map(() => undefined); // undefined: no point of this run, and its line goes on
      of.x.forEach((value, place) => {
        if (value === null) return;
        const joined = at.get(value) + nth[number][place];
        column[joined] = of.columns[key][place];
        [first[joined], last[joined]] = [Math.min(first[joined], of.first[place]), Math.max(last[joined], of.last[place])];
      });
      columns[String(this.numbers[number])] = column;
    });
    return { x: places, steps: places, first, last, columns };
  }

  _choices(known, keys, x) {
    const change = (query) => go("compare", this.page.run, { ...this.route.query, ...query });
    const input = el("input", { type: "search", list: "compared", placeholder: "a metric", on: { change: () => { if (known.some((of) => of.key === input.value)) change({ keys: listed([...new Set([...keys, input.value])]) }); } } });
    return el("form", { class: "filters", on: { submit: (event) => event.preventDefault() } },
      labelled("Over", el("select", { on: { change: (event) => change({ x: event.target.value }) } }, Object.entries(AXES).map(([value, text]) => el("option", { value, selected: value === x }, text)))),
      labelled("Another curve", input), el("datalist", { id: "compared" }, known.map((of) => el("option", { value: of.key }))),
      el("fieldset", {}, el("legend", { text: "Runs" }), this.page.runs.map((run, number) => el("label", {}, el("input", { type: "checkbox", checked: this.numbers.includes(number), on: { change: (event) => {
        const left = this.page.runs.map((_, of) => of).filter((of) => (of === number ? event.target.checked : this.numbers.includes(of)));
        if (left.length) change({ runs: left.join(",") });
      } } }), el("span", { class: "swatch", style: { background: lineColour(this.numbers.indexOf(number) < 0 ? 7 : this.numbers.indexOf(number)) } }), this._name(number)))));
  }

  _differences(rows) {
    if (!rows.length) return el("p", { text: "All settings are the same, but for names and places." });
    return el("section", {}, table("Settings that differ", [
      { title: "Key", of: (row) => el("code", { text: row.key }) },
      ...this.numbers.map((number, place) => ({ title: this._name(number), of: (row) => el("code", { text: row.values[place] ?? "–" }) })),
    ], rows));
  }

  _evaluations(found) {
    const rows = found.flatMap((of, place) => (of.comparisons.length ? of.comparisons.map((one) => ({ ...one, number: this.numbers[place + 1] })) : [{ why: of.why, number: this.numbers[place + 1] }]));
    if (!rows.length) return null;
    return el("section", {}, table(`Newest evaluations against that of ${this._name(this.numbers[0])}, paired by task`, [
      { title: "Run", of: (row) => this._name(row.number) },
      { title: "Setting", of: (row) => row.setting || (row.why ? row.why : "[eval]") },
      { title: "Tasks", number: true, of: (row) => short(row.tasks) },
      { title: "Then", number: true, of: (row) => decimal(row.recorded) },
      { title: "Now", number: true, of: (row) => decimal(row.mean) },
      { title: "Difference", number: true, of: (row) => (row.difference === undefined ? "–" : `${row.difference >= 0 ? "+" : ""}${decimal(row.difference)}${row.ci ? ` [${decimal(row.ci[0])}, ${decimal(row.ci[1])}]` : ""}`) },
      { title: "Better, worse", number: true, of: (row) => (row.better === undefined ? "–" : `${row.better}, ${row.worse}`) },
      { title: "p", number: true, of: (row) => (row.p_value === undefined ? "–" : row.p_value.toPrecision(2)) },
    ], rows));
  }
}

/** Of each value how many of its kind came before it. */
function repeats(values) {
  const seen = new Map();
  return values.map((value) => {
    seen.set(value, (seen.get(value) ?? -1) + 1);
    return seen.get(value);
  });
}
