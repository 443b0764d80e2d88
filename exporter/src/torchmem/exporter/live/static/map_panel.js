// A memory map with its tools: zoom, selection, legend, details of a block, and its history.

import { color, onTheme, style } from "./colors.js";
import { el, keyed, setText } from "./dom.js";
import { bytes, count, percent, plural, ratio } from "./format.js";
import { blockAt, blockOf, countBlocks, indexAt, STATES } from "./memory_layout.js";
import { MapView, mixed, parsed } from "./map_view.js";

const ZOOM = 1.6;
const CLICK_PIXELS = 4;
const PLAY_MILLISECONDS = 250;
const MAX_GROUPS = 24;

/** What each state is called, the color of which part it has, and what it means. */
export const MEANINGS = {
  allocated: ["Allocated", "in_use", "A tensor uses it."],
  pending: ["Pending", "in_use", "Freed, but another stream may still use it."],
  private_used: ["Private, in use", "private_pools", "In use by a CUDA graph or a MemPool."],
  private_free: ["Private, free", "private_pools", "Free, but only for its CUDA graph or MemPool."],
  releasable: [
    "Releasable", "releasable", "Free. PyTorch returns it to the driver if an allocation fails.",
  ],
  stranded: [
    "Stranded", "stranded", "Free, but blocks in use beside it keep its segment from the driver.",
  ],
};
const PALER = { pending: 0.5, private_free: 0.55 }; // share of the background

const KEYS =
  "Arrow keys left and right select a block, up and down move by a row, plus and minus zoom, " +
  "Enter zooms in on the block, S and Shift S go to the next and previous stranded block, " +
  "Home and End to the first and last block, 0 shows everything.";

/** Shows layouts of a device, one at a time. */
export class MapPanel {
  /**
   * `history` has the layouts that can be shown: `length`, `time(index)` as text, and
   * `layout(index)`, which may return a promise. It may have `age(block, index)`, a string or null,
   * which calls its `onAge()` once it knows more; `onShow(index)`; and `stride`, for playing.
   */
  constructor(parent, history) {
    this.history = history;
    this.layout = null;
    this.index = 0;
    this.follows = true;
    this.selected = null;
    this.playing = 0;
    this.build();
    parent.append(this.element);
    this.view = new MapView(this.canvas, bytes);
    this.listen();
    this.recolor();
  }

  build() {
    const button = (text, label, act) =>
      el("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
    this.summary = el("p", { class: "map-summary" });
    this.canvas = el("canvas", {
      class: "map-canvas", tabIndex: 0, role: "application", "aria-roledescription": "memory map",
      "aria-label": "Memory map", "aria-description": KEYS,
    });
    this.tip = el("div", { class: "map-tip", hidden: true });
    this.slider = el("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Time" });
    this.when = el("output", { class: "map-when number" });
    this.play = button("▶", "Play", () => this.togglePlay());
    this.newest = button("Newest", "Show the newest map", () => this.followNewest());
    this.time = el("div", { class: "map-time", hidden: true },
      this.play, this.slider, this.when, this.newest);
    this.legend = el("tbody");
    this.details = el("div", { class: "map-details" });
    this.spoken = el("p", { class: "hidden", "aria-live": "polite" });
    const tools = el("div", { class: "map-tools", role: "group", "aria-label": "Zoom and selection" },
      button("−", "Zoom out", () => this.zoom(1 / ZOOM)),
      button("+", "Zoom in", () => this.zoom(ZOOM)),
      button("‹ stranded", "Previous stranded block", () => this.selectStranded(-1)),
      button("stranded ›", "Next stranded block", () => this.selectStranded(1)));
    this.groups = el("div", { class: "map-groups", role: "group", "aria-label": "Pools" });
    const head = ["", "State", "Bytes", "Share", "Blocks"].map((text) =>
      text ? el("th", { scope: "col" }, text) : el("td"));
    this.element = el("div", { class: "map" }, this.summary, el("div", { class: "map-bar" }, tools, this.time),
      this.groups, el("div", { class: "map-box" }, this.canvas, this.tip),
      el("div", { class: "map-below" },
        el("table", { class: "map-legend" }, el("thead", {}, el("tr", {}, ...head)), this.legend),
        this.details),
      this.spoken);
  }

  listen() {
    const { canvas, view } = this;
    this.resizing = new ResizeObserver(() => view.resize());
    this.resizing.observe(canvas);
    this.endTheme = onTheme(() => this.recolor());
    this.slider.addEventListener("input", () => this.goTo(Number(this.slider.value)));
    this.history.onAge = () => this.drawDetails();
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("dblclick", (event) => view.zoom(4, event.offsetX, event.offsetY));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    listenToPointers(canvas, {
      hover: (x, y) => this.hover(view.positionAt(x, y), x, y),
      click: (x, y) => this.selectAt(view.positionAt(x, y)),
      pan: (dx, dy) => view.pan(dx, dy),
      pinch: (factor, x, y) => view.zoom(factor, x, y),
    });
  }

  /** Remove it from the page. */
  close() {
    this.stop();
    this.resizing.disconnect();
    this.endTheme();
    this.element.remove();
  }

  recolor() {
    const surface = parsed(style("--surface") || "#ffffff");
    const colors = { surface, ink: parsed(style("--ink") || "#000000"),
      focus: parsed(style("--focus") || "#4e84fc") };
    for (const state of STATES) {
      colors[state] = mixed(parsed(color(MEANINGS[state][1])), surface, PALER[state] ?? 0);
    }
    this.view.setColors(colors);
    this.colors = colors;
    this.drawLegend();
  }

  /** Take over that the history has grown, or lost its oldest layouts (`dropped` of them). */
  grown(dropped = 0) {
    const { history, slider } = this;
    slider.max = Math.max(0, history.length - 1);
    this.time.hidden = history.length < 2;
    this.index = Math.max(0, this.index - dropped);
    if (this.follows) this.go(history.length - 1);
    else this.showTime();
  }

  followNewest() {
    this.follows = true;
    this.stop();
    this.go(this.history.length - 1);
  }

  /** Show one layout of the history until another one is chosen. */
  goTo(index) {
    this.follows = false;
    this.stop();
    this.go(index);
  }

  /** Show one layout of the history. While one is on its way, only the latest choice counts. */
  async go(index) {
    this.index = index;
    this.showTime();
    if (this.isLoading) return;
    this.isLoading = true;
    for (let shown = -1; shown !== this.index; ) {
      shown = this.index;
      const layout = await this.history.layout(shown);
      if (layout) this.show(layout);
    }
    this.isLoading = false;
  }

  showTime() {
    this.slider.value = this.index;
    const text = this.history.time(this.index);
    setText(this.when, text);
    this.slider.setAttribute("aria-valuetext", text);
    this.newest.hidden = this.history.length - 1 === this.index;
    this.history.onShow?.(this.index);
  }

  togglePlay() {
    if (this.playing) return this.stop();
    if (this.index >= this.history.length - 1) this.index = 0;
    this.follows = false;
    setText(this.play, "⏸");
    const stride = this.history.stride ?? 1;
    this.playing = setInterval(() => {
      if (this.index >= this.history.length - 1) this.stop();
      else this.go(Math.min(this.history.length - 1, this.index + stride));
    }, PLAY_MILLISECONDS);
    return undefined;
  }

  stop() {
    clearInterval(this.playing);
    this.playing = 0;
    setText(this.play, "▶");
  }

  show(layout) {
    const kept = this.selected;
    this.layout = layout;
    this.view.hovered = null;
    this.tip.hidden = true;
    this.view.setLayout(layout);
    const text = summaryOf(layout);
    setText(this.summary, text);
    this.canvas.setAttribute("aria-label", `Memory map. ${text}`);
    this.drawLegend();
    this.drawGroups();
    this.selectAgain(kept);
  }

  /** Draw a button for each pool and stream, which brings it into view. */
  drawGroups() {
    const { layout, view } = this;
    const groups = [{ name: "Everything", start: 0, bytes: layout.total }];
    if (layout.groups.length > 1) groups.push(...layout.groups.slice(0, MAX_GROUPS));
    keyed(this.groups, groups, ({ name }) => name, ({ name }) => {
      const size = el("span", { class: "number" });
      let group = null;
      const element = el("button", { type: "button", on: { click: () => {
        view.moveTo(group.start, group.bytes / view.rows);
      } } }, `${name} `, size);
      return { element, update: (next) => {
        group = next;
        setText(size, bytes(next.bytes));
      } };
    });
  }

  selectAgain(kept) {
    this.selected = null;
    this.view.selected = null;
    const index = kept ? findAddress(this.layout, kept.address) : null;
    if (index !== null) this.select(blockOf(this.layout, index), { quiet: true });
    else this.drawDetails();
  }

  drawLegend() {
    if (!this.layout) return;
    const { bytes: sums, total } = this.layout;
    const blocks = countBlocks(this.layout);
    const rows = STATES.filter((state) => sums[state] > 0 || state === "stranded").map((state) => {
      const swatch = el("td", { class: "map-swatch" });
      swatch.style.setProperty("--swatch", `rgb(${this.colors[state].join(" ")})`);
      const [name, , meaning] = MEANINGS[state];
      return el("tr", { title: meaning }, swatch, el("th", { scope: "row" }, name),
        el("td", { class: "number" }, bytes(sums[state])),
        el("td", { class: "number" }, percent(total ? sums[state] / total : 0)),
        el("td", { class: "number" }, count(blocks[state])));
    });
    this.legend.replaceChildren(...rows);
  }

  zoom(factor) {
    const { view, selected } = this;
    const box = this.canvas.getBoundingClientRect();
    if (selected) {
      view.reveal(selected.start, selected.start + selected.size);
      const { x, y, width } = view.rectangleOf(selected.start, selected.start + selected.size);
      view.zoom(factor, x + width / 2, y);
    } else view.zoom(factor, box.width / 2, box.height / 2);
  }

  wheel(event) {
    const { view } = this;
    const out = event.deltaY > 0;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan(-(event.deltaX || event.deltaY), 0);
    } else if (out && view.isWhole()) return; // the page scrolls on
    else view.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), event.offsetX, event.offsetY);
    event.preventDefault();
    this.canvas.style.touchAction = view.isWhole() ? "pan-y" : "none";
  }

  key(event) {
    const { layout, selected, view } = this;
    if (!layout?.count || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = layout.blockCount - 1;
    const step = (by) => Math.min(last, Math.max(0, selected ? selected.index + by : this.blockInView()));
    const acts = {
      ArrowRight: () => this.select(blockOf(layout, step(1))),
      ArrowLeft: () => this.select(blockOf(layout, step(-1))),
      ArrowDown: () => view.moveTo(view.start + view.span, view.span),
      ArrowUp: () => view.moveTo(view.start - view.span, view.span),
      PageDown: () => view.moveTo(view.start + view.span * view.rows, view.span),
      PageUp: () => view.moveTo(view.start - view.span * view.rows, view.span),
      Home: () => this.select(blockOf(layout, 0)),
      End: () => this.select(blockOf(layout, last)),
      Enter: () => selected && view.reveal(selected.start, selected.start + selected.size, true),
      Escape: () => this.select(null),
      s: () => this.selectStranded(1),
      S: () => this.selectStranded(-1),
      "+": () => this.zoom(ZOOM),
      "=": () => this.zoom(ZOOM),
      "-": () => this.zoom(1 / ZOOM),
      0: () => view.fit(),
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  }

  blockInView() {
    return this.layout.block[indexAt(this.layout.start, this.layout.count, this.view.start)];
  }

  selectAt(position) {
    this.select(position === null ? null : blockAt(this.layout, position));
  }

  selectStranded(direction) {
    const { layout, selected } = this;
    if (!layout) return;
    const wanted = STATES.indexOf("stranded");
    let part = selected ? selected.part : direction > 0 ? -1 : layout.count;
    do part += direction;
    while (layout.state[part] !== wanted && part >= 0 && part < layout.count);
    if (layout.state[part] === wanted && part >= 0 && part < layout.count) {
      this.select(blockOf(layout, layout.block[part], part));
    }
  }

  /** Select a block, show what is known of it, and say it to screen readers unless `quiet`. */
  select(block, { quiet = false } = {}) {
    this.selected = block;
    this.view.selected = block && [block.start, block.start + block.size];
    if (block && !quiet) this.view.reveal(block.start, block.start + block.size);
    this.view.redraw();
    this.drawDetails();
    if (block && !quiet) setText(this.spoken, this.sentence(block));
  }

  hover(position, x, y) {
    const { tip, view } = this;
    const block = position === null ? null : blockAt(this.layout, position);
    const before = view.hovered?.[0];
    view.hovered = block && [block.start, block.start + block.size];
    if (before !== view.hovered?.[0]) view.redraw();
    tip.hidden = !block;
    if (!block) return;
    tip.replaceChildren(el("b", {}, headline(block)), ...this.facts(block).map(([name, value]) =>
      el("div", {}, `${name}: ${value}`)));
    const { clientWidth } = this.canvas;
    tip.style.left = `${Math.min(Math.max(0, x + 14), Math.max(0, clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18}px`;
  }

  drawDetails() {
    const { selected: block, details } = this;
    if (!block) {
      details.replaceChildren(el("p", {}, "Select a block to keep its details in view. "),
        el("p", { class: "map-keys" }, KEYS));
      return;
    }
    const facts = this.facts(block).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    details.replaceChildren(el("p", { class: "map-title" }, headline(block)),
      el("p", {}, MEANINGS[block.state][2]), el("dl", {}, ...facts));
  }

  facts(block) {
    const { segment } = block;
    const parts = Object.entries(block.parts);
    const age = this.history.age?.(block, this.index);
    const id = segment.pool_id.join(",");
    return [
      ...(parts.length > 1
        ? parts.map(([state, size]) => [MEANINGS[state][0], bytes(size)]) : []),
      ["Address", hex(block.address)],
      ["Segment", `${bytes(block.segmentSize)} at ${hex(segment.address)}${segment.expandable ? ", expandable" : ""}`],
      ["Pool", id === "0,0" ? segment.pool : `${segment.pool}, private pool ${id}`],
      ["Stream", segment.stream === 0 ? "default" : hex(segment.stream)],
      ...(age ? [["Age", age]] : []),
    ];
  }

  sentence(block) {
    return `${headline(block)}. ${this.facts(block).map(([name, value]) => `${name} ${value}`).join(", ")}.`;
  }
}

const hex = (number) => `0x${number.toString(16)}`;

function headline(block) {
  const [name] = MEANINGS[block.state];
  const several = block.isMerged ? ", several small blocks drawn as one" : "";
  return `${Object.keys(block.parts).length > 1 ? "Free block" : name}: ${bytes(block.size)}${several}`;
}

/** Return what a layout shows, in words. */
export function summaryOf(layout) {
  const { bytes: sums, total, device } = layout;
  const blocks = countBlocks(layout);
  const used = sums.allocated + sums.pending;
  const sentences = [
    `${bytes(total)} reserved in ${plural(layout.segments.length, "segment")}: ` +
      `${bytes(used)} allocated (${percent(total ? used / total : 0)}), ` +
      `${bytes(sums.stranded)} stranded in ${plural(blocks.stranded, "block")}, ` +
      `${bytes(sums.releasable)} releasable` +
      (sums.private_used + sums.private_free
        ? `, ${bytes(sums.private_used + sums.private_free)} in private pools.` : "."),
  ];
  if (layout.free) {
    sentences.push(`The largest free block is ${bytes(layout.largest)}, the fragmentation index is ` +
      `${ratio(layout.fragmentation)}.`);
  }
  if (device.merged_blocks) {
    sentences.push(`${plural(device.merged_blocks, "small block")} merged with neighbors.`);
  }
  if (device.omitted_bytes) {
    sentences.push(`${bytes(device.omitted_bytes)} in the smallest segments are left out.`);
  }
  return sentences.join(" ");
}

/** Return the index of the block at an address, or null. */
export function findAddress(layout, address) {
  layout.byAddress ??= layout.segments
    .map((entry, index) => [entry.segment.address, index])
    .sort(([a], [b]) => a - b);
  let [low, high] = [0, layout.byAddress.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (layout.byAddress[middle][0] <= address) low = middle;
    else high = middle - 1;
  }
  const entry = layout.segments[layout.byAddress[low]?.[1]];
  const offset = entry ? address - entry.segment.address : -1;
  if (offset < 0 || offset >= entry.size) return null;
  const index = indexAt(layout.blockStart, layout.blockCount, entry.start + offset);
  return layout.blockStart[index] === entry.start + offset ? index : null;
}

/** Tell pans, pinches, clicks and hovers apart; positions in CSS pixels of the element. */
function listenToPointers(element, { hover, click, pan, pinch }) {
  const pointers = new Map();
  let moved = 0;
  const place = (event) => {
    const box = element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const spread = () => {
    const [[ax, ay], [bx, by]] = [...pointers.values()];
    return { size: Math.hypot(ax - bx, ay - by) || 1, x: (ax + bx) / 2, y: (ay + by) / 2 };
  };
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    if (pointers.size === 0) moved = 0;
    pointers.set(event.pointerId, place(event));
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointermove", (event) => {
    const now = place(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      hover(...now);
      return;
    }
    const old = pointers.size === 2 ? spread() : null;
    pointers.set(event.pointerId, now);
    moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
    if (old) {
      const next = spread();
      pan(next.x - old.x, next.y - old.y);
      pinch(next.size / old.size, next.x, next.y);
    } else if (moved > CLICK_PIXELS) pan(now[0] - before[0], now[1] - before[1]);
  });
  const end = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    if (event.type === "pointerup" && moved <= CLICK_PIXELS && pointers.size === 0) click(...place(event));
  };
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
}
