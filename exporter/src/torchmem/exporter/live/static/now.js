// A rank now: what its memory consists of, its numbers, and their last ten minutes.

import { createChart } from "./charts.js";
import { el, setText } from "./dom.js";
import { ago, bytes, count, duration, ratio } from "./format.js";
import { RANK_FIELDS, ofRank } from "./history.js";
import { partRows, partsTable } from "./parts_table.js";
import { drawRun } from "./run_chart.js";

const HEIGHT = 150;
const RUN_MILLISECONDS = 10000;

/** Draw the rank into `element` until `unmount`. */
export function mount(element, first) {
  const parts = el("tbody");
  const facts = el("dl", { class: "facts-list" });
  const memory = el("div");
  const fragmentation = el("div");
  const run = el("div", { class: "file-section whole-run" });
  element.append(
    el("div", { class: "columns" },
      el("div", {}, el("h4", {}, "What it holds"), partsTable(parts)),
      el("div", {}, el("h4", {}, "Numbers"), facts),
      el("div", { class: "wide" },
        el("h4", {}, "Memory, last ten minutes"), memory,
        el("h4", {}, "Fragmentation index"), fragmentation, run),
    ),
  );
  const charts = [
    createChart(memory, {
      height: HEIGHT, format: bytes, label: "Memory of tensors, reserved memory and headroom over the last ten minutes",
      series: [
        { label: "tensors", color: "in_use" },
        { label: "reserved", color: "--ink", dash: [4, 3] },
        { label: "headroom", color: "free" },
      ],
    }),
    createChart(fragmentation, {
      height: 90, format: ratio, isBytes: false, max: () => 1, label: "Fragmentation index over the last ten minutes",
      series: [{ label: "FI", color: "stranded" }],
    }),
  ];

  const ending = new AbortController();
  let askedAt = -Infinity;
  let shown;

  /** Ask for the history that the process keeps, which spans its whole run, and draw it. */
  async function askForRun(rank) {
    if (performance.now() - askedAt < RUN_MILLISECONDS) return;
    askedAt = performance.now();
    const query = new URLSearchParams({ id: rank.id, gpu: rank.gpu.uuid });
    try {
      const answer = await fetch(`api/v1/rank?${query}`, { cache: "no-store", signal: ending.signal });
      if (answer.ok) draw((await answer.json()).run);
    } catch {
      // The next update asks again.
    }
  }

  function draw(chart) {
    const text = JSON.stringify(chart);
    if (text === shown) return;
    shown = text;
    run.replaceChildren();
    if (chart) drawRun(run, chart, { height: HEIGHT, heading: "h4" });
  }

  function update(rank) {
    askForRun(rank);
    parts.replaceChildren(...partRows(rank.parts ?? [], rank.gpu.total_bytes));
    facts.replaceChildren(...factsOf(rank).flatMap(([name, text]) => [el("dt", {}, name), el("dd", { class: "number" }, text)]));
    const columns = ofRank(rank.gpu, rank);
    const column = (field) => columns[1 + RANK_FIELDS.indexOf(field)];
    if (!columns) return;
    charts[0].update([columns[0], column("tensor_bytes"), column("reserved_bytes"), column("headroom_flush_bytes")]);
    charts[1].update([columns[0], column("fragmentation_ratio")]);
  }

  update(first);
  return { update, unmount };

  function unmount() {
    ending.abort();
    charts.forEach((chart) => chart.remove());
  }
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
    ["statistics", rank.stats_time === undefined ? undefined : ago(rank.gpu.time - rank.stats_time)],
    ["snapshot", rank.snapshot_time === undefined ? undefined : `${ago(rank.gpu.time - rank.snapshot_time)}, for fragmentation and stranded memory`],
  ];
  return facts.filter(([, text]) => text !== undefined);
}
