// State timelines and status histories, which Grafana's packages do not export: drawn on their
// charts, with the units, mappings, thresholds and colors of the fields. Close to Grafana's
// pictures, not the same.
import {
  colorManipulator,
  FieldColorModeId,
  fieldColorModeRegistry,
  FieldType,
  getFieldDisplayName,
} from "@grafana/data";
import { Pagination, UPlotChart, useTheme2, VizLayout, VizLegend } from "@grafana/ui";
import { useMemo } from "react";
import uPlot from "uplot";
import { chartData, nameChart } from "./name_chart.js";

const PAGES_HEIGHT = 48;
const FONT_SIZE = 12;
const TEXT_PADDING = 8;

/** Return one row for each field that is not the time. */
function rowsOf(frames) {
  return frames.flatMap((frame) => {
    const time = frame.fields.find(({ type }) => type === FieldType.time);
    const others = time ? frame.fields.filter((field) => field !== time) : [];
    const row = { times: time?.values, interval: time?.config.interval };
    return others.map((field) => ({
      ...row,
      field,
      name: getFieldDisplayName(field, frame, frames),
    }));
  });
}

const isBlank = (value) => value === null || value === undefined;

/**
 * Return the boxes of a row of a state timeline; equal neighbors are one box, and a gap ends a box.
 */
function statesOf({ field, times, interval }, isMerged, end) {
  const boxes = [];
  times.forEach((from, i) => {
    if (isBlank(field.values[i])) return;
    const next = times[i + 1] ?? Infinity;
    const isGap = interval && next - from > interval * 1.5;
    const to = Math.min(isGap ? from + interval : next, end);
    const { text, color } = field.display(field.values[i]);
    const last = boxes.at(-1);
    if (isMerged && last?.text === text && last.to >= from) last.to = to;
    else boxes.push({ from, to, text, color });
  });
  return boxes;
}

/** Return the boxes of a row of a status history, one around each time. */
function statusesOf({ field, times, interval }, share) {
  const half = ((interval ?? times[1] - times[0]) * share) / 2;
  const points = times
    .map((time, i) => ({ time, value: field.values[i] }))
    .filter(({ value }) => !isBlank(value));
  return points.map(({ time, value }) => {
    const { text, color } = field.display(value);
    return { from: time - half, to: time + half, text, color };
  });
}

/** Write a text into a box, unless it is wider. */
function write(u, theme, text, color, box, align) {
  u.ctx.font = `${FONT_SIZE * uPlot.pxRatio}px ${theme.typography.fontFamily}`;
  if (u.ctx.measureText(text).width + TEXT_PADDING > box.width) return;
  u.ctx.fillStyle = theme.colors.getContrastText(color, 4);
  u.ctx.textBaseline = "middle";
  u.ctx.textAlign = align;
  const x = {
    left: box.left + TEXT_PADDING / 2,
    center: box.left + box.width / 2,
    right: box.left + box.width - TEXT_PADDING / 2,
  };
  u.ctx.fillText(text, x[align], box.top + box.height / 2);
}

function drawBox(
  u,
  theme,
  { from, to, text, color },
  { top, height },
  { custom, showValue, align },
) {
  const left = u.valToPos(from, "x", true);
  const box = { left, top, width: Math.max(1, u.valToPos(to, "x", true) - left), height };
  u.ctx.fillStyle = colorManipulator.alpha(color, custom.fillOpacity / 100);
  u.ctx.fillRect(box.left, box.top, box.width, box.height);
  if (showValue !== "never") write(u, theme, text, color, box, align);
}

function drawRows(boxesByRow, { options, theme, align }) {
  return (u) => {
    boxesByRow.forEach(({ row, boxes }, i) => {
      const edge = (share) => u.valToPos(boxesByRow.length - i - 0.5 + share / 2, "y", true);
      const line = {
        top: edge(options.rowHeight),
        height: edge(-options.rowHeight) - edge(options.rowHeight),
      };
      const look = { custom: row.field.config.custom, showValue: options.showValue, align };
      for (const box of boxes) drawBox(u, theme, box, line, look);
    });
  };
}

/** Return a legend item for each text that occurs; a continuous scale of colors has none. */
function legendItems(rows) {
  const items = new Map();
  for (const { field } of rows) {
    const mode = fieldColorModeRegistry.get(
      field.config.color?.mode ?? FieldColorModeId.Thresholds,
    );
    const isContinuous =
      mode.isByValue && mode.id !== FieldColorModeId.Thresholds && !field.config.mappings?.length;
    if (isContinuous) continue;
    for (const value of new Set(field.values)) {
      if (isBlank(value)) continue;
      const { text, color } = field.display(value);
      items.set(text, { label: text, color, yAxis: 1 });
    }
  }
  return [...items.values()];
}

function Timeline({ frames, range, width, height, options, timeZone, state, boxesOf, align }) {
  const theme = useTheme2();
  const all = useMemo(() => rowsOf(frames), [frames]);
  const perPage = options.perPage || all.length;
  const rows = all.slice(0, perPage);
  const pages = Math.ceil(all.length / perPage);
  Object.assign(state, { timeline: { rows: all.map(({ name }) => name), pages } });
  const config = useMemo(() => {
    const draw = drawRows(
      rows.map((row) => ({ row, boxes: boxesOf(row) })),
      { options, theme, align },
    );
    const names = rows.map(({ name }, i) => ({ name, at: rows.length - i - 0.5 }));
    const onDraw = (pixels) => (state.timeline.rowPixels = Math.round(pixels));
    return nameChart({ range, timeZone, theme, count: rows.length, names, gap: 16, draw, onDraw });
  }, [frames]);
  const items = legendItems(rows);
  const { showLegend, placement, displayMode } = options.legend;
  const legend = showLegend && items.length > 0 && (
    <VizLayout.Legend placement={placement}>
      <VizLegend placement={placement} displayMode={displayMode} items={items} />
    </VizLayout.Legend>
  );
  return (
    <>
      <VizLayout
        width={width}
        height={pages > 1 ? height - PAGES_HEIGHT : height}
        legend={legend || null}
      >
        {(w, h) => (
          <UPlotChart config={config} data={chartData(range, rows.length)} width={w} height={h} />
        )}
      </VizLayout>
      {pages > 1 && <Pagination currentPage={1} numberOfPages={pages} onNavigate={() => {}} />}
    </>
  );
}

export function StateTimeline(props) {
  const { options, range } = props;
  const boxesOf = (row) => statesOf(row, options.mergeValues, range.to.valueOf());
  return <Timeline {...props} boxesOf={boxesOf} align={options.alignValue} />;
}

export function StatusHistory(props) {
  return (
    <Timeline
      {...props}
      boxesOf={(row) => statusesOf(row, props.options.colWidth)}
      align="center"
    />
  );
}
