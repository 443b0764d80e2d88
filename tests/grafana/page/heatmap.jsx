// A heatmap of buckets, which Grafana's packages do not export. Close to Grafana's picture, not the
// same.
import {
  colorManipulator,
  DataFrameType,
  formattedValueToString,
  getFieldDisplayName,
  getValueFormat,
  outerJoinDataFrames,
} from "@grafana/data";
import { UPlotChart, useTheme2 } from "@grafana/ui";
import * as chromatic from "d3-scale-chromatic";
import { useMemo } from "react";
import { chartData, nameChart } from "./name_chart.js";

const SCALE_HEIGHT = 34;
const LABEL_HEIGHT = 16;
// Schemes that run from light to dark: Grafana turns them around in the dark theme. The others run
// from dark to light.
const FROM_LIGHT = [
  ...["Blues", "Greens", "Greys", "Oranges", "Purples", "Reds", "BuGn", "BuPu", "GnBu", "OrRd"],
  ...["PuBuGn", "PuBu", "PuRd", "RdPu", "YlGnBu", "YlGn", "YlOrBr", "YlOrRd"],
];
const FROM_DARK = ["Turbo", "Cividis", "Viridis", "Magma", "Inferno", "Plasma", "Warm", "Cool"];

function isTurned(scheme, theme) {
  if (FROM_LIGHT.includes(scheme)) return theme.isDark;
  return FROM_DARK.includes(scheme) ? theme.isLight : true;
}

function paletteOf({ mode, scheme, fill, steps, scale, exponent, reverse }, theme) {
  const shares = Array.from({ length: steps }, (_, i) => i / (steps - 1));
  if (mode === "opacity") {
    const color = theme.visualization.getColorByName(fill);
    return shares.map((share) =>
      colorManipulator.alpha(color, scale === "exponential" ? share ** exponent : share),
    );
  }
  const colors = shares.map(chromatic[`interpolate${scheme}`]);
  return reverse !== isTurned(scheme, theme) ? colors.reverse() : colors;
}

/** Return the colors by count: `low` and `high` are the counts at the ends of the scale. */
function scaleOf(buckets, options, theme) {
  const counts = buckets
    .flatMap(({ values }) => values)
    .filter((count) => count !== null && count > options.filterValues.le);
  const low = options.color.min ?? Math.min(...counts);
  const high = options.color.max ?? Math.max(...counts);
  const colors = paletteOf(options.color, theme);
  const step = (count) => Math.floor(((count - low) / (high - low || 1)) * colors.length);
  return {
    low,
    high,
    colors,
    colorOf: (count) => colors[Math.max(0, Math.min(colors.length - 1, step(count)))],
  };
}

function drawCells(time, buckets, options, colorOf) {
  const step = time.config.interval ?? time.values[1] - time.values[0];
  return (u) => {
    const edge = (value, scale) => u.valToPos(value, scale, true);
    buckets.forEach(({ values }, i) => {
      const [bottom, top] = [edge(i, "y"), edge(i + 1, "y")];
      values.forEach((count, j) => {
        if (count === null || count <= options.filterValues.le) return;
        const [left, right] = [edge(time.values[j] - step, "x"), edge(time.values[j], "x")];
        u.ctx.fillStyle = colorOf(count);
        u.ctx.fillRect(
          left,
          top,
          Math.max(1, right - left - options.cellGap),
          Math.max(1, bottom - top - options.cellGap),
        );
      });
    });
  };
}

/** Return one frame with a field for each row: a histogram, or all series joined by their times. */
function rowsOf(frames) {
  const histogram = frames.find(({ meta }) => meta?.type === DataFrameType.HeatmapRows);
  return histogram ?? outerJoinDataFrames({ frames: byNumber(frames), keepDisplayNames: true });
}

/** Sort series whose names are all numbers by these, as Grafana's heatmap does. */
function byNumber(frames) {
  const number = (frame) => Number(frame.fields[1] && getFieldDisplayName(frame.fields[1], frame));
  return frames.every((frame) => Number.isFinite(number(frame)))
    ? [...frames].sort((a, b) => number(a) - number(b))
    : frames;
}

/**
 * Return the labels of the rows, as many as fit: of buckets at their edges, of other series in the
 * middle.
 */
function namesOf(frame, rows, { unit, decimals } = {}, height) {
  const label = (text) =>
    unit && Number.isFinite(Number(text))
      ? formattedValueToString(getValueFormat(unit)(Number(text), decimals))
      : text;
  const isHistogram = rows[0].labels?.le !== undefined;
  const labels = rows.map((row) => label(isHistogram ? row.name : getFieldDisplayName(row, frame)));
  const every = Math.max(1, Math.ceil(((labels.length + 1) * LABEL_HEIGHT) / height));
  const names = isHistogram
    ? ["0", ...labels].map((name, at) => ({ name, at }))
    : labels.map((name, i) => ({ name, at: i + 0.5 }));
  return names.filter((_, i) => i % every === 0);
}

export function Heatmap({ frames, range, width, height, options, timeZone, state }) {
  const theme = useTheme2();
  const { config, scale, format, rows } = useMemo(() => {
    const frame = rowsOf(frames);
    const [time, ...buckets] = frame.fields;
    const scale = scaleOf(buckets, options, theme);
    const names = namesOf(frame, buckets, options.yAxis, height);
    const draw = drawCells(time, buckets, options, scale.colorOf);
    const config = nameChart({
      range,
      timeZone,
      theme,
      count: buckets.length,
      names,
      gap: 5,
      draw,
    });
    const format = (count) => formattedValueToString(frame.fields[1].display(count));
    return { config, scale, format, rows: buckets.length };
  }, [frames]);
  state.heatmap = { low: scale.low, high: scale.high, rows };
  const isShown = options.legend.show;
  return (
    <>
      <UPlotChart
        config={config}
        data={chartData(range, 1)}
        width={width}
        height={isShown ? height - SCALE_HEIGHT : height}
      />
      {isShown && (
        <div className="scale">
          <div style={{ background: `linear-gradient(90deg, ${scale.colors.join(",")})` }} />
          <span>{format(scale.low)}</span>
          <span>{format(scale.high)}</span>
        </div>
      )}
    </>
  );
}
