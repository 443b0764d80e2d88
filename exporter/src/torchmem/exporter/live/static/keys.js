// The keyboard: one key each for what the pointer does, and a list of them.

import { el } from "./dom.js";

const STORED = "torchmem-keys";

/**
 * Call the action of a key that is pressed outside of fields; `actions` has {keys, text, act}. Return
 * what shows the list. Single keys can be turned off, for those whose tools press them by chance.
 */
export function listen(actions) {
  const isOn = el("input", { type: "checkbox", checked: read() });
  isOn.addEventListener("change", () => write(isOn.checked));
  const close = el("button", { type: "button", class: "more", on: { click: () => dialog.close() } }, "Close");
  const dialog = el("dialog", { class: "help", "aria-labelledby": "help-title" },
    el("header", {}, el("h2", { id: "help-title" }, "Keys"), close),
    el("dl", { class: "facts-list" }, [...actions, { keys: ["?"], text: "this list" }, { keys: ["Tab", "Enter"], text: "move, and open what has the focus" }]
      .flatMap(({ keys, text }) => [el("dt", {}, keys.map((key) => el("kbd", {}, key))), el("dd", {}, text)])),
    el("label", {}, isOn, " single keys are on"));
  document.body.append(dialog);
  const show = () => dialog.open || dialog.showModal();
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.closest("input, textarea, select, canvas")) return;
    const action = event.key === "?" ? show : actions.find(({ keys }) => keys.includes(event.key))?.act;
    if (!action || (event.key !== "Escape" && !isOn.checked)) return;
    event.preventDefault();
    action(event.key);
  });
  return show;
}

function read() {
  try {
    return localStorage.getItem(STORED) !== "off";
  } catch {
    return true;
  }
}

function write(value) {
  try {
    localStorage.setItem(STORED, value ? "on" : "off");
  } catch {
    // Storage is switched off: the choice lasts until the page is closed.
  }
}
