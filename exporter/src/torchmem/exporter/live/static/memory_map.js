// The tab "Memory map" of a rank: asks the exporter for the map while it is open, and keeps the last
// minutes of it.

import { el, setText } from "./dom.js";
import { duration } from "./format.js";
import { findAddress, MapPanel } from "./map_panel.js";
import { blockOf, layoutOf } from "./memory_layout.js";

const POLL_MILLISECONDS = 2000;
const KEPT_SECONDS = 600;
const MAX_KEPT_PARTS = 2_000_000; // of all ranks; a part takes about 70 bytes

const histories = new Map();

/** The layouts of one rank that the page has received, oldest first. */
class RankHistory {
  constructor() {
    this.frames = [];
    this.etag = null;
  }

  get length() {
    return this.frames.length;
  }

  time(index) {
    const frame = this.frames[index];
    if (!frame) return "";
    const seconds = Math.max(0, Date.now() / 1000 - frame.time);
    const clock = new Date(frame.time * 1000).toLocaleTimeString("en-GB");
    return `${clock}, ${duration(Math.floor(seconds))} ago`;
  }

  layout(index) {
    return this.frames[index]?.layout;
  }

  /** Return since when a block is as it is, from the layouts before. */
  age(block, index) {
    if (block.isMerged || block.state === "stranded" || block.state === "releasable") return null;
    let first = index;
    while (first > 0 && isSame(this.frames[first - 1].layout, block)) first -= 1;
    const seconds = this.frames[index].time - this.frames[first].time;
    return first === index && index > 0
      ? `new since the last map`
      : `at least ${duration(Math.floor(seconds))}`;
  }

  /** Add a layout, and return how many old ones were dropped. */
  add(time, layout) {
    this.frames.push({ time, layout });
    let dropped = 0;
    while (this.frames[0].time < time - KEPT_SECONDS) {
      this.frames.shift();
      dropped += 1;
    }
    while (this.frames.length > 1 && keptParts() > MAX_KEPT_PARTS) {
      this.frames.shift();
      dropped += 1;
    }
    return dropped;
  }
}

function isSame(layout, block) {
  const index = findAddress(layout, block.address);
  if (index === null) return false;
  const other = blockOf(layout, index);
  return other.size === block.size && other.state === block.state;
}

function keptParts() {
  let sum = 0;
  for (const { frames } of histories.values()) for (const { layout } of frames) sum += layout.count;
  return sum;
}

function historyOf(id) {
  if (!histories.has(id)) histories.set(id, new RankHistory());
  return histories.get(id);
}

/** Show the map of a rank in an empty element; return {update, unmount}. */
export function mount(element, rank) {
  const history = historyOf(rank.id);
  const message = el("p", { class: "map-message", role: "status" }, "Asking the rank for its map …");
  element.append(message);
  const gpu = rank.gpu?.uuid;
  let panel = null;
  let timer = 0;
  let isMounted = true;

  function tell(text) {
    setText(message, text ?? "");
    message.hidden = !text;
  }

  function showPanel(dropped = 0) {
    if (!history.length) return;
    panel ??= new MapPanel(element, history);
    panel.grown(dropped);
  }

  async function poll() {
    if (document.visibilityState === "visible") await ask();
    if (isMounted) timer = setTimeout(poll, POLL_MILLISECONDS);
  }

  async function ask() {
    try {
      const headers = history.etag ? { "If-None-Match": history.etag } : {};
      const answer = await fetch(`api/v1/map?id=${rank.id}`, { headers, cache: "no-store" });
      if (answer.status === 304) return;
      const body = await answer.json();
      if (isMounted) receive(answer, body);
    } catch {
      if (isMounted) tell("The exporter does not respond.");
    }
  }

  function receive(answer, body) {
    if (answer.status !== 200) {
      tell(body.error ?? body.waiting);
      return;
    }
    history.etag = answer.headers.get("ETag");
    const device = body.devices.find((found) => found.uuid === gpu) ?? body.devices[0];
    if (!device?.segments.length) {
      tell("PyTorch's allocator holds no memory on this GPU.");
      return;
    }
    tell(null);
    if (history.frames.at(-1)?.time === body.timestamp) return;
    showPanel(history.add(body.timestamp, layoutOf(device)));
  }

  if (history.length) tell(null);
  showPanel();
  poll();
  return {
    update() {
      if (panel) panel.showTime();
    },
    unmount() {
      isMounted = false;
      clearTimeout(timer);
      panel?.close();
      element.replaceChildren();
    },
  };
}
