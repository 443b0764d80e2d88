// The page: follows the node's state and draws every GPU.

import { updateLegend } from "./bar.js";
import { isDark, onTheme, toggleTheme } from "./colors.js";
import { el, keyed, setText } from "./dom.js";
import { follow } from "./feed.js";
import { install } from "./files.js";
import { count, plural } from "./format.js";
import { createGpu } from "./gpu.js";
import { remember } from "./history.js";

/** More than a node has. Devices that NVML does not know come last. */
const MAX_GPUS = 64;
const byId = (id) => document.getElementById(id);
let newest = null;

/** The chosen rank and tab; they are in the address, so that a link or a reload shows the same. */
const selection = {
  id: null, uuid: null, tab: "now",
  select(gpu, rank) {
    const isChosen = this.id === rank.id && this.uuid === gpu.uuid;
    [this.id, this.uuid] = isChosen ? [null, null] : [rank.id, gpu.uuid];
    this.write();
    draw();
  },
  showTab(name) {
    this.tab = name;
    this.write();
  },
  write() {
    const fragment = this.id === null ? " " : `#${new URLSearchParams({ rank: this.id, gpu: this.uuid, tab: this.tab })}`;
    history.replaceState(null, "", fragment.trim() || location.pathname + location.search);
  },
  read() {
    const given = new URLSearchParams(location.hash.slice(1));
    this.id = given.get("rank");
    this.uuid = given.get("gpu");
    this.tab = given.get("tab") ?? "now";
  },
};

function draw() {
  if (newest === null) return;
  updateLegend(byId("legend"), newest);
  const shown = newest.gpus.slice(0, MAX_GPUS);
  keyed(byId("gpus"), shown, (gpu) => gpu.uuid, (gpu) => createGpu(gpu, selection));
  setText(byId("summary"), summary(newest));
  const hidden = newest.gpus.length - shown.length;
  byId("hidden").hidden = hidden === 0;
  setText(byId("hidden"), `${plural(hidden, "more device")} that only ranks report; see the state as JSON.`);
}

function onState(state) {
  if (newest && newest.version !== state.version) notice("The exporter was updated: reload the page.");
  for (const gpu of state.gpus) gpu.time = state.time;
  newest = state;
  remember(state);
  setText(byId("node"), state.node);
  setText(byId("version"), `torchmem ${state.version}`);
  document.title = `${state.node} · torchmem`;
  draw();
}

function onConnection(isConnected) {
  const status = byId("connection");
  status.dataset.connected = String(isConnected);
  setText(status, isConnected ? "live" : "The exporter does not respond; trying again …");
}

function notice(text) {
  setText(byId("notice"), text);
  byId("notice").hidden = false;
}

function summary(state) {
  const ranks = new Map(state.gpus.flatMap((gpu) => gpu.ranks).map((rank) => [rank.id, rank]));
  const states = {};
  for (const rank of ranks.values()) states[rank.state] = (states[rank.state] ?? 0) + 1;
  const words = Object.entries(states).map(([name, number]) => `${count(number)} ${name === "oom" ? "out of memory" : name}`);
  const waiting = state.waiting.length ? [`${plural(state.waiting.length, "rank")} without a GPU yet`] : [];
  const nvml = state.nvml.up ? [] : [`NVML does not respond (${state.nvml.reason})`];
  return [plural(state.gpus.length, "GPU"), plural(ranks.size, "rank"), ...words, ...waiting, ...nvml].join(" · ");
}

/** Return an empty section for a file, which stands in the place of the node until it is closed. */
function showFile(title) {
  const close = el("button", { type: "button", class: "more", on: { click: () => {
    section.remove();
    byId("files").hidden = byId("files").childElementCount === 0;
    byId("main").hidden = !byId("files").hidden;
  } } }, "Close");
  const section = el("section", { class: "gpu file-section", "aria-label": title },
    el("header", {}, el("h2", {}, title), close));
  byId("files").prepend(section);
  byId("files").hidden = false;
  byId("main").hidden = true;
  return section;
}

function labelTheme() {
  const button = byId("theme");
  setText(button, isDark() ? "Light" : "Dark");
  button.setAttribute("aria-label", isDark() ? "Use light colors" : "Use dark colors");
}

byId("theme").addEventListener("click", toggleTheme);
onTheme(labelTheme);
labelTheme();
install(document.documentElement, showFile);
selection.read();
addEventListener("hashchange", () => {
  selection.read();
  draw();
});
follow(onState, onConnection);
