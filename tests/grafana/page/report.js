// What can be told of a drawn board without looking: what is in each panel, and what of it cannot
// be seen.

const SLACK = 2; // pixels by which an element may stand over an edge

const textOf = (element) => element.textContent.replace(/\s+/g, " ").trim();

/** Return the columns of which the right edge is out of sight, and the first rows of cells. */
function readTable(section, columns) {
  const grid = section.querySelector("[role=grid]");
  if (!grid) return undefined;
  const edge = grid.getBoundingClientRect().left + grid.clientWidth + SLACK;
  const headers = [...grid.querySelectorAll("[role=columnheader]")];
  const inSight = new Set(
    headers.filter((header) => header.getBoundingClientRect().right <= edge).map(textOf),
  );
  const rows = [...grid.querySelectorAll("[role=row]")].map((row) =>
    [...row.querySelectorAll("[role=gridcell]")].map(textOf),
  );
  return {
    outOfSight: columns.filter((name) => !inSight.has(name)),
    cells: rows.filter((cells) => cells.length > 0),
  };
}

/** Return the nearest ancestor within the section that scrolls or cuts off what does not fit. */
function viewport(element, section) {
  const cuts = (each) => /auto|scroll|hidden/.test(getComputedStyle(each).overflowY);
  let each = element.parentElement;
  while (each !== section && !cuts(each)) each = each.parentElement;
  return each;
}

// An entry of a legend that is a list, and one that is a row of a table.
const LEGEND_ENTRIES =
  '[data-testid^="data-testid VizLegend series"], table tbody tr:has(> td button[title])';

function readLegend(section, noValue) {
  const entries = [...section.querySelectorAll(LEGEND_ENTRIES)];
  if (entries.length === 0) return { labels: [], hidden: [], repeated: [], filledBlanks: [] };
  const labels = entries.map((entry) => textOf(entry.querySelector("button") ?? entry));
  const box = viewport(entries[0], section).getBoundingClientRect();
  const isHidden = ({ bottom, right }) => bottom > box.bottom + SLACK || right > box.right + SLACK;
  const hidden = labels.filter((_, i) => isHidden(entries[i].getBoundingClientRect()));
  return {
    labels,
    hidden,
    filledBlanks: labels.filter((_, i) => noValue && textOf(entries[i]).includes(noValue)),
    repeated: [...new Set(labels.filter((label, i) => labels.indexOf(label) !== i))],
  };
}

/** Return the ancestor that cuts off a part of a text; undefined where one can scroll to it. */
function cutter(element, { left, right, top, bottom }, section) {
  for (let each = element; each !== section; each = each.parentElement) {
    const { overflowX, overflowY } = getComputedStyle(each);
    if (/auto|scroll/.test(overflowX) || each.getAttribute("role") === "grid") return undefined;
    const box = each.getBoundingClientRect();
    const isWide = left < box.left - SLACK || right > box.right + SLACK;
    const isHigh = top < box.top - SLACK || bottom > box.bottom + SLACK;
    if ((overflowX !== "visible" && isWide) || (overflowY !== "visible" && isHigh)) return each;
  }
  return undefined;
}

/** Return the texts of which an edge or an ellipsis hides a part. */
function readClipped(section) {
  const clipped = [];
  const walker = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest("style, svg")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (box.width > 0 && cutter(element, box, section)) clipped.push(node.textContent.trim());
  }
  return clipped;
}

function reportPanel(item, row) {
  const { panel, state, key, isFolded } = item;
  const section = document.getElementById(key);
  const box = section.getBoundingClientRect();
  const { table, series, ...rest } = state;
  return {
    ...rest,
    id: panel.id,
    type: panel.type,
    row,
    isFolded,
    top: Math.round(box.top + window.scrollY),
    bottom: Math.round(box.bottom + window.scrollY),
    message: section.querySelector(".message")?.textContent ?? state.values?.[0]?.text,
    series: series?.length,
    legend: readLegend(section, panel.fieldConfig?.defaults.noValue),
    table: table && { ...table, ...readTable(section, table.columns) },
    clipped: readClipped(section),
  };
}

/**
 * Return the report: variables, events, errors, rows, and panels; folded is what a user has to open
 * first.
 */
export function makeReport({ board, range, variables, annotations: events }, items, { errors }) {
  let row;
  const panels = [];
  for (const item of items) {
    if (item.panel.type === "row") row = item.panel.title;
    else panels.push(reportPanel(item, row));
  }
  const rows = items.filter(({ panel }) => panel.type === "row").map(({ panel }) => panel);
  return {
    title: board.title,
    from: range.from.toISOString(),
    to: range.to.toISOString(),
    variables: variables.list.map(({ name, values, error }) => ({ name, values, error })),
    events: events.map(({ name, time }) => ({ name, time: new Date(time).toISOString() })),
    errors,
    rows: rows.map(({ title, collapsed }) => ({ title, isFolded: Boolean(collapsed) })),
    panels,
  };
}
