// Who answers the page's questions: the server that sent it, or what was written into it (report.html).

import { Sample } from "./sample.js";

const TOKEN = "rollover.token";

/** Questions of a server. A token comes once in the address ("#token=...") and is kept for this tab alone. */
class Served {
  constructor() {
    this.live = true;
    const given = /^#token=(.+)$/.exec(location.hash);
    if (given) {
      sessionStorage.setItem(TOKEN, decodeURIComponent(given[1]));
      history.replaceState(null, "", "#/overview");
    }
    this.token = sessionStorage.getItem(TOKEN) ?? "";
  }

  runs() {
    return this._get("api/runs");
  }

  ask(run, name, query = {}, signal = undefined) {
    return this._get(`api/runs/${run}/${name}?${new URLSearchParams(given(query))}`, signal);
  }

  compare(name, query = {}) {
    return this._get(`api/compare/${name}?${new URLSearchParams(given(query))}`);
  }

  async _get(path, signal) {
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    let response;
    try {
      response = await fetch(path, { headers, signal, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer: is `rollover view` still running?");
    }
    const told = await response.json().catch((error) => {
      if (error.name === "AbortError") throw error; // nobody wants it any more: that is no empty answer
      return {};
    });
    if (!response.ok) throw new Error(told.error?.message ?? `The server answers ${response.status}`);
    return told;
  }
}

function given(query) {
  return Object.fromEntries(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
}

export async function openSource() {
  const written = document.getElementById("written");
  if (!written) return new Served();
  if (!("DecompressionStream" in window)) throw new Error("A report can be read in browsers of 2023 and later");
  const packed = Uint8Array.from(atob(written.textContent), (byte) => byte.charCodeAt(0));
  return new Sample(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json());
}
