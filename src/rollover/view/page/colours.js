// Colours: of the theme from the style sheet, and of policy versions, where neighbours are told apart.

const SWITCH = "rollover.theme";

/** The value of a custom property of page.css. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
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
  if (version < 0) return `hsl(0 0% 60% / ${alpha})`;
  // Light enough for dark letters on it, in either theme; versions that are eight apart differ in lightness, too.
  return `hsl(${versionHue(version).toFixed(1)} 62% ${[66, 58, 74][Math.floor(version / 8) % 3]}% / ${alpha})`;
}

/** Behind a text. */
export function versionBackground(version) {
  return `hsl(${versionHue(version).toFixed(1)} 65% ${isDark() ? 24 : 89}%)`;
}

const LINES = ["line1", "line2", "line3", "line4", "line5", "line6", "line7", "line8"];

export function lineColour(number) {
  return themed(LINES[number % LINES.length]);
}
