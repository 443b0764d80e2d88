// A rank now: what its memory consists of, its numbers, and their last ten minutes.

import { labelOf, swatch } from "./bar.js";
import { createChart } from "./charts.js";
import { el, setText } from "./dom.js";
import { ago, bytes, count, duration, percent, ratio } from "./format.js";
import { RANK_FIELDS, ofRank } from "./history.js";

const HEIGHT = 150;

/** Draw the rank into `element` until `unmount`. */
export function mount(element, first) {
  const parts = el("tbody");
  const facts = el("dl", { class: "facts-list" });
  const memory = el("div");
  const fragmentation = el("div");
  element.append(
    el("div", { class: "columns" },
      el("div", {}, el("h4", {}, "What it holds"), table(parts)),
      el("div", {}, el("h4", {}, "Numbers"), facts),
      el("div", { class: "wide" },
        el("h4", {}, "Memory, last ten minutes"), memory,
        el("h4", {}, "Fragmentation index"), fragmentation),
    ),
  );
  const charts = [
    createChart(memory, {
      height: HEIGHT, format: bytes, label: "Allocated and reserved memory and headroom over the last ten minutes",
      series: [
        { label: "allocated", color: "in_use" },
        { label: "reserved", color: "--ink", dash: [4, 3] },
        { label: "headroom", color: "free" },
      ],
    }),
    createChart(fragmentation, {
      height: 90, format: ratio, isBytes: false, max: () => 1, label: "Fragmentation index over the last ten minutes",
      series: [{ label: "FI", color: "stranded" }],
    }),
  ];

  function update(rank) {
    parts.replaceChildren(...rowsOf(rank));
    facts.replaceChildren(...factsOf(rank).flatMap(([name, text]) => [el("dt", {}, name), el("dd", { class: "number" }, text)]));
    const columns = ofRank(rank.gpu, rank);
    const column = (field) => columns[1 + RANK_FIELDS.indexOf(field)];
    if (!columns) return;
    charts[0].update([columns[0], column("allocated_bytes"), column("reserved_bytes"), column("headroom_flush_bytes")]);
    charts[1].update([columns[0], column("fragmentation_ratio")]);
  }

  update(first);
  return { update, unmount: () => charts.forEach((chart) => chart.remove()) };
}

function table(body) {
  return el(
    "table", { class: "parts" },
    el("thead", { class: "hidden" }, el("tr", {}, ...["Part", "Bytes", "Share of the GPU"].map((name) => el("th", { scope: "col" }, name)))),
    body,
  );
}

function rowsOf(rank) {
  const total = rank.gpu.total_bytes;
  return (rank.parts ?? []).map((part) => el(
    "tr", {},
    el("th", { scope: "row" }, swatch(part.name), labelOf(part)),
    el("td", { class: "number" }, bytes(part.bytes)),
    el("td", { class: "number soft" }, total ? percent(part.bytes / total) : ""),
  ));
}

function factsOf(rank) {
  const ooms = Object.entries(rank.ooms ?? {}).map(([cause, number]) => `${count(number)} ${cause}`);
  const headroom = rank.headroom_bytes === undefined ? undefined
    : `${bytes(rank.headroom_flush_bytes)}, ${bytes(rank.headroom_bytes)} without a flush`;
  const facts = [
    ["largest request", headroom],
    ["fragmentation", rank.fragmentation_ratio === undefined ? undefined : `${ratio(rank.fragmentation_ratio)}, largest free block ${bytes(rank.largest_free_block_bytes)}`],
    ["peaks", rank.allocated_peak_bytes === undefined ? undefined : `${bytes(rank.allocated_peak_bytes)} allocated, ${bytes(rank.reserved_peak_bytes)} reserved`],
    ["retries", rank.alloc_retries === undefined ? undefined : count(rank.alloc_retries)],
    ["OOMs", rank.ooms ? ooms.join(", ") || "none" : undefined],
    ["steps", rank.steps === undefined ? undefined : `${count(rank.steps)}${rank.step_seconds ? `, ${duration(rank.step_seconds)} each` : ""}`],
    ["process", `pid ${rank.pid}${rank.uid === undefined ? "" : `, user ID ${rank.uid}`}`],
    ["script", rank.script],
    ["published", ago(rank.gpu.time - rank.sample_time)],
  ];
  return facts.filter(([, text]) => text !== undefined);
}
