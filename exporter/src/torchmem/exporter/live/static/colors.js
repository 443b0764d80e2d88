// The colors of parts and states, from the custom properties of colors.css.

/** Return the name of the custom property for a part of the legend. */
export function property(name) {
  return `--part-${name.replaceAll("_", "-")}`;
}

/**
 * Return what a part is filled with: free memory is paler, as on the dashboards, and memory that
 * waits for a stream has stripes in the color of tensors.
 */
export function fill(name) {
  const full = `var(${property(name)})`;
  if (name === "pending") return `repeating-linear-gradient(45deg, ${full} 0 3px, var(--surface) 3px 5px)`;
  return name === "free" ? `color-mix(in srgb, ${full} calc(100% * var(--free-opacity)), var(--surface))` : full;
}

/** Return the color of a part as CSS. */
export function color(name) {
  return style(property(name));
}

/** Return the current value of a custom property. */
export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

/** Call the listener when the browser changes between dark and light; return a function that ends this. */
export function onTheme(listener) {
  prefersDark.addEventListener("change", listener);
  return () => prefersDark.removeEventListener("change", listener);
}
