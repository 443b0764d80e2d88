// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Format a size: "0 B", "512 KiB", "12.3 GiB". */
export function bytes(size) {
  if (size === undefined) return "–";
  let value = size;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : 1;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** Format a ratio: "93%", "0.4%". */
export function percent(ratio) {
  if (ratio === undefined) return "–";
  const value = ratio * 100;
  return `${value.toFixed(value > 0 && value < 1 ? 1 : 0)}%`;
}

/** Format a fragmentation index: "0.84". It is never rounded up to 1, as in `format_index` (sizes.py). */
export function ratio(value) {
  if (value === undefined) return "–";
  const hundredths = Math.floor(value * 100 + 0.5);
  return ((value < 1 ? Math.min(hundredths, 99) : hundredths) / 100).toFixed(2);
}

/** Format a number with separators: "12,345". */
export function count(number) {
  return number === undefined ? "–" : number.toLocaleString("en-US");
}

/** Format a duration: "0.3 s", "42 s", "4 min 50 s", "2 h 10 min". */
export function duration(seconds) {
  if (seconds === undefined) return "–";
  const known = Math.max(0, seconds);
  if (known < 10) return `${known.toFixed(1)} s`;
  if (known < 60) return `${Math.floor(known)} s`;
  if (known < 3600) return `${Math.floor(known / 60)} min ${Math.floor(known % 60)} s`;
  return `${Math.floor(known / 3600)} h ${Math.floor((known % 3600) / 60)} min`;
}

/** Format how long ago a time was: "just now", "42 s ago". */
export function ago(seconds) {
  return seconds < 2 ? "just now" : `${duration(Math.floor(seconds))} ago`;
}

/** Return the noun in the right number: "1 rank", "2 ranks". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Return the time of day of a time in milliseconds: "14:03:12". */
export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
