// Bars of memory: parts to scale, with a tooltip, and the legend that explains them.

import { el, keyed, onChange, setText } from "./dom.js";
import { fill } from "./colors.js";
import { bytes, percent } from "./format.js";

let entries = new Map();
let present = new Set();
let highlighted = null;

/** Return the label of a part: the name that the script gave, or the one of the legend. */
export const labelOf = (part) => part.label ?? entries.get(part.name)?.label ?? part.name;

/** Return a swatch in the color of a part. */
export function swatch(name) {
  const element = el("span", { class: "swatch", "aria-hidden": "true" });
  element.style.background = fill(name);
  return element;
}

/** Return {element, update(parts, total)}: a bar whose parts are to the scale of `total` bytes. */
export function createBar(className) {
  const element = el("span", { class: `bar ${className}`, role: "img" });
  element.addEventListener("pointermove", (event) => showTooltip(event, element));
  element.addEventListener("pointerleave", hideTooltip);
  const draw = onChange(([parts, total]) => {
    element.torchmemTotal = total;
    const rest = total - parts.reduce((sum, part) => sum + part.bytes, 0);
    const shown = rest > 0 ? [...parts, { name: "", bytes: rest }] : parts;
    keyed(element, shown, (part) => `${part.name} ${part.label ?? ""}`, createSegment);
    const texts = parts.map((part) => `${labelOf(part)} ${bytes(part.bytes)}`);
    element.setAttribute("aria-label", texts.join(", ") || "unknown");
  });
  return { element, update: (parts, total) => draw([parts, total]) };
}

function createSegment(part) {
  const element = el("span", { class: part.name ? "segment" : "segment rest" });
  if (part.name) element.style.background = fill(part.name);
  element.dataset.part = part.name;
  dim(element);
  return {
    element,
    update(current) {
      element.torchmemPart = current;
      element.style.flexGrow = current.bytes;
    },
  };
}

const tooltip = el("div", { class: "tooltip", "aria-hidden": "true", hidden: true });
document.querySelector("main").append(tooltip);

function showTooltip(event, bar) {
  const part = event.target.torchmemPart;
  if (!part?.name) return hideTooltip();
  const share = percent(part.bytes / bar.torchmemTotal);
  tooltip.replaceChildren(
    el("strong", {}, swatch(part.name), labelOf(part)),
    el("span", { class: "number" }, `${bytes(part.bytes)} · ${share} of the GPU`),
    el("small", {}, entries.get(part.name)?.meaning ?? ""),
  );
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = Math.min(event.clientX + 12, innerWidth - width - 8);
  const below = event.clientY + 18;
  const top = below + height > innerHeight ? event.clientY - height - 12 : below;
  tooltip.style.left = `${Math.max(8, left)}px`;
  tooltip.style.top = `${top}px`;
  return undefined;
}

function hideTooltip() {
  tooltip.hidden = true;
}

/**
 * Show the parts that any bar has, and the groups that are areas over time, in drawing order; pointing at one brings it
 * out in all bars.
 */
export function updateLegend(list, state) {
  entries = new Map(state.legend.map((entry) => [entry.name, entry]));
  const bars = state.gpus.flatMap((gpu) => [gpu, ...gpu.ranks]);
  present = new Set(bars.flatMap((bar) => (bar.parts ?? []).map((part) => part.name)));
  const areas = new Set([...present].map((name) => entries.get(name)?.group));
  const shown = state.legend.filter(({ name }) => present.has(name) || areas.has(name));
  keyed(list, shown, (entry) => entry.name, createLegendEntry);
}

/** Return what a part is, or which parts of the bars are one area over time. */
function meaningOf(entry) {
  if (present.has(entry.name)) return entry.meaning;
  const parts = [...entries.values()].filter(({ name, group }) => present.has(name) && group === entry.name);
  return `Over time: ${parts.map(({ label }) => label).join(", ")}.`;
}

function createLegendEntry(entry) {
  const label = el("span");
  const button = el(
    "button",
    {
      type: "button",
      on: {
        pointerenter: () => highlight(entry.name),
        pointerleave: () => highlight(null),
        focus: () => highlight(entry.name),
        blur: () => highlight(null),
      },
    },
    swatch(entry.name),
    label,
  );
  return {
    element: el("li", {}, button),
    update(current) {
      setText(label, current.label);
      button.title = meaningOf(current);
    },
  };
}

function highlight(name) {
  highlighted = name;
  document.querySelectorAll(".segment").forEach(dim);
}

function dim(segment) {
  const { part } = segment.dataset;
  const isIn = part === highlighted || (!present.has(highlighted) && entries.get(part)?.group === highlighted);
  segment.classList.toggle("dim", highlighted !== null && !isIn);
}
