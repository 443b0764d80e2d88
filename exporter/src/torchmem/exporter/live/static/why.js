// Why: what threatens a rank and what to set, in the words of `torchmem report`.

import { el } from "./dom.js";

/** Draw the rank into `element` until `unmount`. */
export function mount(element, first) {
  const list = el("ul", { class: "threats" });
  element.append(el("h4", {}, "What threatens"), list);

  function update(rank) {
    const texts = (rank.why ?? []).map((why) => why.text);
    list.replaceChildren(...(texts.length ? texts : ["Nothing at the moment."]).map((text) => el("li", {}, text)));
  }

  update(first);
  return { update, unmount() {} };
}
