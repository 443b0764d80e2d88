// One GPU: its bar, its last ten minutes, and a row for each rank on it.

import { createBar } from "./bar.js";
import { createChart } from "./charts.js";
import { el, keyed, onChange, setText } from "./dom.js";
import { bytes, count, percent, plural, ratio } from "./format.js";
import { isLive, ofGpu } from "./history.js";
import { createDetails } from "./rank.js";
import { stateName } from "./search.js";

const MAX_ROWS = 8;

/**
 * Return {element, update(gpu), remove()}. `selection`: {id, select(gpu, rank)}, see page.js;
 * `groups`: the areas of the chart, see state.py.
 */
export function createGpu(first, selection, groups) {
  const title = el("h2");
  const model = el("span", { class: "model" });
  const facts = el("p", { class: "facts number" });
  const used = el("span", { class: "in-use" });
  const notes = el("div");
  const bar = createBar("gpu-bar");
  const past = el("div", { class: "past" });
  const length = el("p", { class: "used number" });
  const ranks = el("ul", { class: "ranks" });
  const more = el("button", { type: "button", class: "more", hidden: true, on: { click: toggleAll } });
  const headingId = `gpu-${first.uuid}`;
  title.id = headingId;
  const element = el(
    "article", { class: "gpu", "aria-labelledby": headingId },
    el("header", {}, title, facts), notes,
    el("div", { class: "memory" }, el("div", { class: "present" }, bar.element), el("div", { class: "past-column" }, past, length)),
    ranks, more,
  );
  let showsAll = false;
  let current = first;
  const chart = createChart(past, {
    series: groups.map((group) => ({ label: group.label, color: group.name })),
    stacked: true, axes: false, format: bytes, max: () => current.total_bytes,
    label: `Memory of ${nameOf(first)} over the last ten minutes`,
  });

  const drawHeader = onChange((gpu) => {
    title.replaceChildren(`${nameOf(gpu)} `, model);
    setText(model, gpu.name ?? "");
    facts.replaceChildren(used, ...factsOf(gpu));
    notes.replaceChildren(...(gpu.notes ?? []).map(({ text, remedy }) => el("p", { class: "why-line" }, el("strong", { class: "alarm" }, text), el("br"), remedy)));
  });

  function toggleAll() {
    showsAll = !showsAll;
    update(current);
  }

  function update(gpu) {
    current = gpu;
    drawHeader({ ...gpu, parts: null, ranks: null, time: null });
    element.classList.toggle("down", !gpu.up);
    bar.update(gpu.parts, gpu.total_bytes ?? 1);
    bar.element.hidden = !gpu.parts.length;
    setText(used, usedText(gpu));
    const shown = showsAll ? gpu.ranks : firstRows(gpu.ranks, selection.id);
    keyed(ranks, shown, (rank) => rank.id, (rank) => createRow(rank, selection));
    ranks.torchmemChildren.forEach((row) => row.place(gpu, selection));
    more.hidden = gpu.ranks.length <= MAX_ROWS;
    setText(more, showsAll ? "Show fewer" : `Show all ${plural(gpu.ranks.length, "rank")}`);
    const columns = ofGpu(gpu);
    chart.update(columns);
    setText(length, columns ? lengthOf(columns[0]) : "");
  }

  return { element, update, remove: () => chart.remove() };
}

/** Return the name of a GPU for people. */
export function nameOf(gpu) {
  if (gpu.uuid.startsWith("MIG-")) return gpu.index === undefined ? "MIG device" : `MIG device of GPU ${gpu.index}`;
  return gpu.index === undefined ? "GPU" : `GPU ${gpu.index}`;
}

function factsOf(gpu) {
  if (!gpu.up) {
    const code = gpu.error_code === undefined ? "" : ` (NVML error ${gpu.error_code})`;
    return [el("strong", { class: "alarm" }, `does not respond${code}`)];
  }
  const limit = gpu.power_limit_watts === undefined ? "" : ` of ${gpu.power_limit_watts.toFixed(0)}`;
  const facts = [
    gpu.utilization_ratio === undefined ? null : `${percent(gpu.utilization_ratio)} busy`,
    gpu.power_watts === undefined ? null : `${gpu.power_watts.toFixed(0)}${limit} W`,
    gpu.temperature_celsius === undefined ? null : `${gpu.temperature_celsius.toFixed(0)} °C`,
  ];
  return facts.filter(Boolean).map((fact) => el("span", {}, fact));
}

function lengthOf(times) {
  const seconds = times.at(-1) - times[0];
  return seconds < 60 ? "the last minute" : `the last ${plural(Math.min(10, Math.ceil(seconds / 60)), "minute")}`;
}

function usedText(gpu) {
  if (gpu.total_bytes === undefined) return "The size of this GPU is unknown.";
  const free = gpu.parts.find((part) => part.name === "free");
  const total = bytes(gpu.total_bytes);
  if (free) return `${bytes(gpu.total_bytes - free.bytes)} of ${total} in use`;
  const known = gpu.parts.reduce((sum, part) => sum + part.bytes, 0);
  return known < gpu.total_bytes ? `${total}; unknown how much is in use` : total;
}

/** Return the ranks that are shown at first: the exporter lists those in trouble first; and the chosen one. */
function firstRows(ranks, chosen) {
  const shown = ranks.slice(0, MAX_ROWS);
  const selected = ranks.find(({ id }) => id === chosen);
  return !selected || shown.includes(selected) ? shown : [...shown.slice(0, -1), selected];
}

function createRow(first, selection) {
  const state = el("span", { class: "state" });
  const who = el("span", { class: "who" });
  const values = el("span", { class: "values number" });
  const why = el("span", { class: "why-line" });
  const bar = createBar("rank-bar");
  const button = el(
    "button", { type: "button", class: "row", "aria-expanded": "false", "data-rank": first.id },
    el("span", { class: "left" }, el("span", { class: "name" }, state, who), bar.element, why), values,
  );
  const element = el("li", { class: "rank" }, button);
  let details = null;
  let onGpu = null;
  button.addEventListener("click", () => selection.select(onGpu, first));

  return {
    element,
    update: onChange((rank) => {
      setText(state, stateName(rank.state));
      state.dataset.state = rank.state;
      who.replaceChildren(el("strong", {}, `rank ${rank.rank}`), ` ${rank.run}`);
      who.title = rank.launch ? `launch ${rank.launch}` : "";
      values.replaceChildren(...valuesOf(rank));
      setText(why, lineOf(rank));
      why.title = lineOf(rank);
      element.classList.toggle("dead", !isLive(rank));
    }),
    /** Draw what depends on the GPU and on the selection. */
    place(gpu, chosen) {
      onGpu = gpu;
      const rank = gpu.ranks.find((other) => other.id === first.id);
      bar.update(rank.parts ?? [], gpu.total_bytes ?? 1);
      bar.element.hidden = !rank.parts?.length;
      const isChosen = chosen.id === rank.id && chosen.uuid === gpu.uuid;
      button.setAttribute("aria-expanded", String(isChosen));
      if (isChosen && !details) {
        details = createDetails(gpu, rank, chosen);
        element.append(details.element);
      } else if (!isChosen && details) {
        details.remove();
        details.element.remove();
        details = null;
      }
      details?.update(gpu, rank);
    },
    remove: () => details?.remove(),
  };
}

function valuesOf(rank) {
  const ooms = Object.values(rank.ooms ?? {}).reduce((sum, number) => sum + number, 0);
  return [
    value("headroom", bytes(rank.headroom_flush_bytes)),
    value("fragmentation", ratio(rank.fragmentation_ratio), rank.has_severe_fragmentation),
    value("retries", count(rank.alloc_retries), rank.alloc_retries > 0),
    value("OOMs", rank.ooms ? count(ooms) : "–", ooms > 0),
  ];
}

function value(name, text, isNotable = false) {
  return el(
    "span", { class: isNotable ? "value notable" : "value" },
    el("span", { class: "caption" }, `${name} `), text,
  );
}

/** Return the first thing that people should know about a rank, or nothing. */
function lineOf(rank) {
  return rank.why?.[0]?.text ?? "";
}
