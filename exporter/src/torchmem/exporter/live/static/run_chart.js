// The chart of a whole run: its memory over the steps, from the history that the process keeps.

import { color, style } from "./colors.js";
import { lineChart } from "./file_charts.js";
import { bytes, count, duration } from "./format.js";

const WHOLE_STEPS = [1, 2, 5].flatMap((digit) => [...Array(16).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
const X_FORMATS = {
  steps: (value) => `step ${count(value)}`,
  seconds: (value) => duration(value),
  before: (value) => (value < 0 ? `−${duration(-value)}` : "0 s"),
};

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
    max: top > 0 ? top * 1.12 : 1, heading, xSteps: unit === "steps" ? WHOLE_STEPS : undefined,
    marks: oom ? [{ x: x.at(-1), label: "out of memory", color: () => style("--alarm") }] : [],
  });
}
