// What can be asked of every page, whatever it shows. Put into it before its own scripts (watched.py).

window.checks = (() => {
  const CONTROLS = "button, input, select, textarea, summary, a[href], [tabindex]";
  const shown = (of) => of.checkVisibility({ visibilityProperty: true }) && !of.closest(".unseen");
  const said = (of) => `${of.outerHTML.slice(0, 160)}`;

  /** Controls without a name that a screen reader could say. */
  function unnamed() {
    const name = (of) => of.ariaLabel || of.labels?.[0]?.textContent || of.textContent;
    return [...document.querySelectorAll(CONTROLS)].filter((of) => shown(of) && of.id !== "main" && !name(of).trim()).map(said);
  }

  /** How far the page is wider than its window, and what of it reaches out. */
  function tooWide() {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    const cut = (of) => of.parentElement && (getComputedStyle(of).overflowX !== "visible" || cut(of.parentElement));
    const out = [...document.querySelectorAll("body *")].filter((of) => of.getBoundingClientRect().right > width + 1 && !cut(of.parentElement));
    return [`${document.documentElement.scrollWidth} of ${width}`, ...out.map(said).slice(0, 5)];
  }

  const known = new Map();
  /** [red, green, blue (of 255), alpha (of 1)] of any colour of CSS: a canvas knows all of them. */
  const numbers = (colour) => {
    if (!known.has(colour)) {
      const ctx = new OffscreenCanvas(1, 1).getContext("2d");
      ctx.fillStyle = colour;
      ctx.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = ctx.getImageData(0, 0, 1, 1).data;
      known.set(colour, [red, green, blue, alpha / 255]);
    }
    return known.get(colour);
  };
  const over = (top, under) => top.slice(0, 3).map((value, place) => value * top[3] + under[place] * (1 - top[3]));
  const light = (colour) => {
    const [red, green, blue] = colour.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };

  /** Texts that are hard to read: less contrast than 4.5 to 1 (WCAG 2.2, 1.4.3); that of large letters 3 to 1. */
  function faint() {
    const found = [];
    for (const of of document.querySelectorAll("body *")) {
      const own = [...of.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
      const style = getComputedStyle(of);
      if (!own || !shown(of) || of.disabled || of.closest("svg, [aria-pressed='false'], option")) continue;
      const layers = [];
      for (let under = of; under; under = under.parentElement) layers.unshift(numbers(getComputedStyle(under).backgroundColor));
      const back = layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
      const [a, b] = [light(over(numbers(style.color), back)), light(back)].sort((x, y) => y - x);
      const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) found.push(`${((a + 0.05) / (b + 0.05)).toFixed(2)}: ${said(of)}`);
    }
    return found;
  }

  /** How many controls the Tab key has to reach: of radio buttons with one name, one. */
  function reachable() {
    return [...document.querySelectorAll(CONTROLS)].filter((of) => shown(of) && !of.disabled && of.tabIndex >= 0 && (of.type !== "radio" || of.checked));
  }

  const seen = new Set();

  /** What has the focus: "" for nothing, and else what is wrong with it, or "good". */
  function focused() {
    const of = document.activeElement;
    if (!of || of === document.body) return "";
    seen.add(of);
    const style = getComputedStyle(of);
    if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) === 0) return `no outline: ${said(of)}`;
    const box = of.getBoundingClientRect();
    const [left, right] = [Math.max(0, box.left), Math.min(innerWidth, box.right)];
    const [top, bottom] = [Math.max(0, box.top), Math.min(innerHeight, box.bottom)];
    if (right <= left || bottom <= top) return `out of sight: ${said(of)}`;
    for (const across of [0.05, 0.5, 0.95]) {
      for (const down of [0.05, 0.5, 0.95]) {
        const there = document.elementFromPoint(left + across * (right - left), top + down * (bottom - top));
        if (there && (of.contains(there) || there.contains(of) || [...(of.labels ?? [])].some((label) => label.contains(there)))) return "good";
      }
    }
    return `covered: ${said(of)}`;
  }

  /** What Tab has not reached so far. */
  function unreached() {
    return reachable().filter((of) => !seen.has(of)).map(said);
  }

  /** What a text has become that should have stayed a text: markup that runs, or characters that nobody sees. */
  function harm() {
    const markup = [...document.querySelectorAll("main *, header *, .trouble *, title *")]
      .filter((of) => /^(script|iframe|img|object|embed|style|link|meta|base|form)$/.test(of.localName) && of.className !== "filters")
      .concat([...document.querySelectorAll("[onerror], [onclick], [onload], [href^='javascript:' i]")]);
    // eslint-disable-next-line no-control-regex
    const unseen = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/;
    const texts = [["title", document.title], ["page", document.body.textContent.replace(document.getElementById("written")?.textContent ?? "", "")]];
    for (const of of document.querySelectorAll("[title], [aria-label]")) texts.push([said(of), `${of.title} ${of.ariaLabel}`]);
    return [...markup.map(said), ...texts.filter(([, text]) => unseen.test(text)).map(([where]) => `characters in ${where}`)];
  }

  return { unnamed, tooWide, faint, focused, unreached, harm };
})();
