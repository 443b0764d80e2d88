// Lines and areas over the last ten minutes, drawn by uPlot.

import { el } from "./dom.js";
import { color, onTheme, style } from "./colors.js";
import { lineNames } from "./file_charts.js";
import { SECONDS } from "./history.js";

/* global uPlot */

const BYTE_STEPS = Array.from({ length: 45 }, (_, power) => 2 ** power);
const AXIS_FONT = "11px system-ui, sans-serif";

/**
 * Draw a chart into `element` and return {update(columns), remove()}.
 *
 * `series`: {label, color, width?, dash?} each, where `color` names a part or a custom property; `stacked`: fill
 * areas, the first at the bottom; `isBytes`: the axis has steps of powers of two; `max`: the top of the scale if it is fixed; `format(value)`: for
 * the axis and the values under the pointer; `height`: in pixels, by default that of the element; `label`: what a screen reader calls the chart.
 * Lines are named above the chart if there are several.
 */
export function createChart(element, { series, stacked = false, max, format, isBytes = true, height, label, axes = true }) {
  element.classList.add("chart");
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", label);
  const readout = el("p", { class: "readout number", "aria-hidden": "true" });
  const names = el("p", { class: "line-names", "aria-hidden": "true", hidden: stacked || series.length < 2 });
  element.before(names);
  let columns = null;
  let chart = null;
  let isVisible = true;

  function build() {
    chart?.destroy();
    chart = null;
    if (!columns || !element.clientWidth) return;
    names.replaceChildren(...lineNames(series.map((line) => ({ ...line, color: strokeOf(line) }))));
    chart = new uPlot(options(), shown(), element);
    element.append(readout);
  }

  function tall() {
    return height ?? element.clientHeight;
  }

  function options() {
    return {
      width: element.clientWidth,
      height: tall(),
      padding: axes ? [8, 4, 0, 0] : [2, 0, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: {
        x: { time: true, range: (_, first, last) => [last - shownSeconds(last - first), last] },
        y: { range: (_, low, high) => [0, max?.() ?? niceTop(high)] },
      },
      axes: axes ? [timeAxis(), valueAxis(format, isBytes)] : [{ show: false }, { show: false }],
      series: [{}, ...drawnSeries()],
      hooks: { setCursor: [read] },
    };
  }

  function drawnSeries() {
    const drawn = series.map((line) => {
      const stroke = strokeOf(line);
      return stacked
        ? { fill: stroke, stroke, width: 0, points: { show: false } }
        : { stroke, width: line.width ?? 1.75, dash: line.dash, points: { show: false } };
    });
    return stacked ? drawn.reverse() : drawn;
  }

  /** Stack from the bottom; the highest sum is drawn first, behind the others. */
  function shown() {
    if (!stacked) return columns;
    const [times, ...values] = columns;
    let below = times.map((_, at) => (values.some((column) => column[at] !== null) ? 0 : null));
    const sums = values.map((column) => (below = column.map((value, at) => (below[at] === null ? null : below[at] + (value ?? 0)))));
    return [times, ...sums.reverse()];
  }

  function read(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.cursor.left < 0) {
      readout.textContent = "";
      return;
    }
    const time = new Date(columns[0][at] * 1000).toLocaleTimeString([], { hourCycle: "h23" });
    const values = series
      .map((line, index) => [line.label, columns[index + 1][at]])
      .filter(([, value]) => value !== null)
      .map(([name, value]) => `${name} ${format(value)}`);
    readout.textContent = [time, ...values].join("  ·  ");
  }

  const resizing = new ResizeObserver(() => {
    if (chart && element.clientWidth) chart.setSize({ width: element.clientWidth, height: tall() });
    else build();
  });
  resizing.observe(element);
  const scrolling = new IntersectionObserver((entries) => {
    isVisible = entries.at(-1).isIntersecting;
    if (isVisible && chart) chart.setData(shown());
  }, { rootMargin: "200px" });
  scrolling.observe(element);
  const endTheme = onTheme(build);
  return {
    update(next) {
      columns = next;
      if (!chart) build();
      else if (isVisible) chart.setData(shown());
    },
    remove() {
      resizing.disconnect();
      scrolling.disconnect();
      endTheme();
      chart?.destroy();
    },
  };
}

function strokeOf({ color: name }) {
  return name.startsWith("--") ? style(name) : color(name);
}

/** Return the length of the scale: as long as the known past, within bounds. */
function shownSeconds(known) {
  return Math.min(SECONDS, Math.max(60, known || 0));
}

function niceTop(high) {
  return high > 0 ? high * 1.1 : 1;
}

function timeAxis() {
  return {
    stroke: style("--soft"), font: AXIS_FONT, size: 24, gap: 4,
    grid: { show: false }, ticks: { show: false }, space: 90,
    values: (_, times) => times.map((time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" })),
  };
}

function valueAxis(format, isBytes) {
  return {
    ...(isBytes ? { incrs: BYTE_STEPS } : {}),
    stroke: style("--soft"), font: AXIS_FONT, size: 62, gap: 6, space: 32,
    grid: { stroke: style("--line"), width: 1 }, ticks: { show: false },
    values: (_, values) => values.map((value) => format(value)),
  };
}
