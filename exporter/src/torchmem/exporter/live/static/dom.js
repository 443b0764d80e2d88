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
