// Why: what holds a rank's memory, what threatens it and what to set, in the exporter's words.

import { el } from "./dom.js";
import { bytes, percent } from "./format.js";

const MIN_MILLISECONDS = 2000;

/** Draw the rank into `element` until `unmount`. */
export function mount(element, first) {
  const body = el("div", { class: "why", "aria-live": "off" }, el("p", { class: "soft" }, "Asking the exporter …"));
  element.append(body);
  let shown = "";
  let askedAt = -Infinity;
  let version = "";
  const ending = new AbortController();

  async function update(rank) {
    const current = `${rank.sample_time} ${rank.state}`;
    if (current === version || performance.now() - askedAt < MIN_MILLISECONDS) return;
    [version, askedAt] = [current, performance.now()];
    const query = new URLSearchParams({ id: rank.id, gpu: rank.gpu.uuid });
    try {
      const answer = await fetch(`api/v1/rank?${query}`, { cache: "no-store", signal: ending.signal });
      if (answer.ok) draw(await answer.text(), rank);
    } catch {
      version = "";
    }
  }

  function draw(text, rank) {
    if (text === shown) return;
    shown = text;
    body.replaceChildren(...sections(JSON.parse(text), rank));
  }

  update(first);
  return { update, unmount: () => ending.abort() };
}

function sections(why, rank) {
  return [
    el("div", { class: "why-main" },
      paragraph(null, why.ending),
      paragraph(why.ending ? "What held the memory" : "What holds the memory", why.holds && `${why.holds}.`),
      paragraph("Would the next large allocation succeed?", why.next_request),
      threats(why, rank),
      advice("What to set", why.advice),
      why.oom ? oom(why.oom, rank) : null),
    el("div", {}, el("h4", {}, "Details"), facts(why.facts ?? [])),
  ];
}

function paragraph(title, text) {
  if (!text) return null;
  return title ? el("section", {}, el("h4", {}, title), el("p", {}, text)) : el("p", { class: "lead" }, text);
}

function threats(why, rank) {
  if (rank.state !== "running" && rank.state !== "stalled") return null;
  return el("section", {}, el("h4", {}, "Threats"), threatList(why.threats ?? []));
}

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

function advice(title, remedies) {
  if (!remedies?.length) return null;
  return el("section", {}, el("h4", {}, title), adviceList(remedies));
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

function oom(report, rank) {
  const time = new Date(report.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
  return el("section", { class: "oom" },
    el("h4", {}, `OutOfMemoryError at ${time}`),
    el("p", { class: "lead" }, `${report.summary}.`),
    el("p", {}, report.reason),
    report.before ? el("p", { class: "soft" }, report.before) : null,
    memory(report.memory ?? [], rank),
    stack(report),
    advice("What to do, most promising first", report.advice));
}

function memory(uses, rank) {
  if (!uses.length) return null;
  const total = uses.reduce((sum, use) => sum + use.bytes, 0);
  const rows = uses.map((use) => el("tr", {},
    el("th", { scope: "row" }, use.label),
    el("td", { class: "number" }, bytes(use.bytes)),
    el("td", { class: "number soft" }, percent(use.bytes / total))));
  return el("section", {}, el("h4", {}, `Memory of ${rank.gpu.name ?? "the GPU"} at that time`),
    el("table", { class: "parts" }, el("tbody", {}, rows)));
}

function stack(report) {
  if (report.hidden) {
    return el("p", { class: "soft" }, "Only the rank's own user can see the call stack: open this page on the node as that user, run ",
      el("code", {}, "torchmem oom"), ", or set passwords for this page.");
  }
  if (!report.stack?.length) return null;
  const items = report.stack.map((call) => el("li", { class: call.package ? "foreign" : "own" },
    el("code", {}, call.place), " ", el("span", {}, call.function)));
  return el("section", {}, el("h4", {}, "Where the memory was requested"), el("ol", { class: "stack" }, items));
}
