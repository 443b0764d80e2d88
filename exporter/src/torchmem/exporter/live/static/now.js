// A rank now: what its memory consists of, its numbers, and their last ten minutes.

import { createChart } from "./charts.js";
import { asked, el, onChange, setText } from "./dom.js";
import { ago, bytes, count, duration, ratio } from "./format.js";
import { isLive } from "./history.js";
import { partRows, partsTable } from "./parts_table.js";
import { drawRun } from "./run_chart.js";

const HEIGHT = 150;
const RUN_MILLISECONDS = 10000;
const HISTORY_MILLISECONDS = 2000;
const MEMORY = ["tensor_bytes", "reserved_bytes", "headroom_flush_bytes"];

/** Draw the rank into `element` until `unmount`. */
export function mount(element, first) {
  const parts = el("tbody");
  const facts = el("dl", { class: "facts-list" });
  const memory = el("div");
  const fragmentation = el("div");
  const title = el("h4");
  const holds = el("h4");
  const past = el("div", { hidden: true }, title, memory, el("h4", {}, "Fragmentation index"), fragmentation);
  const none = el("p", { class: "soft", hidden: true }, "The exporter has no history of this rank's last minutes yet: it keeps what it has seen of a rank that runs.");
  const run = el("div", { class: "file-section whole-run" });
  element.append(
    el("div", { class: "columns" },
      el("div", {}, holds, partsTable(parts)),
      el("div", {}, el("h4", {}, "Numbers"), facts),
      el("div", { class: "wide" },
        none, past, run),
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
      series: [{ label: "fragmentation index", color: "stranded" }],
    }),
  ];

  const ending = new AbortController();
  const ask = every(HISTORY_MILLISECONDS, (query) => asked(`api/v1/history?${query}`, ending.signal), drawHistory);
  const askForRun = every(RUN_MILLISECONDS, (query) => asked(`api/v1/rank?${query}`, ending.signal), (words) => drawWhole(words.run));
  const drawWhole = onChange((chart) => {
    run.replaceChildren();
    if (chart) drawRun(run, chart, { height: HEIGHT, heading: "h4" });
  });

  /** Draw the history that the exporter keeps. All lines of a figure are from one answer. */
  function drawHistory({ times, values }) {
    past.hidden = times.length < 2;
    none.hidden = !past.hidden;
    if (past.hidden) return;
    charts[0].update([times, ...MEMORY.map((name) => values[name])]);
    charts[1].update([times, values.fragmentation_ratio]);
  }

  function update(rank) {
    const query = new URLSearchParams({ id: rank.id, gpu: rank.gpu.uuid });
    ask(query, `${rank.sample_time} ${rank.state}`);
    askForRun(query, `${rank.sample_time} ${rank.state}`);
    setText(holds, isLive(rank) ? "What it holds" : "What it held");
    setText(title, isLive(rank) ? "Memory, last ten minutes" : "Memory, ten minutes before its end");
    parts.replaceChildren(...partRows(rank.parts ?? [], rank.gpu.total_bytes));
    facts.replaceChildren(...factsOf(rank).flatMap(([name, text]) => [el("dt", {}, name), el("dd", { class: "number" }, text)]));
  }

  update(first);
  return { update, unmount };

  function unmount() {
    ending.abort();
    charts.forEach((chart) => chart.remove());
  }
}

/** Return a function that asks when its version changes, one request at a time, and draws what comes. */
function every(milliseconds, request, draw) {
  let version = null;
  let askedAt = -Infinity;
  let isAsking = false;
  return async (query, current) => {
    if (current === version || isAsking || performance.now() - askedAt < milliseconds) return;
    [isAsking, askedAt] = [true, performance.now()];
    const found = await request(query);
    isAsking = false;
    if (!found) return;
    version = current;
    draw(found);
  };
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
