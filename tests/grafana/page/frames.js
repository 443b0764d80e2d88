// The data frames that Grafana's Prometheus data source makes of an answer: series, tables, and
// heatmaps.
import { DataFrameType, FieldType } from "@grafana/data";
import { groupBy } from "lodash";

function numberOf(text) {
  if (/inf/i.test(text)) return text.startsWith("-") ? -Infinity : Infinity;
  return Number(text);
}

/** Return the name that a target's legend gives a series. */
function legendOf(format, labels, expression) {
  const { __name__: name = "", ...others } = labels;
  if (format === "__auto") return Object.keys(labels).length > 0 ? "" : expression;
  if (format) return format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? "");
  const pairs = Object.entries(others).map(([label, value]) => `${label}="${value}"`);
  if (pairs.length === 0) return name || expression;
  return `${name}{${pairs.join(", ")}}`;
}

function seriesFrame(target, expression, labels, points, interval) {
  const legend = legendOf(target.legendFormat, labels, expression);
  const times = points.map(([seconds]) => seconds * 1000);
  const values = points.map(([, text]) => numberOf(text));
  return {
    refId: target.refId,
    name: legend || undefined,
    meta: { type: DataFrameType.TimeSeriesMulti },
    length: points.length,
    fields: [
      { name: "Time", type: FieldType.time, config: interval ? { interval } : {}, values: times },
      {
        name: "Value",
        type: FieldType.number,
        labels,
        config: legend ? { displayNameFromDS: legend } : {},
        values,
      },
    ],
  };
}

/** Return one frame for each series of an answer; `interval` is the step in milliseconds. */
export function asSeries(target, expression, { resultType, result }, interval) {
  if (resultType === "scalar" || resultType === "string")
    return [seriesFrame(target, expression, {}, [result])];
  if (result.length === 0) return [{ refId: target.refId, fields: [], length: 0, meta: {} }];
  return result.map(({ metric, values, value }) =>
    seriesFrame(target, expression, metric, values ?? [value], interval),
  );
}

function tableOf(refId, frames, valueName) {
  const filled = frames.filter((frame) => frame.fields.length > 0);
  const labels = [
    ...new Set(filled.flatMap((frame) => Object.keys(frame.fields[1].labels).sort())),
  ];
  const column = (cell) =>
    filled.flatMap((frame) => frame.fields[1].values.map((_, row) => cell(frame, row)));
  const times = column((frame, row) => frame.fields[0].values[row]);
  const labelField = (name) => {
    const values = column((frame) => frame.fields[1].labels[name] ?? "");
    return { name, type: FieldType.string, config: { filterable: true }, values };
  };
  const value = column((frame, row) => frame.fields[1].values[row]);
  return {
    refId,
    meta: frames[0].meta,
    length: times.length,
    fields: [
      { name: "Time", type: FieldType.time, config: {}, values: times },
      ...labels.map(labelField),
      { name: valueName, type: FieldType.number, config: {}, values: value },
    ],
  };
}

/** Return one table for each query: the time, a column for each label, and the value. */
export function asTables(frames) {
  const byQuery = Object.entries(groupBy(frames, "refId"));
  if (frames.every((frame) => frame.length === 0) && byQuery.length < 2) return frames;
  return byQuery.map(([refId, group]) =>
    tableOf(refId, group, byQuery.length > 1 ? `Value #${refId}` : "Value"),
  );
}

function heatmapOf(buckets) {
  const bound = (frame) => numberOf(frame.fields[1].labels.le ?? frame.name);
  const sorted = [...buckets].sort((a, b) => bound(a) - bound(b));
  const times = [...new Set(sorted.flatMap((frame) => frame.fields[0].values))].sort(
    (a, b) => a - b,
  );
  const counts = sorted.map(({ fields: [time, value] }) => {
    const at = new Map(time.values.map((moment, i) => [moment, value.values[i]]));
    return times.map((moment) => at.get(moment) ?? null);
  });
  const within = (bucket, i) => {
    const count = counts[bucket][i];
    return count === null || bucket === 0
      ? count
      : Math.max(0, count - (counts[bucket - 1][i] ?? 0));
  };
  const fields = sorted.map((frame, bucket) => {
    const values = times.map((_, i) => within(bucket, i));
    return { ...frame.fields[1], name: frame.fields[1].labels.le ?? frame.name, values };
  });
  const time = { ...sorted[0].fields[0], values: times };
  return {
    ...sorted[0],
    meta: { type: DataFrameType.HeatmapRows },
    length: times.length,
    fields: [time, ...fields],
  };
}

/**
 * Return one frame for each histogram: a field for each bucket, with counts that are not
 * cumulative.
 */
export function asHeatmaps(frames) {
  const filled = frames.filter((frame) => frame.fields.length > 0);
  const histograms = groupBy(filled, ({ refId, fields }) => {
    const { le, ...others } = fields[1].labels;
    return JSON.stringify([refId, others]);
  });
  return Object.values(histograms).map(heatmapOf);
}
