// Figures as an engineer reads them: aligned, rounded to what matters, and a dash where there is none.

export const NONE = "\u2013";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function loss(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-4 && size > 0)) return value.toExponential(2);
  if (size >= 100) return value.toFixed(1);
  return size >= 1e-3 || !size ? value.toFixed(4) : value.toPrecision(2);
}

// The labels of an axis, all written alike: with the same decimals, or with an exponent.
export function axisTicks(ticks, log = false) {
  const sizes = ticks.filter((tick) => tick).map(Math.abs);
  const most = Math.max(...sizes);
  const powers = sizes.length > 0 && (most >= 1e6 || (log ? Math.min(...sizes) : most) < 1e-3);
  const power = powers ? Math.floor(Math.log10(most) + 1e-9) : 0;
  const scaled = (tick) => Number((tick / 10 ** power).toPrecision(6));
  const decimals = Math.max(0, ...sizes.map((size) => (String(scaled(size)).split(".")[1] ?? "").length));
  return ticks.map((tick) => {
    if (!isNumber(tick)) return "";
    if (!tick) return "0";
    const round = Number(tick.toPrecision(4));
    if (log) return powers ? round.toExponential().replace("e+", "e") : String(round);
    return scaled(tick).toFixed(decimals) + (powers ? `e${power}` : "");
  });
}

export function short(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  const rounded = Number(value.toPrecision(4));
  return size >= 1e5 || (size < 1e-3 && size > 0) ? rounded.toExponential().replace("e+", "e") : String(rounded);
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }); // made once: making it is what takes time

export function count(value) {
  return isNumber(value) ? WHOLE.format(Math.round(value)) : NONE;
}

export function percent(value) {
  return isNumber(value) ? `${(100 * value).toFixed(1)}%` : NONE;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  if (value < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let scaled = value / 1024;
  while (scaled >= 1024 && units.length > 1) {
    scaled /= 1024;
    units.shift();
  }
  return `${scaled.toFixed(1)} ${units[0]}`;
}

export function milliseconds(value) {
  if (!isNumber(value)) return NONE;
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(2) : value.toFixed(3);
}

export function duration(seconds) {
  if (!isNumber(seconds) || seconds < 0) return NONE;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function ago(time, now = Date.now() / 1000) {
  if (!isNumber(time)) return NONE;
  const seconds = Math.max(0, now - time);
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return seconds < 30 * 86400 ? `${Math.round(seconds / 86400)} d ago` : date(time);
}

export function date(time) {
  if (!isNumber(time)) return NONE;
  const at = new Date(time * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

// A word of a command line that a shell reads as one.
export function shellWord(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}

export function setting(value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : short(value);
  if (Array.isArray(value)) return value.length ? value.map(setting).join(", ") : NONE;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
