// Colours: of the theme from the style sheet, and of policy versions, where neighbours are told apart.

const SWITCH = "rollover.theme";

/** The value of a custom property of page.css. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** "" follows the system. */
export function chooseTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  try {
    localStorage.setItem(SWITCH, theme);
  } catch {
    // A page from a disk may have no storage.
  }
}

export function rememberedTheme() {
  try {
    return localStorage.getItem(SWITCH) ?? "";
  } catch {
    return "";
  }
}

// The golden angle around the wheel: no two versions within thirteen of each other look alike, and none has two colours.
export function versionHue(version) {
  return (version * 137.508 + 210) % 360;
}

export function versionColour(version, alpha = 1) {
  if (version < 0) return `oklch(68% 0 0 / ${alpha})`;
  // Light enough for dark letters on it, whatever the hue, in either theme; versions that are eight apart differ in lightness, too.
  return `oklch(${[74, 66, 82][Math.floor(version / 8) % 3]}% 0.13 ${versionHue(version).toFixed(1)} / ${alpha})`;
}

/** Behind a text: the style sheet knows how light that is in the theme of the moment, and on paper. */
export function versionBackground(version) {
  return `oklch(var(--behind) 0.055 ${versionHue(version).toFixed(1)})`;
}

const LINES = ["line1", "line2", "line3", "line4", "line5", "line6", "line7", "line8"];

export function lineColour(number) {
  return themed(LINES[number % LINES.length]);
}
