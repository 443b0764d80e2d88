// The parts of a memory as a table: color and name, bytes, share of the GPU.

import { labelOf, swatch } from "./bar.js";
import { el } from "./dom.js";
import { bytes, percent } from "./format.js";

/** Return a table around the rows in `body`. */
export function partsTable(body) {
  return el(
    "table", { class: "parts" },
    el("thead", { class: "hidden" }, el("tr", {}, ...["Part", "Bytes", "Share of the GPU"].map((name) => el("th", { scope: "col" }, name)))),
    body,
  );
}

/** Return the rows of parts; `total` is the size of the GPU, if it is known. */
export function partRows(parts, total) {
  return parts.map((part) => el(
    "tr", {},
    el("th", { scope: "row" }, swatch(part.name), labelOf(part)),
    el("td", { class: "number" }, bytes(part.bytes)),
    el("td", { class: "number soft" }, total ? percent(part.bytes / total) : ""),
  ));
}
