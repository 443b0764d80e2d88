// What the exporter and the commands say in words: threats, advice, facts, and listings of lines.

import { el } from "./dom.js";

/** Return what threatens a rank that runs. */
export function threatList(found) {
  if (!found.length) return el("p", {}, "Nothing at the moment.");
  return el("ul", { class: "threats" }, found.map((threat) => el("li", {}, threat.text, threat.cause && !threat.onset ? cause(threat.cause) : null)));
}

function cause(name) {
  const chip = el("span", { class: "cause" }, `OOM cause: ${name}`);
  chip.style.setProperty("--dot", `var(--cause-${name})`);
  return chip;
}

/** Return what to do, with the lines to type. */
export function adviceList(remedies) {
  return el("ol", { class: "advice" }, remedies.map((remedy) => el("li", {}, remedy.text,
    remedy.lines?.length ? el("pre", { tabIndex: 0 }, el("code", {}, remedy.lines.join("\n"))) : null)));
}

/** Return what is known about some subjects as a list. */
export function facts(known) {
  return el("dl", { class: "facts-list" },
    known.flatMap((fact) => [el("dt", {}, fact.subject), el("dd", { class: "number" }, fact.text)]));
}

/** Return lines of text. */
export function listing(lines) {
  return el("pre", { class: "listing" }, el("code", {}, lines.map(line)));
}

/** Return a line of text; what has no room goes on below, behind the size at its beginning. */
function line(text) {
  const element = el("span", { class: "listing-line" }, text);
  element.style.setProperty("--indent", `${text.match(/^\s*(?:\+?[\d.]+ \w+\s+|→ )?/)[0].length}ch`);
  return element;
}
