// The page: follows the node's state and draws every GPU.

import { updateLegend } from "./bar.js";
import { el, keyed, onChange, setText } from "./dom.js";
import { follow } from "./feed.js";
import { install } from "./files.js";
import { clock, count, plural } from "./format.js";
import { createGpu } from "./gpu.js";
import { load, remember } from "./history.js";
import { listen } from "./keys.js";
import { matcher, stateName } from "./search.js";
import { createStart } from "./start.js";

/** More than a node has. Devices that NVML does not know come last. */
const MAX_GPUS = 64;
/** With more GPUs, each rank has one line unless people choose otherwise. */
const MAX_ROOMY_GPUS = 4;
const DIED = ["oom", "killed", "failed"];
const byId = (id) => document.getElementById(id);
const start = createStart();
let newest = null;
let isFirst = true;

/** The chosen rank and tab, and the search; they are in the address, so that a link shows the same. */
const selection = {
  id: null, uuid: null, tab: "now", search: "",
  select(gpu, rank) {
    const isChosen = this.id === rank.id && this.uuid === gpu.uuid;
    this.open(isChosen ? null : rank.id, gpu.uuid, this.tab);
  },
  open(id, uuid, tab) {
    [this.id, this.uuid, this.tab] = [id, id === null ? null : uuid, tab];
    this.write();
    draw();
    document.querySelector(`.details [id^="tab-${tab}-"][aria-selected="false"]`)?.click();
  },
  showTab(name) {
    this.tab = name;
    this.write();
  },
  write() {
    const chosen = this.id === null ? {} : { rank: this.id, gpu: this.uuid, tab: this.tab };
    const fragment = new URLSearchParams({ ...chosen, ...(this.search ? { search: this.search } : {}) });
    history.replaceState(null, "", fragment.size ? `#${fragment}` : location.pathname + location.search);
  },
  read() {
    const given = new URLSearchParams(location.hash.slice(1));
    this.id = given.get("rank");
    this.uuid = given.get("gpu");
    this.tab = given.get("tab") ?? "now";
    this.search = given.get("search") ?? "";
    byId("search").value = this.search;
  },
};

function draw() {
  if (newest === null) return;
  updateLegend(byId("legend"), newest);
  const known = newest.gpus.slice(0, MAX_GPUS);
  const shown = worstFirst(selection.search ? matching(known) : known);
  document.documentElement.dataset.compact = String(isCompact());
  byId("compact").hidden = ranksOf(newest).size === 0;
  byId("compact").setAttribute("aria-pressed", String(isCompact()));
  keyed(byId("gpus"), shown, (gpu) => gpu.uuid, (gpu) => createGpu(gpu, selection, newest.groups));
  start.update(newest);
  drawSummary(summary(newest));
  drawFound(shown);
  byId("search").hidden = ranksOf(newest).size === 0 && !selection.search;
  byId("nvml").hidden = newest.nvml.up;
  drawNvml(newest.nvml);
  byId("missing").hidden = !newest.missing;
  setText(byId("missing"), newest.missing ?? "");
  const hidden = newest.gpus.length - known.length;
  byId("hidden").hidden = hidden === 0;
  setText(byId("hidden"), `${plural(hidden, "more device")} that only ranks report; see the state as JSON.`);
}

/**
 * Return GPUs by their worst rank: the order changes only when a GPU fails, or a rank dies. Those
 * that NVML knows stay before the others, which some user may have made up.
 */
function worstFirst(gpus) {
  const trouble = (gpu) => (gpu.up ? DIED.indexOf(gpu.ranks[0]?.state) + 1 || DIED.length + 1 : 0);
  const urgency = (gpu) => trouble(gpu) + (gpu.index === undefined ? DIED.length + 2 : 0);
  return gpus.map((gpu, at) => ({ gpu, at })).sort((a, b) => urgency(a.gpu) - urgency(b.gpu) || a.at - b.at).map(({ gpu }) => gpu);
}

function matching(gpus) {
  const matches = matcher(selection.search);
  return gpus.map((gpu) => ({ ...gpu, ranks: gpu.ranks.filter(matches) })).filter((gpu) => gpu.ranks.length);
}

function drawFound(shown) {
  const number = new Set(shown.flatMap((gpu) => gpu.ranks).map((rank) => rank.id)).size;
  byId("found").hidden = !selection.search;
  setText(byId("found"), `${count(number)} of ${plural(ranksOf(newest).size, "rank")} found. Esc shows all.`);
}

function onState(state) {
  if (newest && newest.version !== state.version) notice("The exporter was updated: reload the page.");
  for (const gpu of state.gpus) gpu.time = state.time;
  newest = state;
  remember(state);
  setText(byId("node"), state.node);
  setText(byId("version"), `torchmem ${state.version}`);
  draw();
  if (isFirst && selection.id !== null) goToLink();
  isFirst = false;
}

function goToLink() {
  if (document.querySelector(".details")) show(selection.id);
  else notice("The rank of this link is gone: ranks that have ended stay for a while only.");
}

function onConnection({ isConnected, seen, next }) {
  document.documentElement.dataset.connected = String(isConnected);
  const status = byId("connection");
  status.dataset.connected = String(isConnected);
  const node = byId("node").textContent;
  document.title = [isConnected ? "" : "No answer", node, "torchmem"].filter(Boolean).join(" · ");
  if (isConnected) {
    setText(status, "live");
    load().then(draw);
    return;
  }
  const last = seen === null ? "" : ` Last seen ${clock(seen)}.`;
  status.replaceChildren(el("strong", {}, "The exporter does not respond."), `${last} Next try ${clock(next)}. `,
    el("button", { type: "button", class: "more", on: { click: () => feed.retry() } }, "Try now"));
}

function notice(text) {
  setText(byId("notice"), text);
  byId("notice").hidden = false;
}

function ranksOf(state) {
  return new Map(state.gpus.flatMap((gpu) => gpu.ranks).map((rank) => [rank.id, rank]));
}

/** Return what the node has, as [words, state]; a rank that died can be gone to. */
function summary(state) {
  const ranks = ranksOf(state);
  const states = {};
  for (const rank of ranks.values()) states[rank.state] = (states[rank.state] ?? 0) + 1;
  const names = Object.keys(states).sort((a, b) => DIED.includes(b) - DIED.includes(a));
  return [
    [state.gpus.length ? plural(state.gpus.length, "GPU") : "No GPU"],
    [ranks.size || state.waiting.length ? plural(ranks.size, "rank") : "no rank"],
    ...names.map((name) => [`${count(states[name])} ${stateName(name)}`, DIED.includes(name) ? name : undefined]),
    ...(state.waiting.length ? [[`${plural(state.waiting.length, "rank")} without a GPU yet`]] : []),
  ];
}

const drawNvml = onChange(({ text, step }) => {
  byId("nvml").replaceChildren(el("strong", {}, "NVML does not respond."), ` ${text} ${step}`);
});

const drawSummary = onChange((items) => {
  const drawn = items.map(([text, state]) => (state
    ? el("button", { type: "button", class: "go", "data-go": state, title: "Go there", on: { click: () => goTo(state) } }, text)
    : text));
  byId("summary").replaceChildren(...drawn.flatMap((item, at) => (at ? [" · ", item] : [item])));
});

/** Open the next rank that ended in this way, in any if undefined, with why it did. */
function goTo(state) {
  if (newest === null) return;
  if (selection.search) search("");
  const all = worstFirst(newest.gpus.slice(0, MAX_GPUS)).flatMap((gpu) => gpu.ranks.map((rank) => ({ gpu, rank })));
  const died = all.filter(({ rank }) => (state ? rank.state === state : DIED.includes(rank.state)));
  const found = died.length ? died : all;
  if (!found.length) return;
  const at = found.findIndex(({ gpu, rank }) => rank.id === selection.id && gpu.uuid === selection.uuid);
  const { gpu, rank } = found[(at + 1) % found.length];
  selection.open(rank.id, gpu.uuid, "why");
  show(rank.id);
}

function show(id) {
  const row = [...document.querySelectorAll(".row")].find((item) => item.dataset.rank === id && item.ariaExpanded === "true");
  row?.scrollIntoView({ block: "start" });
  row?.focus({ preventScroll: true });
}

function search(text) {
  byId("search").value = text;
  selection.search = text.trim();
  selection.write();
  draw();
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

let compactChoice = null;
const isCompact = () => compactChoice ?? (newest !== null && newest.gpus.length > MAX_ROOMY_GPUS);

function toggleCompact() {
  compactChoice = !isCompact();
  draw();
}

/** Move the focus by some rows, from the one that has it or is open. */
function move(step) {
  const rows = [...document.querySelectorAll(".row")];
  const at = rows.findIndex((row) => row.parentElement.contains(document.activeElement));
  rows[at < 0 ? 0 : Math.min(Math.max(at + step, 0), rows.length - 1)]?.focus();
}

function leave() {
  if (byId("files").hidden === false) byId("files").querySelector("header .more").click();
  else if (selection.search) search("");
  else if (selection.id !== null) selection.open(null, null, selection.tab);
}

const showHelp = listen([
  { keys: ["/"], text: "search", act: () => byId("search").focus() },
  { keys: ["j"], text: "next rank", act: () => move(1) },
  { keys: ["k"], text: "previous rank", act: () => move(-1) },
  { keys: ["w"], text: "the rank in most trouble", act: () => goTo() },
  { keys: ["1", "2", "3"], text: "Now, Memory map, Why", act: (key) => document.querySelectorAll("[role=tab]")[key - 1]?.click() },
  { keys: ["Escape"], text: "show all ranks, close a rank or file", act: leave },
  { keys: ["c"], text: "compact, or with room", act: toggleCompact },
  { keys: ["o"], text: "open a file", act: () => byId("open-file").click() },
]);
byId("help").addEventListener("click", showHelp);
byId("compact").addEventListener("click", toggleCompact);
byId("search").addEventListener("input", () => search(byId("search").value));
byId("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  search("");
  byId("search").blur();
});
byId("start").append(start.element);
install(document.documentElement, showFile);
selection.read();
addEventListener("hashchange", () => {
  selection.read();
  selection.open(selection.id, selection.uuid, selection.tab);
});
const feed = follow(onState, onConnection);
