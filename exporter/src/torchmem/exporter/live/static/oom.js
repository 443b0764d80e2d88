// An OOM report in the exporter's words, which are those of `torchmem why`.

import { createBar } from "./bar.js";
import { el } from "./dom.js";
import { bytes } from "./format.js";
import { partRows, partsTable } from "./parts_table.js";
import { drawRun } from "./run_chart.js";
import { adviceList, listing } from "./words.js";

const CHART_HEIGHT = 190;

/** Return a report as a section; `heading` is the element of its titles. */
export function oomSection(report, heading = "h4") {
  const titled = (title, ...content) => el("section", {}, el(heading, {}, title), ...content);
  const charts = el("div", { class: "file-section" });
  const section = el("section", { class: "oom" },
    el(heading, {}, `OutOfMemoryError at ${timeOf(report)}`),
    el("p", { class: "lead" }, `${report.summary}.`),
    el("p", {}, report.reason),
    report.before ? el("p", { class: "soft" }, report.before) : null,
    report.advice?.length ? titled("What to do, most promising first", adviceList(report.advice)) : null,
    report.parts?.length && report.total_bytes ? titled(`Memory of the GPU at that time (${bytes(report.total_bytes)})`, ...memory(report)) : null,
    report.charts?.length ? charts : null,
    ...(report.listings ?? []).map(({ title, lines }) => titled(title, listing(lines))),
    report.hidden ? hidden() : null);
  for (const chart of report.charts ?? []) drawRun(charts, chart, { height: CHART_HEIGHT, heading });
  return section;
}

function timeOf(report) {
  return new Date(report.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
}

function memory({ parts, total_bytes: total }) {
  const bar = createBar("rank-bar");
  bar.update(parts, total);
  return [bar.element, partsTable(el("tbody", {}, partRows(parts, total)))];
}

function hidden() {
  return el("p", { class: "soft" },
    "Only the rank's own user can see its lines, tensors and call stack: open this page on the node as that user, run ",
    el("code", {}, "torchmem why"), ", or set passwords for this page.");
}
