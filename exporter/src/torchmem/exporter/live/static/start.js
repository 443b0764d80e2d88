// What the page shows while no rank is there: what is missing, and the ways to start one.

import { copyButton, el, setText } from "./dom.js";

const WAYS = [
  ["In your training script, before the training loop", "from torchmem import sdk\nsdk.instrument()"],
  ["Or without changing the script", "torchmem run -- python train.py"],
  ["Or look around first, with a simulated training that opens a page of its own", "torchmem demo --listen 127.0.0.1:9848"],
];

/** Return {element, update(state)}. */
export function createStart() {
  const place = el("code");
  const heading = el("h2", { id: "start-title" });
  const element = el("section", { class: "start", "aria-labelledby": "start-title", hidden: true },
    heading,
    el("p", {}, "The exporter works, but no training process has reported to it yet. Start one on this machine; it appears here by itself."),
    el("ol", { class: "ways" }, WAYS.map(([title, text]) => el("li", {},
      el("h3", {}, title),
      el("div", { class: "command" }, el("pre", { tabIndex: 0 }, el("code", {}, text)), copyButton(() => text))))),
    el("p", { class: "soft" }, "A training that runs and does not appear? It must write to the directory that this exporter reads, ",
      place, ", also from inside a container. ", el("code", {}, "torchmem doctor"), " checks it."));
  return {
    element,
    update(state) {
      const isEmpty = !state.waiting.length && state.gpus.every((gpu) => !gpu.ranks.length);
      element.hidden = !isEmpty;
      setText(heading, `No training on ${state.node} yet`);
      setText(place, state.run_dir ?? "TORCHMEM_RUN_DIR");
    },
  };
}
