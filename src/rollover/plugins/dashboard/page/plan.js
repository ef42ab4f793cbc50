// Plan: what the planner says of this configuration, beside what happened.

import { el, replace, table, button } from "./dom.js";
import { short, percent } from "./words.js";

const ROWS = {
  step_s: ["Seconds of a step", short], generate_s: ["of it generating", short], train_s: ["of it training", short],
  generated_tokens_per_s: ["Tokens generated a second", short], trained_tokens_per_s: ["Tokens trained a second", short],
  staleness_mean: ["Staleness, mean", short], staleness_max: ["Staleness, most", short], partial_share: ["Partial rollouts", percent],
  dropped_share: ["Tokens dropped", percent], reprefill_share: ["Computed again, of all tokens computed", percent],
};

export class PlanView {
  constructor(page) {
    this.page = page;
    this.node = el("div", { class: "view" });
  }

  async open() {
    replace(this.node, el("h1", { text: "Plan" }), el("p", { class: "loading", text: "The planner simulates this configuration with the lengths and speeds of this run…" }));
    const told = await this.page.source.ask(this.page.run, "plan");
    if (told.why) {
      replace(this.node, el("h1", { text: "Plan" }), el("p", { text: told.why }), button("Try again", () => this.open()));
      return;
    }
    const rows = Object.entries(ROWS).map(([key, [title, say]]) => ({ title, say, predicted: told.predicted[key], happened: told.happened[key] }));
    replace(this.node, el("h1", { text: "Plan" }),
      el("p", { text: `Predicted for steady training, ${told.steps} simulated steps, from ${told.from}; what happened is the mean of the run's steps.` }),
      ...told.left_out.map((said) => el("p", { class: "left-out", text: `Not run here, as the run's directory may come from somebody else: ${said}.` })),
      table("Predicted and happened", [
        { title: "Figure", of: (row) => row.title },
        { title: "Predicted", number: true, of: (row) => row.say(row.predicted) },
        { title: "Happened", number: true, of: (row) => row.say(row.happened) },
        { title: "Happened / predicted", number: true, of: (row) => (row.predicted && row.happened !== null && row.happened !== undefined ? short(row.happened / row.predicted) : "–") },
      ], rows));
  }
}
