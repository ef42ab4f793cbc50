// Numbers and times in words, as the terminal says them.

/** What curves are drawn over, and what places on it are counted in. */
export const AXES = { step: "training steps", tokens: "tokens generated", samples: "rollouts trained (of agents: episodes)", time: "seconds in steps" };

const DASH = "–";

export function decimal(value, digits = 3) {
  return value === null || value === undefined || !Number.isFinite(value) ? DASH : value.toFixed(digits);
}

/** As many digits as tell something. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2);
  if (Number.isInteger(value)) return size < 10000 ? String(value) : count(value);
  return size >= 10000 ? count(value) : String(Number(value.toPrecision(4)));
}

/** 1234567 as 1.23M. */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  for (const [limit, unit, by] of [[1e12, "T", 1e12], [1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]]) {
    if (Math.abs(value) >= limit) return `${Number((value / by).toPrecision(3))}${unit}`;
  }
  return Math.round(value).toLocaleString("en");
}

export function percent(share) {
  return share === null || share === undefined || !Number.isFinite(share) ? DASH : `${(100 * share).toFixed(share !== 0 && Math.abs(share) < 0.1 ? 1 : 0)}%`;
}

/** 75 as 1:15, 4000 as 1:06:40; below a minute with as many digits as `resolution` (seconds) shows. */
export function duration(seconds, resolution = 1) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  if (resolution < 1) {
    const digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(resolution))));
    const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
    const rest = (seconds - 60 * minutes).toFixed(digits);
    if (!minutes) return `${rest} s`;
    return `${hours ? `${hours}:${String(minutes % 60).padStart(2, "0")}` : minutes}:${rest.padStart(digits ? digits + 3 : 2, "0")}`;
  }
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** Policy versions of a rollout: "3", "3 to 5", or a dash where nothing was sampled. */
export function versions(oldest, newest) {
  if (newest === null) return DASH;
  return oldest === newest ? String(newest) : `${oldest} to ${newest}`;
}

// Controls; what has no shape of its own; variation selectors, but for the one that makes an emoji of the sign before it.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u2028\u2029\u2800\ufff9-\ufffb]|(?!\ufe0f)[\p{Cf}\p{Default_Ignorable_Code_Point}]|(?<!\p{Emoji})\ufe0f/gu;

/** What stands for characters that are not seen, or that turn the reading order around: in a text that is shown. */
export function visible(text) {
  return text.replace(UNSEEN, (of) => {
    const code = of.codePointAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `\u27e8${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

/** The content of a message: a text, or parts of texts and images. */
export function saidIn(content) {
  if (!Array.isArray(content)) return typeof content === "string" ? content : JSON.stringify(content, null, 2);
  return content.map((part) => (part?.type === "text" ? String(part.text) : `[image: ${String(part?.image).split("/").pop()}]`)).join("");
}

/** Names as one value of an address, as query.py reads them. */
export function listed(names) {
  return names.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
}

export function namesIn(text) {
  return (text ?? "").split(",").filter(Boolean).map((name) => name.replaceAll("%2C", ",").replaceAll("%25", "%"));
}
