// JSON files that torchmem writes: OOM reports, and the results of preflight and what-if.

import { color, style } from "./colors.js";
import { el } from "./dom.js";
import { lineChart } from "./file_charts.js";
import { bytes, count, ratio } from "./format.js";

const CAUSES = {
  capacity: "the GPU is full of tensors", fragmentation: "free memory is in pieces", limit: "the memory limit was reached",
  external: "memory outside PyTorch", pending: "freed memory still waits for another stream", library: "a library outside PyTorch",
};

const size = (value) => (Number.isFinite(value) ? bytes(value) : "–");
const words = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const numbers = (value) => list(value).map((item) => (Number.isFinite(item) ? item : null));

/** Draw a document into `section`. Throws an Error, with a sentence, for one that is not known. */
export function showDocument(section, found) {
  if (found?.oom?.cause && found.process && found.device) oomReport(section, found);
  else if (found?.phantom === true && found.verdict) preflight(section, found);
  else if (list(found?.outcomes).length && found.verdict) whatIf(section, found);
  else {
    throw new Error("The file is JSON, but neither an OOM report (.oom.json) nor the output of " +
      "preflight --json or whatif --json.");
  }
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value && value !== "–");
  return el("dl", { class: "facts-list" }, ...known.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function oomReport(section, { process, device, oom, layout, layout_before: before, trend, driver_free_bytes: free, timestamp }) {
  const allocator = device.allocator ?? {};
  const total = (pools) => (pools ? (pools.small ?? 0) + (pools.large ?? 0) + (pools.undivided ?? 0) : NaN);
  const stranded = layout?.stranded_bytes;
  section.append(
    el("p", { class: "map-summary" }, `Rank ${process.rank} of ${words(process.run)} requested ${size(oom.requested_bytes)} and ` +
      `ran out of memory: ${CAUSES[oom.cause] ?? words(oom.cause)}.`),
    facts([
      ["Time", Number.isFinite(timestamp) ? new Date(timestamp * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : ""],
      ["Line", [words(oom.line), words(oom.function)].filter(Boolean).join(" in ")],
      ["GPU", `${words(device.name)} ${size(device.total_bytes)}`],
      ["Allocated", size(total(allocator.allocated_bytes))],
      ["Reserved", size(total(allocator.reserved_bytes))],
      ["Free at the driver", size(free)],
      ["Stranded, after the flush", size(stranded)],
      ["Stranded, before the flush", size(before?.stranded_bytes)],
      ["Largest free block", size(layout?.largest_free_block_bytes)],
    ]),
  );
  const held = Object.entries(device.components ?? {}).filter(([, value]) => Number.isFinite(value) && value > 0);
  if (held.length) {
    section.append(el("h3", { class: "file-title" }, "What held the memory"),
      facts(held.sort(([, a], [, b]) => b - a).map(([name, value]) => [name.replaceAll("_", " "), bytes(value)])));
  }
  const seconds = numbers(trend?.seconds).map((value) => -value);
  if (seconds.length > 1) {
    const charts = el("div", { class: "file-charts" });
    section.append(charts);
    lineChart(charts, {
      title: "The minutes before", x: seconds, xFormat: (value) => `${Math.round(value)} s`, format: bytes, isBytes: true, height: 190,
      lines: [
        { label: "reserved", values: numbers(trend.reserved_bytes), color: () => style("--soft") },
        { label: "allocated", values: numbers(trend.allocated_bytes), color: () => color("in_use"), fill: true },
        { label: "stranded", values: numbers(trend.stranded_bytes), color: () => color("stranded") },
        { label: "headroom", values: numbers(trend.headroom_bytes), color: () => style("--ink"), dash: [4, 3] },
      ],
    });
    lineChart(charts, {
      title: "Fragmentation index", x: seconds, xFormat: (value) => `${Math.round(value)} s`, format: (value) => ratio(value),
      max: 1, height: 110, lines: [{ label: "FI", values: numbers(trend.fragmentation_ratio), color: () => color("stranded") }],
    });
  }
  section.append(el("p", { class: "soft" }, "torchmem oom explains the report and says what to set."));
}

function table(head, rows) {
  const cells = (row, tag) => row.map((value, index) => el(index ? tag : "th", index ? { class: "number" } : { scope: "row" }, value));
  return el("div", { class: "file-table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row, "td"))))));
}

function whatIf(section, { device, verdict, outcomes, caveats }) {
  section.append(el("p", { class: "map-summary" }, `${Number.isInteger(device) ? `cuda:${device}: ` : ""}${words(verdict.sentence)}`));
  if (verdict.line) section.append(el("p", {}, el("code", {}, words(verdict.line))));
  settings(section, list(outcomes));
  for (const text of list(caveats).slice(0, 5)) section.append(el("p", { class: "soft" }, words(text)));
}

/** Draw what-if settings side by side: a table, and the reserved and stranded bytes of each. */
function settings(section, found) {
  const outcomes = found.filter((outcome) => outcome && typeof outcome === "object");
  const rows = outcomes.map((outcome) => outcome.refused
    ? [words(outcome.name), "–", "–", "–", "–", words(outcome.refused)]
    : [words(outcome.name), size(outcome.peak_reserved), size(outcome.worst_stranded), count(outcome.retries ?? 0),
      count(outcome.ooms ?? 0), words(outcome.conf) || "default"]);
  section.append(table(["Settings", "Peak reserved", "Worst stranded", "Retries", "OOMs", "PYTORCH_CUDA_ALLOC_CONF"], rows));
  const drawn = outcomes.filter(({ timeline }) => numbers(timeline?.event).length > 1);
  const top = Math.max(1, ...drawn.flatMap(({ timeline }) => numbers(timeline.reserved)));
  const charts = el("div", { class: "file-side-by-side" });
  section.append(charts);
  for (const { name, timeline } of drawn) {
    const box = el("div", {});
    charts.append(box);
    lineChart(box, {
      title: words(name), x: numbers(timeline.event), xFormat: (value) => count(value), format: bytes, isBytes: true, height: 150, max: top * 1.05,
      lines: [
        { label: "reserved", values: numbers(timeline.reserved), color: () => style("--soft") },
        { label: "allocated", values: numbers(timeline.allocated), color: () => color("in_use"), fill: true },
        { label: "stranded", values: numbers(timeline.stranded), color: () => color("stranded") },
      ],
    });
  }
}

function preflight(section, { verdict, outcome, comparison, command, card, notes, tries }) {
  section.append(el("p", { class: "map-summary" }, words(verdict.sentence)));
  section.append(facts([["Command", list(command).map(words).join(" ")], ["GPU", `${words(card?.name)} ${size(card?.bytes ?? card?.total_bytes)}`]]));
  for (const found of list(outcome?.devices)) preflightDevice(section, found);
  if (list(tries).length) {
    section.append(table(["Value", "Fits", "Steps"], tries.map((run) => [String(run.value), run.fits ? "yes" : "no", count(run.steps ?? 0)])));
  }
  if (comparison?.settings?.outcomes) settings(section, list(comparison.settings.outcomes));
  if (list(comparison?.cards).length) {
    section.append(table(["GPU", "Fits", "Peak reserved", "Headroom"], comparison.cards.map((row) => [
      words(row.card?.name), row.refused ? words(row.refused) : row.fits ? "yes" : "no", size(row.peak_reserved), size(row.headroom)])));
  }
  for (const text of list(notes).slice(0, 5)) section.append(el("p", { class: "soft" }, words(text)));
}

function preflightDevice(section, found) {
  section.append(facts([
    [`cuda:${found.device}`, size(found.total)], ["Peak allocated", `${size(found.peak_allocated)} in ${words(found.peak_phase)}`],
    ["Peak reserved", size(found.peak_reserved)], ["Stranded at most", size(found.stranded)], ["Headroom", size(found.headroom)],
    ["Retries", count(found.retries ?? 0)],
  ]));
  const steps = numbers(found.steps?.step);
  if (steps.length < 2) return;
  const charts = el("div", { class: "file-charts" });
  section.append(charts);
  lineChart(charts, {
    title: "By step", x: steps, xFormat: (value) => `step ${value}`, format: bytes, isBytes: true, height: 170,
    lines: [
      { label: "peak reserved", values: numbers(found.steps.peak_reserved), color: () => style("--soft") },
      { label: "peak allocated", values: numbers(found.steps.peak_allocated), color: () => color("in_use"), fill: true },
      { label: "allocated at the end", values: numbers(found.steps.allocated), color: () => color("stranded") },
    ],
  });
}
