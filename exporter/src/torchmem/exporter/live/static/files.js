// Files dropped on the page: memory snapshots, OOM reports, results of preflight and what-if, and texts.
//
// They are read in the browser; a snapshot is read by a worker. Only an OOM report is sent to the
// exporter, which explains it and keeps nothing.

import { color, style } from "./colors.js";
import { el, setText } from "./dom.js";
import { bytes, duration, plural, ratio } from "./format.js";
import { MapPanel } from "./map_panel.js";
import { layoutOf } from "./memory_layout.js";
import { isDocument, showDocument } from "./file_documents.js";
import { lineChart } from "./file_charts.js";
import { showText } from "./text_file.js";

const MAX_SNAPSHOT_BYTES = 512 * 2 ** 20;
const MAX_JSON_BYTES = 64 * 2 ** 20;
const MAX_TEXT_BYTES = 256 * 2 ** 20;

/**
 * Let files be dropped on `target`, or chosen with the button `open-file`.
 *
 * `show(title)` returns an empty section for the content of a file.
 */
export function install(target, show) {
  const open = async (files) => {
    for (const file of files) await openFile(file, show);
  };
  const input = el("input", { type: "file", multiple: true, hidden: true, "aria-hidden": "true", tabIndex: -1 });
  input.addEventListener("change", () => open([...input.files]).then(() => (input.value = "")));
  document.body.append(input);
  document.getElementById("open-file")?.addEventListener("click", () => input.click());
  target.addEventListener("dragover", (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    target.dataset.drop = "true";
  });
  target.addEventListener("dragleave", (event) => event.relatedTarget ?? delete target.dataset.drop);
  target.addEventListener("drop", (event) => {
    delete target.dataset.drop;
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    open([...event.dataTransfer.files]);
  });
}

async function openFile(file, show) {
  const section = show(file.name);
  const status = el("p", { class: "map-message", role: "status" }, `Reading ${bytes(file.size)} …`);
  section.append(status);
  try {
    const first = new Uint8Array(await file.slice(0, 1).arrayBuffer())[0];
    if (first === 0x80) await showSnapshot(file, section, status);
    else await showTextOrJson(file, section);
    status.hidden = !status.textContent.startsWith("Select");
  } catch (error) {
    setText(status, error.message);
    status.hidden = false;
  }
}

/** Show the documents of torchmem in a file; anything else that is text is a message or a log. */
async function showTextOrJson(file, section) {
  if (file.size > MAX_TEXT_BYTES) throw new Error(`Texts of more than ${bytes(MAX_TEXT_BYTES)} are not read: torchmem why reads any size.`);
  const text = await file.text();
  if (text.slice(0, 4096).includes("\0")) throw new Error("The file is neither a memory snapshot, nor JSON, nor a text.");
  const documents = file.size > MAX_JSON_BYTES ? null : documentsIn(text);
  if (!documents || documents.every(([found]) => !isDocument(found))) return showText(section, text);
  for (const [found, line] of documents) await showDocument(section, found, line);
}

function documentsIn(text) {
  try {
    return text.trim().split("\n").map((line) => [JSON.parse(line), line]);
  } catch {
    try {
      return [[JSON.parse(text), text]];
    } catch {
      return null;
    }
  }
}

/** Calls the worker that holds one snapshot. */
class Snapshot {
  constructor() {
    this.worker = new Worker(new URL("snapshot_worker.js", import.meta.url), { type: "module" });
    this.waiting = new Map();
    this.next = 0;
    this.worker.onmessage = ({ data: { id, error, ...answer } }) => {
      const { resolve, reject } = this.waiting.get(id);
      this.waiting.delete(id);
      if (error) reject(new Error(error));
      else resolve(answer);
    };
    this.worker.onerror = () => {
      for (const { reject } of this.waiting.values()) reject(new Error("The file needs more memory than the browser has."));
    };
  }

  ask(act, given = {}) {
    this.next += 1;
    const id = this.next;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, act, ...given });
    });
  }
}

async function showSnapshot(file, section, status) {
  if (file.size > MAX_SNAPSHOT_BYTES) {
    throw new Error(`This page reads snapshots of up to ${bytes(MAX_SNAPSHOT_BYTES)}: use \`torchmem why\` for a larger one.`);
  }
  const snapshot = new Snapshot();
  const { devices } = await snapshot.ask("open", { file }).catch((error) => {
    snapshot.worker.terminate();
    throw error;
  });
  if (!devices.length) throw new Error("The snapshot has no memory of any GPU.");
  const body = el("div", { class: "file" });
  const choose = async (device) => {
    setText(status, "Following the trace …");
    status.hidden = false;
    body.replaceChildren();
    await showDevice(snapshot, device, body);
    status.hidden = true;
  };
  if (devices.length > 1) section.append(chooser(devices, choose));
  section.append(body);
  await choose(devices[0]);
}

function chooser(devices, choose) {
  const options = devices.map((device) => el("option", { value: device }, `cuda:${device}`));
  const select = el("select", { "aria-label": "GPU" }, ...options);
  select.addEventListener("change", () => choose(Number(select.value)));
  return el("p", {}, select);
}

async function showDevice(snapshot, device, body) {
  const { events, timeline } = await snapshot.ask("device", { device });
  const history = new TraceHistory(snapshot, timeline, events);
  body.append(el("p", { class: "map-summary" }, traceSummary(timeline, events)));
  const charts = el("div", { class: "file-charts" });
  if (events) body.append(charts);
  const panel = new MapPanel(body, history);
  const marks = events ? drawCharts(charts, timeline, (index) => panel.goTo(index)) : [];
  history.onShow = (index) => marks.forEach((mark) => mark(index));
  panel.grown();
}

/** The states of a trace, as the map's history: see MapPanel. */
class TraceHistory {
  constructor(snapshot, timeline, events) {
    Object.assign(this, { snapshot, timeline, events });
    this.length = timeline.events.length;
    this.stride = Math.max(1, Math.round(this.length / 120));
    this.ages = new Map();
  }

  time(index) {
    const event = this.timeline.events[index];
    const seconds = this.timeline.times?.[index];
    const at = seconds === undefined ? "" : `${timeText(seconds)}, `;
    return `${at}event ${event.toLocaleString("en-US")} of ${this.events.toLocaleString("en-US")}`;
  }

  async layout(index) {
    const { map } = await this.snapshot.ask("map", { event: this.timeline.events[index] });
    return layoutOf(map);
  }

  /** Ask for the age of a block; it is known when the pointer comes back, or is selected again. */
  age(block, index) {
    if (!this.timeline.times || !block.parts.allocated) return null;
    const key = `${index} ${block.address}`;
    if (!this.ages.has(key)) {
      if (this.ages.size > 1000) this.ages.clear();
      this.ages.set(key, null);
      this.snapshot
        .ask("age", { event: this.timeline.events[index], address: block.address })
        .then(({ seconds }) => {
          this.ages.set(key, ageText(seconds));
          this.onAge?.();
        });
    }
    return this.ages.get(key);
  }
}

function ageText(seconds) {
  if (seconds === null) return null;
  if (seconds < 0) return "older than the recording";
  return timeText(seconds);
}

const timeText = (seconds) => (seconds < 1 ? `${Number((seconds * 1000).toFixed(2))} ms` : duration(seconds));

function traceSummary(timeline, events) {
  if (!events) return "The snapshot has no trace: it shows one moment.";
  const last = timeline.times?.at(-1);
  const during = last ? ` in ${timeText(last)}` : "";
  const peak = Math.max(...timeline.allocated);
  const worst = Math.max(...timeline.stranded);
  const headroom = timeline.headroom.at(-1) === null
    ? " Headroom needs the GPU's free memory, which torchmem capture adds to a snapshot." : "";
  return `${plural(events, "event")}${during}. At the peak ${bytes(peak)} is in use; at most ${bytes(worst)} is stranded.${headroom}`;
}

/** Return what writes seconds of a timeline of this length. */
function axisTime(length) {
  return length < 1
    ? (seconds) => `${Number((seconds * 1000).toFixed(2))} ms`
    : (seconds) => `${Number(seconds.toFixed(length < 20 ? 2 : 1))} s`;
}

/** Draw the timeline, and return functions that mark a moment in it. */
function drawCharts(element, timeline, go) {
  const x = timeline.times ?? timeline.events;
  const xFormat = timeline.times ? axisTime(x.at(-1)) : (value) => value.toLocaleString("en-US");
  const memory = [
    { label: "reserved", values: timeline.reserved, color: () => style("--soft") },
    { label: "in use", values: timeline.allocated, color: () => color("in_use"), fill: true },
    { label: "stranded", values: timeline.stranded, color: () => color("stranded") },
  ];
  if (timeline.headroom[0] !== null) {
    memory.push({ label: "headroom", values: timeline.headroom, color: () => style("--ink"), dash: [4, 3] });
  }
  const common = { x, xFormat, onPick: go };
  const first = lineChart(element, { ...common, title: "Memory", lines: memory, format: bytes, isBytes: true, height: 190 });
  const second = lineChart(element, {
    ...common, title: "Fragmentation index", height: 110, format: (value) => ratio(value), max: 1,
    lines: [{ label: "fragmentation index", values: timeline.fragmentation, color: () => color("stranded") }],
  });
  return [first, second];
}
