// Overview: what the run learns, how long it takes, who waits for whom, and what it was warned of.

import { el, replace, link, labelled, button, table, copyText } from "./dom.js";
import { short, duration, percent, plural, listed, namesIn } from "./words.js";
import { Chart } from "./charts.js";
import { StalenessMap } from "./heat.js";
import { address, go, refine } from "./route.js";

// Title, keys with their labels, and whether the axis is logarithmic. Only what the run has is shown.
const PANELS = [
  ["Reward", { "reward/mean": "mean" }],
  ["Spread of rewards", { "reward/std": "standard deviation" }],
  ["Length of answers", { "length/mean": "mean", "length/max": "longest" }],
  ["Entropy", { entropy: "entropy" }],
  ["Divergence", { "kl/reference": "KL to the reference", "mismatch/kl": "KL of engine and trainer", "mismatch/k3": "k3" }],
  ["Importance ratios", { "ratio/mean": "ratio", "importance/mean": "importance", "importance/weight_mean": "weight", "importance/ess": "effective share" }],
  ["Clipped and capped", { clip_fraction: "clipped", "importance/capped_share": "capped", "importance/below_share": "below", "length/truncated": "answers cut off" }],
  ["Gradient norm", { grad_norm: "norm" }],
  ["Staleness", { "staleness/mean": "mean", "staleness/p50": "p50", "staleness/p95": "p95", "staleness/p99": "p99", "staleness/max": "max", "staleness/bound": "bound" }],
  ["Tokens a second", { "speed/generated_tokens_per_s": "generated", "speed/trained_tokens_per_s": "trained", "speed/step_tokens_per_s": "of the whole step" }],
  ["Seconds of a step", { "time/step_s": "step", "time/generate_s": "generate", "time/score_s": "score", "time/train_s": "train", "time/weights_s": "weights", "time/sleep_s": "sleep", "time/checkpoint_s": "checkpoint", "time/eval_s": "evaluate" }],
  ["Who waits", { "wait/engine_for_trainer_s": "engine for trainer", "wait/engine_for_rewards_s": "engine for rewards", "time/generate_s": "trainer for rollouts", "time/score_s": "trainer for rewards" }, "wait/engine_for_trainer_s"],
  ["Memory", { "memory/peak_rss_bytes": "process", "memory/peak_gpu_bytes": "GPU", "kv/bytes": "KV cache" }],
  ["Groups that teach nothing", { "groups/zero_variance": "all rewards equal" }],
];

export class Overview {
  constructor(page) {
    this.page = page;
    this.charts = [];
    this.band = null;
    this.node = el("div", { class: "view" });
  }

  async open(route) {
    this.route = route;
    const { source, run } = this.page;
    const [keys, evaluations, warnings] = await Promise.all(["keys", "evaluations", "warnings"].map((name) => source.ask(run, name)));
    this.known = new Map(keys.map((of) => [of.key, of]));
    this.cards = el("section", { class: "cards", "aria-label": "Where the run stands" });
    this.warned = el("section", { class: "warnings", "aria-label": "Health" });
    this.zoomed = el("p", { class: "zoomed" });
    const grid = el("section", { class: "charts", "aria-label": "Curves" });
    const chosen = namesIn(route.query.add).filter((key) => this.known.has(key));
    const panels = PANELS.map(([title, labels, needed]) => [title, Object.entries(labels).filter(([key]) => this.known.has(key)), needed])
      .filter(([, labels, needed]) => labels.length && (!needed || this.known.has(needed)));
    for (const key of chosen) panels.push([key, [[key, key.split("/").pop()]]]);
    this.close();
    this.charts = panels.map(([title, labels]) => new Chart({
      title,
      hint: labels.map(([key]) => `${key}: ${this.known.get(key).doc}`).join("\n"),
      keys: labels.map(([key]) => key),
      labels: labels.map(([, label]) => label),
      onPick: (first, last) => go("rollouts", run, { step_from: first, step_to: last }),
      onZoom: (from, to) => this._zoom(from, to),
    }));
    grid.append(...this.charts.map((chart) => chart.node));
    this.stale = new StalenessMap((query) => go("rollouts", run, query));
    this.stale.node.hidden = true; // until there is something
    const beside = this.charts.find((chart) => chart.title === "Staleness");
    if (beside) beside.node.after(this.stale.node);
    else grid.append(this.stale.node);
    replace(this.node, this.cards, this.warned, this.zoomed, grid, this._more(keys), this._evaluations(evaluations));
    await this._fill(evaluations, warnings);
  }

  /** What changed of the run: names of revisions. */
  async update(changed) {
    if (!changed.has("metrics") && !changed.has("evaluations")) {
      if (changed.has("rollouts")) await this._addOfRollouts(...this.last);
      return this._cards();
    }
    const { source, run } = this.page;
    const keys = await source.ask(run, "keys");
    if (keys.some((of) => !this.known.has(of.key))) return this.open(this.route);
    const [evaluations, warnings] = await Promise.all([source.ask(run, "evaluations"), source.ask(run, "warnings")]);
    for (const of of keys) this.known.set(of.key, of);
    return this._fill(evaluations, warnings);
  }

  repaint() {
    for (const chart of this.charts) chart.repaint();
    this.stale?.repaint();
  }

  close() {
    for (const chart of this.charts) chart.close();
    this.stale?.close();
  }

  async _fill(evaluations, warnings) {
    const { source, run } = this.page;
    const keys = [...new Set(this.charts.flatMap((chart) => chart.keys))];
    const { from, to } = this.route.query;
    const told = await source.ask(run, "metrics", { keys: listed(keys), points: 600, from, to });
    for (const chart of this.charts) {
      const marks = warnings.filter((warning) => chart.keys.includes(warning.key));
      chart.set(told, { marks, ...(chart.keys[0] === "reward/mean" ? { points: evaluations, band: this.band } : {}) });
    }
    this.last = [told, evaluations, warnings];
    this._addOfRollouts(...this.last);
    this._cards();
    replace(this.warned, warnings.length ? el("h2", { text: "Health" }) : null, el("ul", {}, warnings.map((warning) => el("li", {},
      link(`step ${warning.step}`, address("rollouts", run, { step_from: warning.step, step_to: warning.step })), " ", warning.text))));
    replace(this.zoomed, from || to ? [`Steps ${from ?? "first"} to ${to ?? "last"}. `, button("Show all steps", () => this._zoom(null, null))] : null);
  }

  /** What is of the rollouts comes behind: nobody waits until they are read. */
  async _addOfRollouts(told, evaluations, warnings) {
    const { source, run } = this.page, { stale } = this;
    const chart = this.charts.find((of) => of.keys[0] === "reward/mean");
    try {
      const [band, ages] = await Promise.all([chart ? source.ask(run, "intervals") : null, source.ask(run, "staleness")]);
      this.band = band;
      if (this.stale === stale) stale.set(ages);
    } catch (error) {
      this.page.failed(error);
      return;
    }
    if (chart && this.charts.includes(chart) && chart.told === told) chart.set(told, { marks: warnings.filter((of) => of.key === "reward/mean"), points: evaluations, band: this.band });
  }

  _cards() {
    const { state } = this.page;
    if (!state) return;
    const last = (key) => this.known.get(key)?.last ?? null;
    const cards = [
      ["State", state.state, state.holder || state.ended_early],
      ["Step", `${state.step}${state.num_steps ? ` of ${state.num_steps}` : ""}`, state.seconds_a_step ? `${duration(state.seconds_a_step, 0.1)} each` : ""],
      ["Time left", state.seconds_left === null ? "–" : duration(state.seconds_left), ""],
      ["Reward", short(last("reward/mean")), ""],
      ["Staleness", short(last("staleness/mean")), `${short(last("staleness/max"))} at most, bound ${short(last("staleness/bound"))}`],
      ["Tokens a second", short(last("speed/step_tokens_per_s")), `${short(last("speed/generated_tokens_per_s"))} while generating`],
      ["Partial rollouts", percent(last("rollouts/partial_share")), "of several policy versions"],
      ["Bound by", state.waits?.bound ?? "–", state.waits ? `${state.waits.text}${state.waits.advice ? `; try ${state.waits.advice}` : ""}` : ""],
    ];
    replace(this.cards, cards.map(([name, value, more]) => el("div", { class: "card" }, el("h2", { text: name }), el("p", { class: "figure", text: value }), more ? el("p", { class: "more", text: more }) : null)),
      state.resume ? this._resume(state.resume) : null);
  }

  _resume({ command, folder }) {
    return el("div", { class: "card wide" }, el("h2", { text: folder ? `To go on, in ${folder}` : "To go on" }), el("code", { text: command }), " ", button("Copy", () => copyText(command, "the command")));
  }

  _more(keys) {
    const input = el("input", { type: "search", list: "metrics", placeholder: "any key of metrics.jsonl" });
    const add = () => {
      if (!this.known.has(input.value)) return;
      const query = { ...this.route.query, add: listed([...new Set([...namesIn(this.route.query.add), input.value])]) };
      go("overview", this.page.run, query);
    };
    input.addEventListener("change", add);
    return el("section", { class: "more-metrics" }, el("h2", { text: "Another metric" }),
      labelled("Metric", input), button("Add its curve", add),
      el("datalist", { id: "metrics" }, keys.map((of) => el("option", { value: of.key }, of.doc))));
  }

  _evaluations(rows) {
    if (!rows.length) return null;
    const figures = [...new Set(rows.flatMap((row) => Object.keys(row).filter((key) => /^(pass|maj)@\d+$/.test(key))))];
    return el("section", {}, table(`${plural(rows.length, "evaluation")} on held-out tasks`, [
      { title: "Step", number: true, of: (row) => link(String(row.step), address("answers", this.page.run, { step: row.step }), { title: "The answers of this evaluation" }) },
      { title: "Mean reward", number: true, of: (row) => short(row.mean) },
      { title: "95 % interval", number: true, of: (row) => (row.ci ? `${short(row.ci[0])} to ${short(row.ci[1])}` : "–") },
      ...figures.map((key) => ({ title: key, number: true, of: (row) => short(row[key]) })),
      { title: "Tasks", number: true, of: (row) => short(row.tasks) },
      ...(rows.some((row) => row.left_out) ? [{ title: "Left out (prompts too long)", number: true, of: (row) => short(row.left_out) }] : []),
    ], rows));
  }

  async _zoom(from, to) {
    this.route = { ...this.route, query: { ...this.route.query, from, to } };
    refine(this.route, this.route.query);
    const { source, run } = this.page;
    await this._fill(...(await Promise.all([source.ask(run, "evaluations"), source.ask(run, "warnings")])));
  }
}
