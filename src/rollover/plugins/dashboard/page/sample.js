// The answers of a report: the same questions as a server's, of what was written into the file. A report has every
// rollout's numbers up to a limit, and the texts of as many as have room; what it does not have it says.

import { namesIn } from "./words.js";

/** The filters of found.py, over the columns of a report. */
const OF = {
  step: (row) => row.step, score: (row) => row.score, advantage: (row) => row.advantage, tokens: (row) => row.tokens, segments: (row) => row.segments,
  sibling: (row) => row.sibling, version: (row) => row.newest, versions: (row) => (row.oldest === null ? 0 : row.newest - row.oldest + 1), staleness: (row) => row.staleness, group: (row) => row.group,
};
const CHOSEN = ["outcome", "source", "stop"];

export class Sample {
  constructor(written) {
    this.live = false;
    this.written = written;
    this.lists = new Map();
  }

  async runs() {
    return this.written.runs.map((run) => run.answers.state);
  }

  async ask(run, name, query = {}) {
    const of = this.written.runs[run];
    if (!of) throw new Error(`There is no run ${run} in this report`);
    if (name === "metrics") return this._metrics(of, query);
    if (name === "rollouts") return this._page(of, query);
    if (name === "rollout") return this._rollout(of, query);
    if (name === "lanes") return this._lanes(of, query);
    if (name === "episode") return this._episode(of, query);
    if (name === "answers") return this._answers(of, query);
    if (name === "answer") return this._answer(of, query);
    if (!(name in of.answers)) throw new Error(`The report has no answer to ${name}`);
    return of.answers[name];
  }

  async compare(name, query = {}) {
    const { compare } = this.written;
    const numbers = (query.runs ?? "").split(",").filter(Boolean).map(Number);
    const missing = numbers.find((number) => !this.written.runs[number]);
    if (missing !== undefined) throw new Error(`There is no run ${missing} in this report`);
    if (name === "metrics") {
      const keys = namesIn(query.keys);
      return (numbers.length ? numbers : this.written.runs.map((_, number) => number)).map((number) => this._over(this.written.runs[number], keys, query.x ?? "step"));
    }
    if (name === "config") {
      const places = numbers.length ? numbers : this.written.runs.map((_, number) => number);
      return compare.config.map((row) => ({ key: row.key, values: places.map((place) => row.values[place]) })).filter((row) => new Set(row.values).size > 1);
    }
    return numbers.length && numbers.join() !== this.written.runs.map((_, number) => number).join() ? [] : compare.evaluations;
  }

  _over(of, keys, x) {
    const { metrics } = of.answers;
    return { ...metrics, x: of.axes[x] ?? metrics.steps, columns: Object.fromEntries(keys.map((key) => [key, metrics.columns[key] ?? metrics.steps.map(() => null)])) };
  }

  _metrics(of, query) {
    const keys = namesIn(query.keys);
    const told = this._over(of, keys, query.x ?? "step");
    const [from, to] = [Number(query.from || -Infinity), Number(query.to || Infinity)];
    const kept = told.steps.map((step, place) => place).filter((place) => told.steps[place] >= from && told.steps[place] <= to);
    const pick = (column) => kept.map((place) => column[place]);
    return { steps: pick(told.steps), first: pick(told.first), last: pick(told.last), x: pick(told.x), columns: Object.fromEntries(keys.map((key) => [key, pick(told.columns[key])])), of: told.of, thinned: told.thinned };
  }

  _rows(of) {
    if (!this.lists.has(of)) {
      const { columns, words } = of.rollouts, names = Object.keys(columns);
      const contexts = new Map(), episodeOf = (place) => `${columns.step[place]}/${columns.group[place]}-${columns.sibling[place]}`;
      columns.step.forEach((_, place) => contexts.set(episodeOf(place), (contexts.get(episodeOf(place)) ?? 0) + 1));
      const rows = columns.step.map((_, place) => {
        const row = { ...Object.fromEntries(names.map((name) => [name, columns[name][place]])), contexts: contexts.get(episodeOf(place)) };
        for (const name of CHOSEN) row[name] = words[row[name]];
        return { ...row, ...(of.excerpts[`${row.step}/${row.id}`] ?? { asked: "", answered: "(the text is not in this report)" }) };
      });
      this.lists.set(of, rows);
    }
    return this.lists.get(of);
  }

  _page(of, query) {
    const text = (query.text ?? "").toLowerCase();
    const passes = (row) => {
      for (const [name, value] of Object.entries(OF)) {
        const [low, high] = [query[`${name}_from`], query[`${name}_to`]], own = value(row);
        if (low !== undefined && low !== "" && !(own !== null && own >= Number(low))) return false;
        if (high !== undefined && high !== "" && !(own !== null && own <= Number(high))) return false;
      }
      if (CHOSEN.some((name) => query[name] && !namesIn(query[name]).includes(row[name]))) return false;
      return !query.scored || (row.score !== null) === (query.scored === "yes");
    };
    let rows = this._rows(of).filter(passes);
    const passed = rows.length;
    if (text) rows = rows.filter((row) => [row.id, ...this._texts(of, row)].some((part) => part.toLowerCase().includes(text)));
    const sign = query.order === "down" ? -1 : 1;
    if (query.sort) {
      const value = OF[query.sort];
      rows = [...rows].sort((a, b) => (value(a) === null) - (value(b) === null) || sign * (value(a) - value(b)));
    } else if (sign < 0) rows = [...rows].reverse();
    const offset = Number(query.offset ?? 0), limit = Number(query.limit ?? 50), end = offset + limit;
    return { rows: rows.slice(offset, end), total: of.rollouts.total, passed: text ? rows.length : passed, offset, next: end < rows.length ? end : null, searched: null, withText: of.rollouts.total - of.left_out };
  }

  /** What a server looks in, too, as far as it is here. */
  _texts(of, row) {
    const record = of.records[`${row.step}/${row.id}`];
    if (!record) return [];
    const said = (record.messages ?? []).flatMap((message) => Object.entries(message).filter(([key]) => key !== "role").map(([, part]) => (typeof part === "string" ? part : JSON.stringify(part))));
    return [record.task_id, record.completion, record.prompt ?? "", ...said];
  }

  _rollout(of, query) {
    const record = of.records[`${query.step}/${query.id}`];
    if (!record) throw new Error(`The text of rollout ${query.id} is not in this report: \`rollover view\` shows it`);
    const siblings = this._rows(of).filter((row) => row.group === record.group_id && row.step === record.step);
    const first = Number(query.first ?? 0), { tokens } = record, has = tokens.ids.length;
    if (first && first >= has) throw new Error(`This report has the first ${has} tokens of rollout ${query.id}: \`rollover view\` shows the others`);
    const cut = (values) => values && values.slice(first, first + Number(query.count ?? 2000));
    const trained = tokens.trained && Object.fromEntries(Object.entries(tokens.trained).map(([name, values]) => [name, cut(values)]));
    return { ...record, siblings, tokens: { ...tokens, first, ids: cut(tokens.ids), logprobs: cut(tokens.logprobs), texts: cut(tokens.texts), trained } };
  }

  _episode(of, query) {
    const [step, group, sibling] = [query.step, query.group, query.sibling].map(Number);
    const rows = this._rows(of).filter((row) => row.step === step && row.group === group && row.sibling === sibling);
    const contexts = rows.map((row) => {
      const record = of.records[`${row.step}/${row.id}`];
      return { ...row, trajectory: record?.trajectory ?? 0, context: record?.context ?? 0, role: record?.role ?? "", turns: record?.turns ?? null, error: record?.error ?? null };
    });
    contexts.sort((a, b) => a.trajectory - b.trajectory || a.context - b.context);
    return { step, group, sibling, of: contexts.length, contexts };
  }

  _answers(of, query) {
    const { evaluated } = of, text = (query.text ?? "").toLowerCase();
    if (evaluated.step !== null && query.step && Number(query.step) !== evaluated.step) throw new Error(`The report has the answers after step ${evaluated.step} alone: \`rollover view\` shows the others`);
    const given = (name) => query[name] !== undefined && query[name] !== "";
    let rows = evaluated.rows.filter((row) => (!given("score_from") || (row.score !== null && row.score >= Number(query.score_from))) && (!given("score_to") || (row.score !== null && row.score <= Number(query.score_to)))
      && (!query.scored || (row.score !== null) === (query.scored === "yes")) && (!query.setting || (row.setting || "[eval]") === query.setting)
      && (!text || [row.task, row.expected ?? "", evaluated.whole[row.place]?.prompt ?? row.asked, evaluated.whole[row.place]?.answer ?? row.answered].some((part) => part.toLowerCase().includes(text))));
    const sign = query.order === "down" ? -1 : 1;
    if (query.sort) rows = [...rows].sort((a, b) => (a[query.sort] === null) - (b[query.sort] === null) || sign * (a[query.sort] - b[query.sort]));
    const offset = Number(query.offset || 0), end = offset + Number(query.limit ?? 50);
    return { ...evaluated, whole: undefined, rows: rows.slice(offset, end), passed: rows.length, offset, next: end < rows.length ? end : null, withText: evaluated.rows.length };
  }

  _answer(of, query) {
    const told = of.evaluated.whole[query.place];
    if (!told || Number(query.step) !== of.evaluated.step) throw new Error("This answer is not in the report: `rollover view` shows it");
    return told;
  }

  /** The finest of the windows in the report that reaches over what is wanted. */
  _lanes(of, query) {
    const whole = of.lanes[0], from = Number(query.from ?? 0), to = Number(query.to ?? whole.to);
    const fitting = of.lanes.filter((window) => window.from <= Math.max(0, from) && window.to >= Math.min(whole.to, to));
    const best = fitting.reduce((a, b) => (b.to - b.from < a.to - a.from ? b : a), whole);
    return { ...best, shownFrom: from, shownTo: to };
  }
}
