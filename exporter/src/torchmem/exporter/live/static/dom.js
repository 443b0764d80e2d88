// Elements without markup: text from other users is always inserted as text.

/**
 * Return a new element. Properties are set as properties; `class`, `role`, `aria-*` and `data-*` as
 * attributes; `on` holds event listeners. Children are nodes or text; null is left out.
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "class" || name === "role" || name === "for" || name.includes("-")) {
      element.setAttribute(name, value);
    } else {
      element[name] = value;
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set the text of an element, without touching the document if it is the same. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Return a function that calls `draw` with a value, unless the value is equal to the one before. */
export function onChange(draw) {
  let before;
  return (value) => {
    const text = JSON.stringify(value);
    if (text !== before) draw(value);
    before = text;
  };
}

/**
 * Make the children of `parent` those of `items`, in their order. A child is kept while its key is:
 * `create(item)` returns {element, update(item)}.
 */
export function keyed(parent, items, keyOf, create) {
  const before = parent.torchmemChildren ?? new Map();
  const now = new Map();
  let position = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (now.has(key)) continue;
    const child = before.get(key) ?? create(item);
    now.set(key, child);
    child.update(item);
    if (child.element === position) position = position.nextSibling;
    else parent.insertBefore(child.element, position);
  }
  for (const [key, child] of before) {
    if (now.has(key)) continue;
    child.remove?.();
    child.element.remove();
  }
  parent.torchmemChildren = now;
}

/** Return the JSON document at a path; null if there is none, or no answer. */
export async function asked(path, signal) {
  try {
    const answer = await fetch(path, { cache: "no-store", signal });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

/** Return a button that copies `text()`, and says so. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "more copy", on: { click: async () => {
    setText(button, (await copied(text())) ? "Copied" : "Press Ctrl+C");
    setTimeout(() => setText(button, label), 2000);
  } } }, label);
  return button;
}

/** Copy a text; without TLS, browsers have only the old way, which needs a selection. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "hidden", value: text, readOnly: true });
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    if (isCopied) area.remove();
    else area.addEventListener("blur", () => area.remove());
    return isCopied;
  }
}
