// One rollout: its text with the version that sampled each part behind it, what each token was worth, its siblings, its
// life. Texts of prompts and answers become text nodes; characters that are not seen are shown by what they are called.

import { el, replace, button, link, table, copyText } from "./dom.js";
import { saidIn, short, decimal, duration, plural, percent, versions, visible } from "./words.js";
import { versionBackground, versionColour } from "./colours.js";
import { address } from "./route.js";

const PART = 2000;
const SHADES = {
  version: "policy version", probability: "probability as it was sampled", entropies: "entropy", importance_weights: "importance weight",
  loss_weights: "weight in the loss", advantages: "advantage", plain: "nothing",
};
const TRAINED = { advantages: "advantage", importance_weights: "importance weight", loss_weights: "weight in the loss", entropies: "entropy" };
const ORANGE = 28, BLUE = 215;

export class RolloutView {
  constructor(page) {
    this.page = page;
    this.node = el("div", { class: "view" });
    this.shade = "version";
  }

  async open(route) {
    this.route = route;
    const { source, run } = this.page;
    this.told = await source.ask(run, "rollout", { step: route.query.step, id: route.query.id, count: PART });
    this._show();
  }

  repaint() {
    if (this.told) this._show();
  }

  _show() {
    const { told } = this;
    this.hover = el("p", { class: "hover", role: "status", text: "Point at a token, or go there with the arrow keys, to see what it was worth." });
    this.text = el("div", { class: "tokens", tabindex: "0", role: "application", "aria-label": "Tokens of the answer: arrow keys go from token to token", on: {
      keydown: (event) => this._key(event),
      pointerover: (event) => this._point(event.target),
      click: (event) => this._choose(event.target),
    } });
    this.more = el("p", {});
    this.current = null;
    this._tokens();
    replace(this.node,
      el("h1", {}, `Rollout ${told.rollout_id} `, el("small", { text: `of step ${told.step}, ${told.outcome}` })),
      this._actions(), this._facts(),
      el("section", {}, el("h2", { text: "Asked" }), this._prompt()),
      el("section", {}, el("h2", { text: "Answered" }), this._shades(), this._segments(), this.hover, this.text, this.more),
      this._why(), this._resume(), this._siblings(), this._life(),
      told.columns && Object.keys(told.columns).length ? el("section", {}, el("h2", { text: "Columns of the task" }), el("pre", { text: visible(JSON.stringify(told.columns, null, 2)) })) : null,
    );
  }

  _actions() {
    const { told } = this;
    return el("p", { class: "actions" },
      button("Copy as JSON", () => copyText(JSON.stringify(told, null, 2), "the rollout")),
      button("Copy the answer", () => copyText(told.completion, "the answer")),
      link("All of its step", address("rollouts", this.page.run, { step_from: told.step, step_to: told.step })),
      told.siblings.filter((of) => of.sibling === told.sibling).length > 1 ? link("Its episode", address("episode", this.page.run, { step: told.step, group: told.group_id, sibling: told.sibling })) : null,
      link("When it ran", address("timeline", this.page.run, { group: told.group_id })));
  }

  _facts() {
    const { told } = this;
    const facts = [
      ["Score", told.score === null ? `none: ${told.error ?? "not scored"}` : short(told.score)],
      ...Object.entries(told.extras ?? {}).map(([name, value]) => [`of it ${name}`, short(value)]),
      ...Object.entries(told.shaping ?? {}).map(([name, value]) => [`shaping ${name}`, short(value)]),
      ...Object.entries(told.texts ?? {}).map(([name, text]) => [`of it ${name}`, text]),
      ...(told.turns ? [["Rewards of turns", told.turns.map((value) => short(value)).join(", ")]] : []),
      ["Advantage", told.advantage === null ? "none of its tokens is in the loss by rewards" : decimal(told.advantage, 4)],
      ["Length", `${plural(told.num_tokens, "token")} after ${plural(told.prompt_tokens, "token")} of prompt`],
      ["Stopped by", told.stop_reason ?? "nothing: it never stopped"],
      ["Staleness", String(told.staleness)],
      ["Task", `${told.task_id} of ${told.source}${told.attempt ? `, given ${told.attempt + 1} times` : ""}`],
      ["Reward function of the task", told.reward],
      ...(told.role !== "policy" ? [["Role", told.role]] : []),
    ];
    return el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", {}, el("bdi", { text: visible(String(value)) })))));
  }

  _prompt() {
    const { told } = this;
    const images = [...(told.media ?? []), ...(told.later_media ?? [])];
    const texts = told.messages?.map((message) => this._message(message)) ?? el("pre", { class: "said" }, el("bdi", { text: visible(told.prompt ?? "") }));
    return [texts, images.map((media, number) => this._picture(media, number))];
  }

  /** An image of the prompt, or of an environment's answer: the server draws it, if its pixels are those that were recorded. A report has its name. */
  _picture(media, number) {
    const name = String(media.source).split("/").pop(), { source, run } = this.page, { step, id } = this.route.query;
    const place = el("p", {}), text = `${name}, ${media.size.join(" x ")} pixels, ${plural(media.count, "token")}`;
    if (source.live) source.ask(run, "picture", { step, id, number }).then(
      ({ url, why }) => replace(place, url?.startsWith("data:image/png;base64,") ? el("img", { src: url, alt: name, style: { "max-width": "100%" } }) : why),
      (error) => replace(place, error.message));
    return el("figure", {}, place, el("figcaption", { text }));
  }

  _message(message) {
    return el("div", { class: "message" }, el("h3", { text: String(message.role) }), el("pre", { class: "said" }, el("bdi", { text: visible(saidIn(message.content)) })));
  }

  _shades() {
    const { trained } = this.told.tokens;
    const known = Object.entries(SHADES).filter(([value]) => !(value in TRAINED) || trained?.[value]);
    if (!known.some(([value]) => value === this.shade)) this.shade = "version";
    return el("fieldset", { class: "choice" }, el("legend", { text: "Behind the text" }), known.map(([value, text]) => el("label", {},
      el("input", { type: "radio", name: "shade", value, checked: this.shade === value, on: { change: () => { this.shade = value; this._tokens(); } } }), text)));
  }

  _segments() {
    const { told } = this;
    const total = Math.max(1, told.num_tokens);
    return el("div", { class: "segments", role: "img", "aria-label": told.segments.map((of) => this._segmentText(of)).join("; ") }, told.segments.map((of) =>
      el("span", { style: { "flex-grow": String(of.num_tokens / total), background: of.trainable ? versionColour(of.policy_version) : "var(--grid)" }, title: this._segmentText(of) },
        of.num_tokens / total > 0.08 ? (of.trainable ? `v${of.policy_version}` : "environment") : "")));
  }

  _segmentText(of) {
    const who = of.trainable ? `policy version ${of.policy_version}, staleness ${of.staleness}` : "an environment";
    return `${plural(of.num_tokens, "token")} of ${who}, then ${of.stop_reason}, at temperature ${of.sampling.temperature}`;
  }

  _segmentAt(place) {
    return this.told.segments.find((of) => place >= of.first && place < of.first + of.num_tokens);
  }

  _tokens() {
    const { tokens } = this.told;
    if (!tokens.texts) {
      // Nobody here knows what a token says: the text whole, and the parts by their lengths alone.
      replace(this.text, el("bdi", { text: visible(this.told.completion) }));
      replace(this.more, "The run's tokenizer is not at hand: the text is not divided into its tokens. The bar above shows the parts.");
      return;
    }
    replace(this.text, tokens.texts.map((text, number) => this._token(tokens.first + number, text, tokens.logprobs[number])));
    const end = tokens.first + tokens.ids.length;
    replace(this.more, end < tokens.of ? [`Tokens ${tokens.first} to ${end - 1} of ${tokens.of}. `, button("Further tokens", () => this._further().catch((error) => replace(this.more, error.message)))] : null);
  }

  _token(place, text, logprob) {
    const segment = this._segmentAt(place);
    const node = el("span", { class: segment?.trainable ? "token" : "token foreign", "data-place": place });
    node.textContent = text === "" ? "\u00b7" : visible(text);
    if (segment?.trainable) node.style.background = this._background(place, segment, logprob);
    if (this.told.tokens.trained?.mask[place - this.told.tokens.first] === false) node.classList.add("unmasked");
    if (segment && place === segment.first && place > 0) node.classList.add("begins");
    return node;
  }

  /** What stands behind a token that the policy sampled: the more, the further it is from 0, or a weight from 1. */
  _background(place, segment, logprob) {
    if (this.shade === "version") return versionBackground(segment.policy_version);
    const value = this.shade === "probability" ? logprob : this.told.tokens.trained?.[this.shade]?.[place - this.told.tokens.first];
    if (value === null || value === undefined) return "";
    const strength = { probability: -value / 5, entropies: value / 3, advantages: value, importance_weights: Math.log2(value), loss_weights: Math.log2(Math.max(value, 1 / 16)) / 2 }[this.shade];
    const hue = this.shade === "probability" || this.shade === "entropies" || strength < 0 ? ORANGE : BLUE;
    return `hsl(${hue} 95% 50% / ${(Math.min(1, Math.abs(strength)) * 0.6).toFixed(2)})`;
  }

  async _further() {
    const { tokens } = this.told;
    const first = tokens.first + tokens.ids.length;
    const next = await this.page.source.ask(this.page.run, "rollout", { ...this.route.query, first, count: PART });
    for (const name of ["ids", "logprobs", "texts"]) tokens[name] = tokens[name].concat(next.tokens[name]);
    for (const name of Object.keys(tokens.trained ?? {})) tokens.trained[name] = tokens.trained[name].concat(next.tokens.trained[name]);
    this._tokens();
  }

  _point(node) {
    if (!(node instanceof HTMLElement) || node.dataset.place === undefined) return;
    this.current?.classList.remove("current");
    this.current = node;
    node.classList.add("current");
    const place = Number(node.dataset.place), { tokens } = this.told, at = place - tokens.first;
    const segment = this._segmentAt(place), logprob = tokens.logprobs[at];
    const parts = [`token ${place}: id ${tokens.ids[at]}`];
    if (!segment?.trainable) parts.push("of an environment: not in the loss");
    else {
      parts.push(`policy version ${segment.policy_version} (staleness ${segment.staleness})`, `log-prob ${decimal(logprob, 4)}`, `probability ${logprob === null ? "–" : percent(Math.exp(logprob))}`);
      parts.push(...this._trained(at));
    }
    this.hover.textContent = parts.join(" · ");
  }

  /** Clicked, or reached by a key: to point at another on the way to a button changes no command. */
  _choose(node) {
    this._point(node);
    if (this.current) this._resumesAt(Number(this.current.dataset.place));
  }

  /** What training made of a token, where the run recorded it. */
  _trained(at) {
    const { trained } = this.told.tokens;
    if (!trained) return [];
    if (!trained.mask[at]) return ["not in the loss"];
    const parts = [trained.rejected[at] ? "rejected: out of the loss again" : "in the loss"];
    for (const [key, name] of Object.entries(TRAINED)) if (trained[key] && trained[key][at] !== null) parts.push(`${name} ${short(trained[key][at])}`);
    return parts;
  }

  _key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
    if (!(event.key in moves) || !this.told.tokens.texts) return;
    event.preventDefault();
    const all = this.text.children;
    const place = this.current ? [...all].indexOf(this.current) + moves[event.key] : 0;
    const node = all[Math.max(0, Math.min(all.length - 1, place))];
    if (node) {
      this._choose(node);
      node.scrollIntoView({ block: "nearest" });
    }
  }

  _why() {
    const { why } = this.told;
    return el("section", { class: "why" }, el("h2", { text: "Why it got its advantage" }),
      el("dl", { class: "steps" }, why.map(({ about, text }) => el("div", {}, el("dt", { text: about }), el("dd", {}, el("bdi", { text: visible(text) }))))));
  }

  /** The command that goes on from here, and the token that it begins at: the one after the token that was chosen. */
  _resume() {
    this.resume = el("code", { class: "command" });
    this.resumesAfter = el("p", {});
    this._resumesAt(null);
    return el("section", {}, el("h2", { text: "What would resume from here" }), this.resumesAfter,
      el("p", {}, this.resume, " ", button("Copy", () => copyText(this.resume.textContent, "the command"))));
  }

  _resumesAt(place) {
    this.resumesAfter.textContent = place === null
      ? "This answers the prompt once more, with the newest weights of the run. Click a token above to keep the answer up to it."
      : `This keeps the answer up to token ${place} and goes on from there, with the newest weights of the run.`;
    this.resume.textContent = `${this.told.resume}:${place === null ? 0 : place + 1}`;
  }

  _siblings() {
    const { told } = this;
    return el("section", {}, table(`Its group ${told.group_id}: ${plural(told.siblings.length, "rollout")} of one task`, [
      { title: "Rollout", of: (row) => (row.id === told.rollout_id ? el("b", { text: row.id }) : link(row.id, address("rollout", this.page.run, { step: row.step, id: row.id }))) },
      { title: "Score", number: true, of: (row) => short(row.score) },
      { title: "Advantage", number: true, of: (row) => short(row.advantage) },
      { title: "Tokens", number: true, of: (row) => short(row.tokens) },
      { title: "Versions", number: true, of: (row) => versions(row.oldest, row.newest) },
      { title: "Stopped by", of: (row) => row.stop },
      { title: "Answer", of: (row) => el("bdi", { class: "answered", text: visible(row.answered) }) },
    ], told.siblings));
  }

  _life() {
    const { life } = this.told;
    if (!life.length) return el("section", {}, el("h2", { text: "Its life" }), el("p", { text: "The run wrote no trace (track.trace)." }));
    const begin = life[0].seconds, whole = Math.max(1e-9, life[life.length - 1].seconds - begin);
    const states = { admit: "waiting", start: "running", resume: "running", park: "parked", act: "acting", answer: "parked", finish: "scoring", ready: "ready", consume: null, drop: null };
    const said = (state) => (state === "scoring" ? "scoring, or waiting for its siblings" : state);
    const bars = [];
    for (const [number, of] of life.entries()) {
      const next = life[number + 1], state = states[of.kind];
      if (next && state) bars.push(el("span", { class: `state ${state}`, style: { "flex-grow": String((next.seconds - of.seconds) / whole) }, title: `${said(state)} ${duration(next.seconds - of.seconds, 0.001)}` }));
    }
    const names = [...new Set(life.map((of) => states[of.kind]).filter(Boolean))];
    return el("section", {}, el("h2", { text: "Its life" }), el("div", { class: "life", "aria-hidden": "true" }, bars),
      el("p", { class: "legend" }, names.map((name) => [el("span", { class: `swatch state ${name}` }), `${said(name)} `])),
      table("What happened to it, and when", [
        { title: "At", number: true, of: (of) => duration(of.seconds, 0.001) },
        { title: "What", of: (of) => `${of.kind}${of.whole_group ? " (its group)" : ""}` },
        { title: "Trainer's version", number: true, of: (of) => String(of.version) },
        { title: "Sampled", of: (of) => of.segments.map(([version, tokens]) => `${plural(tokens, "token")} of version ${version}`).join(", ") },
        { title: "Why", of: (of) => of.reason },
      ], life));
  }
}
