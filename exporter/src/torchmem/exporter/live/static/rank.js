// The details of one rank, in tabs: now, its memory map, and why.

import { copyButton, el, setText } from "./dom.js";
import * as memoryMap from "./memory_map.js";
import * as now from "./now.js";
import * as why from "./why.js";

const TABS = [
  { name: "now", label: "Now", mount: now.mount },
  { name: "map", label: "Memory map", mount: memoryMap.mount },
  { name: "why", label: "Why", mount: why.mount },
];

/** Return {element, update(gpu, rank), remove()}; `selection.tab` is the tab to show. */
export function createDetails(gpu, rank, selection) {
  const panel = el("div", { role: "tabpanel", id: `panel-${rank.id}`, tabIndex: 0, class: "panel" });
  const buttons = TABS.map((tab) => el(
    "button",
    {
      type: "button", role: "tab", id: `tab-${tab.name}-${rank.id}`, "aria-controls": panel.id,
      on: { click: () => show(tab), keydown: (event) => move(event, tab) },
    },
    tab.label,
  ));
  const title = el("h3", { class: "hidden" }, `Rank ${rank.rank} of ${rank.run}`);
  const element = el(
    "section", { class: "details", "aria-label": `Rank ${rank.rank}` },
    title,
    el("div", { class: "tabs" },
      el("div", { role: "tablist", "aria-label": "Views of the rank" }, buttons),
      copyButton(() => location.href, "Copy link")),
    panel,
  );
  let mounted = null;
  let current = { ...rank, gpu };

  function show(tab) {
    mounted?.unmount();
    panel.replaceChildren();
    buttons.forEach((button, index) => {
      const isShown = TABS[index] === tab;
      button.setAttribute("aria-selected", String(isShown));
      button.tabIndex = isShown ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", `tab-${tab.name}-${rank.id}`);
    selection.showTab(tab.name);
    mounted = tab.mount(panel, current);
  }

  function move(event, tab) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const index = (TABS.indexOf(tab) + step + TABS.length) % TABS.length;
    show(TABS[index]);
    buttons[index].focus();
  }

  show(TABS.find((tab) => tab.name === selection.tab) ?? TABS[0]);
  return {
    element,
    update(nextGpu, next) {
      current = { ...next, gpu: nextGpu };
      setText(title, `Rank ${next.rank} of ${next.run}`);
      mounted.update(current);
    },
    remove: () => mounted.unmount(),
  };
}
