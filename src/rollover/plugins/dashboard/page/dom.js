// Elements of the page. Whatever a run says becomes a text node here, and never markup: there is no innerHTML anywhere.
// Characters that are not seen, or that turn the reading order around, are shown by what they are called.

import { visible } from "./words.js";

const READ = new Set(["title", "aria-label", "placeholder"]); // attributes that somebody reads

/**
 * An element. `properties`: `class`, `text`, `title`, `data-*`, `aria-*` and other attributes as strings or true;
 * `on`: {event: listener}; `style`: {property: value}. `children`: elements, texts, or null for none.
 */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (name === "style") for (const [key, to] of Object.entries(value)) made.style.setProperty(key, to);
    else if (name === "text") made.textContent = visible(String(value));
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : READ.has(name) ? visible(String(value)) : String(value));
  }
  append(made, children);
  return made;
}

export function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
}

export function replace(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/** A labelled control: the label is what a screen reader says, and what a click reaches. */
export function labelled(text, control) {
  return el("label", { class: "field" }, el("span", { text }), control);
}

export function button(text, onClick, properties = {}) {
  return el("button", { type: "button", text, on: { click: onClick }, ...properties });
}

export function link(text, to, properties = {}) {
  return el("a", { href: to, text, ...properties });
}

/** A table; `columns`: {title, number, of(row): node or text}. */
export function table(caption, columns, rows, properties = {}) {
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      properties,
      el("caption", { text: caption }),
      el("thead", {}, el("tr", {}, columns.map((of) => el("th", { scope: "col", class: of.number ? "number" : null, title: of.hint }, of.head ?? of.title)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, columns.map((of) => el("td", { class: of.number ? "number" : null }, of.of(row)))))),
    ),
  );
}

/** Say to a screen reader, politely, what has just changed. */
export function announce(text) {
  const place = document.getElementById("announcements");
  if (place) place.textContent = visible(text);
}

export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    announce(`${what} copied`);
    return true;
  } catch {
    // A page from a disk, or without the permission: the text is shown, selected.
    const area = el("textarea", { readonly: true, "aria-label": what, value: text });
    const dialog = el("dialog", { class: "copy", "aria-label": `Copy ${what}`, on: { close: () => dialog.remove() } }, el("p", { text: `Copy ${what} from here:` }), area, button("Close", () => dialog.close()));
    document.body.append(dialog);
    dialog.showModal();
    area.select();
    return false;
  }
}
