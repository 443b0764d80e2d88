// Why: what holds a rank's memory, what threatens it and what to set, in the exporter's words.

import { asked, el } from "./dom.js";
import { isLive } from "./history.js";
import { oomSection } from "./oom.js";
import { adviceList, facts, threatList } from "./words.js";

/** Draw the rank into `element` until `unmount`. */
export function mount(element, first) {
  const body = el("div", { class: "why", "aria-live": "off" }, el("p", { class: "soft" }, "Asking the exporter …"));
  element.append(body);
  const ending = new AbortController();
  let shown = "";
  let version = "";
  let isAsking = false;

  /** Ask again for each new sample, so that the words are about the state that the row shows. */
  async function update(rank) {
    const current = `${rank.sample_time} ${rank.state}`;
    if (current === version || isAsking) return;
    isAsking = true;
    const query = new URLSearchParams({ id: rank.id, gpu: rank.gpu.uuid });
    const found = await asked(`api/v1/rank?${query}`, ending.signal);
    isAsking = false;
    if (!found) return;
    version = current;
    draw(found, rank);
  }

  function draw(found, rank) {
    const text = JSON.stringify(found);
    if (text === shown) return;
    shown = text;
    body.replaceChildren(...sections(found, rank));
  }

  update(first);
  return { update, unmount: () => ending.abort() };
}

function sections(why, rank) {
  const oom = why.oom ? oomSection(why.oom) : null;
  // What a rank needs now comes before an error that it survived.
  const main = oom && rank.state === "oom" ? [oom] : [
    why.ending ? el("p", { class: "lead" }, why.ending) : null,
    paragraph(why.ending ? "What held the memory" : "What holds the memory", why.holds && `${why.holds}.`),
    paragraph("Would the next large allocation succeed?", why.next_request),
    isLive(rank) ? el("section", {}, el("h4", {}, "Threats"), threatList(why.threats ?? [])) : null,
    why.advice?.length ? el("section", {}, el("h4", {}, "What to set"), adviceList(why.advice)) : null,
    oom,
  ];
  return [
    el("div", { class: "why-main" }, main),
    el("div", {}, el("h4", {}, "Details"), facts(why.facts ?? [])),
  ];
}

function paragraph(title, text) {
  return text ? el("section", {}, el("h4", {}, title), el("p", {}, text)) : null;
}
