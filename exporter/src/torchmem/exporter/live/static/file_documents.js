// JSON files that torchmem writes: OOM reports, and the results of preflight and what-if.

import { color, style } from "./colors.js";
import { el } from "./dom.js";
import { lineChart } from "./file_charts.js";
import { bytes, count } from "./format.js";
import { oomSection } from "./oom.js";
import { facts as factsList } from "./words.js";

const size = (value) => (Number.isFinite(value) ? bytes(value) : "–");
const words = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const numbers = (value) => list(value).map((item) => (Number.isFinite(item) ? item : null));

/** Return whether this is a document of torchmem. */
export function isDocument(found) {
  const isReport = found?.oom?.cause && found.process && found.device;
  return Boolean(isReport || (found?.verdict && (found.phantom === true || list(found.outcomes).length)));
}

/** Draw a document, whose JSON is `text`, into `section`. Throws an Error, with a sentence, for one that is not known. */
export async function showDocument(section, found, text) {
  if (found?.oom?.cause && found.process && found.device) await oomReport(section, text);
  else if (found?.phantom === true && found.verdict) preflight(section, found);
  else if (list(found?.outcomes).length && found.verdict) whatIf(section, found);
  else {
    throw new Error("The file is JSON, but neither an OOM report (.oom.json) nor the output of " +
      "preflight --json or whatif --json.");
  }
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value && value !== "–");
  return factsList(known.map(([subject, text]) => ({ subject, text })));
}

/** Show an OOM report in the exporter's words: the code that explains it is the one of `torchmem why`. */
async function oomReport(section, text) {
  const words = await explained(text);
  section.append(
    el("div", { class: "why" },
      el("div", { class: "why-main" }, oomSection(words, "h3")),
      el("div", {}, el("h3", {}, "Details"), factsList(
        [...words.about.map((line, at) => ({ subject: at ? "" : "process", text: line })), ...(words.facts ?? [])]))));
}

async function explained(text) {
  const answer = await fetch("api/v1/oom", { method: "POST", body: text, headers: { "Content-Type": "application/json" } })
    .catch(() => { throw new Error("The exporter, which explains OOM reports, does not respond. In a terminal, torchmem why FILE says the same."); });
  if (answer.ok) return answer.json();
  const problem = await answer.text();
  let sentence = problem;
  try {
    sentence = JSON.parse(problem).error;
  } catch {
    // It is plain text.
  }
  throw new Error(sentence);
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
  section.append(table(["Settings", "Peak reserved", "Worst stranded", "Retries", "OOMs", "Allocator configuration"], rows));
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

function preflight(section, { verdict, outcome, comparison, command, gpu_model: gpu, notes, tries }) {
  section.append(el("p", { class: "map-summary" }, words(verdict.sentence)));
  section.append(facts([["Command", list(command).map(words).join(" ")], ["GPU", `${words(gpu?.name)} ${size(gpu?.memory_bytes)}`]]));
  for (const found of list(outcome?.devices)) preflightDevice(section, found);
  if (list(tries).length) {
    section.append(table(["Value", "Fits", "Steps"], tries.map((run) => [String(run.value), run.fits ? "yes" : "no", count(run.steps ?? 0)])));
  }
  if (comparison?.settings?.outcomes) settings(section, list(comparison.settings.outcomes));
  if (list(comparison?.gpu_models).length) {
    section.append(table(["GPU", "Fits", "Peak reserved", "Headroom"], comparison.gpu_models.map((row) => [
      words(row.gpu_model?.name), row.refused ? words(row.refused) : row.fits ? "yes" : "no", size(row.peak_reserved), size(row.headroom)])));
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
