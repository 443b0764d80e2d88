// Where panels go: rows, collapsed rows, and panels and rows that repeat over the values of a
// variable.

const COLUMNS = 24;
const MAX_PER_ROW = 4; // of a panel that repeats, unless it says otherwise

/**
 * Split the panels of a board into rows; panels above the first row, or after a collapsed one, have
 * no row.
 */
function rowsOf(panels) {
  const rows = [{ panels: [] }];
  for (const panel of panels) {
    if (panel.type !== "row") {
      rows.at(-1).panels.push(panel);
    } else if (panel.collapsed) {
      rows.push({ row: panel, panels: panel.panels ?? [] }, { panels: [] });
    } else {
      rows.push({ row: panel, panels: [] });
    }
  }
  return rows;
}

function byPlace(a, b) {
  return a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x;
}

/**
 * Return the copies of a panel in the scope of its row, and by how many grid units they outgrow one
 * panel.
 */
function copies(panel, variables, scope) {
  const { x, y, w, h } = panel.gridPos;
  const values = panel.repeat ? variables.scopesOf(panel.repeat) : [];
  if (values.length === 0) return { items: [{ panel, scope, place: { x, y, w, h } }], growth: 0 };
  const merged = values.map((value) => ({
    ...scope,
    variables: { ...scope.variables, ...value.variables },
  }));
  const isVertical = panel.repeatDirection === "v";
  const perLine = isVertical ? 1 : Math.min(values.length, panel.maxPerRow ?? MAX_PER_ROW);
  const width = isVertical ? w : Math.floor(COLUMNS / perLine);
  const items = merged.map((own, i) => {
    const place = {
      x: isVertical ? x : (i % perLine) * width,
      y: y + Math.floor(i / perLine) * h,
      w: width,
      h,
    };
    return { panel, scope: own, place };
  });
  return { items, growth: (Math.ceil(values.length / perLine) - 1) * h };
}

function bottomOf(panels, start) {
  return Math.max(start, ...panels.map(({ gridPos }) => gridPos.y + gridPos.h));
}

/**
 * Return every visible row and panel with its place in grid units, after rows are opened and panels
 * repeated.
 */
export function placed(panels, variables, openRows = false) {
  const items = [];
  let shift = 0; // how far everything that follows has moved down
  const add = (item) => items.push({ ...item, key: `item-${items.length}`, state: {} });
  const addPanels = (members, scope, isFolded) => {
    for (const panel of [...members].sort(byPlace)) {
      const { items: own, growth } = copies(panel, variables, scope);
      for (const item of own)
        add({ ...item, isFolded, place: { ...item.place, y: item.place.y + shift } });
      shift += growth;
    }
  };
  for (const { row, panels: members } of rowsOf(panels)) {
    const scopes = row?.repeat ? variables.scopesOf(row.repeat) : [];
    const isOpen = !row?.collapsed || openRows;
    const height = row ? bottomOf(members, row.gridPos.y + 1) - row.gridPos.y : 0;
    (scopes.length ? scopes : [{}]).forEach((scope, copy) => {
      if (copy > 0) shift += isOpen ? height : 1;
      if (row)
        add({
          panel: row,
          scope,
          isCollapsed: !isOpen,
          place: { ...row.gridPos, x: 0, w: COLUMNS, y: row.gridPos.y + shift },
        });
      if (isOpen) addPanels(members, scope, Boolean(row?.collapsed));
    });
    // On the board, a collapsed row takes one line, whatever its panels' own places say.
    if (row?.collapsed && isOpen) shift += height - 1;
  }
  return items;
}
