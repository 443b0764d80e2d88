// The chart of a whole run: its memory over the steps, from the history that the process keeps.

import { color, style } from "./colors.js";
import { lineChart } from "./file_charts.js";
import { bytes, count, duration } from "./format.js";

const WHOLE_STEPS = [1, 2, 5].flatMap((digit) => [...Array(16).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
const WHOLE_SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];
const X_STEPS = { steps: WHOLE_STEPS, seconds: WHOLE_SECONDS, before: WHOLE_SECONDS };
const X_FORMATS = {
  steps: (value) => `step ${count(value)}`,
  seconds: (value) => whole(value),
  before: (value) => (value < 0 ? `−${whole(-value)}` : "0 s"),
};

/** Return a time without a fraction if it has none, as on the axis: "0 s", "5 s", "1 min 30 s". */
function whole(seconds) {
  if (Number.isInteger(seconds) && seconds < 60) return `${seconds} s`;
  return duration(seconds).replace(/ 0 (s|min)$/, "");
}

/** Draw the memory of a whole run into `section`, and return what marks a point; see explain/run_chart.py. */
export function drawRun(section, { title, unit, x, lines, total, oom }, { height = 260, heading = "h2" } = {}) {
  const named = (name) => (name.startsWith("--") ? style(name) : color(name));
  const all = lines.map(({ label, color: name, values, fill, dash }) => ({
    label, values, fill, color: () => named(name), dash: dash ? [4, 3] : undefined,
  }));
  if (total) all.push({ label: "the GPU's memory", values: x.map(() => total), color: () => style("--soft"), dash: [2, 3] });
  const top = Math.max(...all.flatMap(({ values }) => values).filter(Number.isFinite));
  return lineChart(section, {
    title, x, lines: all, xFormat: X_FORMATS[unit], format: bytes, isBytes: true, height,
    max: top > 0 ? top * 1.12 : 1, heading, xSteps: X_STEPS[unit],
    marks: oom ? [{ x: x.at(-1), label: "out of memory", color: () => style("--alarm") }] : [],
  });
}
