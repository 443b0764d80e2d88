// Lines over the events of a recording or the steps of a run, drawn by uPlot.

import { onTheme, style } from "./colors.js";
import { el } from "./dom.js";

/* global uPlot */

const BYTE_STEPS = Array.from({ length: 45 }, (_, power) => 2 ** power);
const FONT = "11px system-ui, sans-serif";

/**
 * Draw lines over `x` into `element`. Each of `lines` has `label`, `values`, `color()`, and may have
 * `fill` and `dash`. `format` and `xFormat` write values; `onPick(index)` is called for a click.
 * `marks` are vertical lines with `x`, `label` and `color()`; `xSteps` are the steps of the axis;
 * `heading` is the element of the title.
 * Return a function that marks the point with an index.
 */
export function lineChart(element, { title, x, xFormat, lines, format, isBytes, max, height, onPick, marks = [], xSteps, heading = "h3" }) {
  const box = el("div", { class: "file-chart", role: "img", "aria-label": `${title}: ${described(lines, format)}` });
  const readout = el("p", { class: "file-readout number", "aria-hidden": "true" });
  element.append(el(heading, { class: "file-title" }, title), readout, box);
  let chart = null;

  const names = () => lineNames(lines.map(({ label, color, dash }) => ({ label, color: color(), dash })));

  function read(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.cursor.left < 0) {
      readout.replaceChildren(...names());
      return;
    }
    const values = names().map((name, index) => {
      const value = lines[index].values[at];
      name.append(` ${value === null || value === undefined ? "–" : format(value)}`);
      return name;
    });
    readout.replaceChildren(el("span", {}, xFormat(x[at])), ...values);
  }

  function axis(values, more = {}) {
    return { stroke: style("--soft"), font: FONT, ticks: { show: false }, values: (_, found) => found.map(values), ...more };
  }

  function drawMarks({ ctx, bbox, valToPos }) {
    for (const mark of marks) {
      const left = Math.round(valToPos(mark.x, "x", true));
      ctx.save();
      ctx.setLineDash([]);
      [ctx.strokeStyle, ctx.fillStyle, ctx.lineWidth] = [mark.color(), mark.color(), 1.5 * devicePixelRatio];
      ctx.font = `600 ${11 * devicePixelRatio}px system-ui, sans-serif`;
      [ctx.textAlign, ctx.textBaseline] = ["right", "top"];
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(mark.label, left - 6 * devicePixelRatio, bbox.top + 4 * devicePixelRatio);
      ctx.restore();
    }
  }

  function build() {
    chart?.destroy();
    chart = null;
    if (!box.clientWidth) return;
    const series = lines.map(({ color, fill, dash }) => ({
      stroke: color(), width: 1.5, dash, fill: fill ? `${color()}2e` : undefined, points: { show: x.length < 3 },
    }));
    chart = new uPlot({
      width: box.clientWidth, height, legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: { range: (_, __, high) => [0, max ?? (high > 0 ? high * 1.05 : 1)] } },
      axes: [
        axis(xFormat, { grid: { show: false }, size: 24, gap: 4, space: 90, ...(xSteps ? { incrs: xSteps } : {}) }),
        axis(format, { grid: { stroke: style("--line"), width: 1 }, size: 66, gap: 6, space: 30, ...(isBytes ? { incrs: BYTE_STEPS } : {}) }),
      ],
      series: [{}, ...series],
      hooks: { setCursor: [read], draw: [drawMarks] },
    }, [x, ...lines.map(({ values }) => values)], box);
    if (onPick) chart.over.addEventListener("click", () => chart.cursor.idx !== null && onPick(chart.cursor.idx));
    read(chart);
  }

  new ResizeObserver(() => {
    if (chart && box.clientWidth) chart.setSize({ width: box.clientWidth, height });
    else build();
  }).observe(box);
  const endTheme = onTheme(() => (box.isConnected ? build() : endTheme()));
  return (index) => chart?.setCursor({ left: chart.valToPos(x[index], "x"), top: 0 });
}

/** Return the name of each line behind a piece of it; `lines`: {label, color, dash} each. */
export function lineNames(lines) {
  return lines.map(({ label, color, dash }) => {
    const mark = el("i", { class: "line-mark" });
    mark.style.borderTopColor = color;
    if (dash) mark.style.borderTopStyle = dash[0] < dash[1] ? "dotted" : "dashed";
    return el("span", {}, mark, label);
  });
}

function described(lines, format) {
  return lines
    .map(({ label, values }) => {
      const known = values.filter((value) => value !== null && value !== undefined);
      return known.length ? `${label} up to ${format(Math.max(...known))}` : `${label} unknown`;
    })
    .join(", ");
}
