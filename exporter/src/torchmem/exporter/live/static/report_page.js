// The page in one file that `torchmem why --html` writes: what they say
// about a process on each of its devices, with the chart of the run and the memory map.

import { createBar } from "./bar.js";
import { el } from "./dom.js";
import { bytes } from "./format.js";
import { MapPanel } from "./map_panel.js";
import { layoutOf } from "./memory_layout.js";
import { partRows, partsTable } from "./parts_table.js";
import { drawRun } from "./run_chart.js";
import { adviceList, facts, listing, threatList } from "./words.js";

const { devices } = JSON.parse(document.getElementById("document").textContent);
const place = document.getElementById("drawn");
for (const device of devices) drawDevice(device);
document.getElementById("text").open = false;

function drawDevice(device) {
  const charts = el("section", { class: "card file-section" });
  const map = el("section", { class: "card" });
  place.append(
    ...(devices.length > 1 ? [el("h2", { class: "report-device" }, device.name)] : []),
    ...(device.chart ? [charts] : []),
    el("div", { class: "report-columns" }, words(device), memory(device), ...device.listings.map(card)),
    ...(device.map ? [map] : []),
  );
  if (device.chart) drawRun(charts, device.chart);
  if (device.map) drawMap(map, device.map);
}

function words(device) {
  const titled = (title, content) => el("section", {}, el("h2", {}, title), content);
  const section = el("section", { class: "card report-words" },
    ...device.paragraphs.map(({ title, text }) => titled(title, el("p", {}, text))),
    device.threats ? titled("Threats", threatList(device.threats)) : null,
    device.advice.length ? titled("What to do, most promising first", adviceList(device.advice)) : null);
  return section.childElementCount ? section : null;
}

function memory({ memory: title, parts, total, facts: known }) {
  const section = el("section", { class: "card report-memory" });
  if (parts.length && total) {
    const bar = createBar("gpu-bar");
    bar.update(parts, total);
    const rows = el("tbody", {}, partRows(parts, total));
    section.append(el("h2", {}, title, " ", el("span", { class: "model number" }, bytes(total))), bar.element, partsTable(rows));
  }
  if (known.length) section.append(facts(known));
  return section.childElementCount ? section : null;
}

function card({ title, lines }) {
  return el("section", { class: "card" }, el("h2", {}, title), listing(lines));
}

function drawMap(section, { title, device }) {
  section.append(el("h2", {}, title));
  const layout = layoutOf(device);
  new MapPanel(section, { length: 1, time: () => "", layout: () => layout }).grown();
}
