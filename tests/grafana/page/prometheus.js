// Prometheus' HTTP API, and the queries of a panel as Grafana's Prometheus data source sends them.
import { rangeUtil } from "@grafana/data";
import { asHeatmaps, asSeries, asTables } from "./frames.js";

const SCRAPE_INTERVAL = "10s"; // `timeInterval` in dashboards/provisioning/datasources
const MAX_POINTS = 11000;

async function ask(path, parameters, method = "POST") {
  const body = new URLSearchParams(parameters);
  const url = `prometheus/api/v1/${path}`;
  const response = await (method === "POST"
    ? fetch(url, { method, body })
    : fetch(`${url}?${body}`));
  const answer = await response.json();
  if (answer.status !== "success") throw new Error(answer.error);
  return answer;
}

export async function labelValues(label, selector, range) {
  const match = selector ? [["match[]", selector]] : [];
  const times = [
    ["start", Math.floor(range.from / 1000)],
    ["end", Math.ceil(range.to / 1000)],
  ];
  return (await ask(`label/${label}/values`, [...match, ...times], "GET")).data;
}

export async function query(expression, time) {
  return (await ask("query", { query: expression, time: time / 1000 })).data;
}

export async function queryRange(expression, start, end, step) {
  return (await ask("query_range", { query: expression, start, end, step })).data;
}

/**
 * Return $__interval, step and $__rate_interval of a target, from time range and width in pixels.
 */
function intervalsOf(panel, target, range, width) {
  const minimum = target.interval || panel.interval || SCRAPE_INTERVAL;
  const points = panel.maxDataPoints ?? Math.max(1, Math.floor(width));
  const { interval, intervalMs } = rangeUtil.calculateInterval(range, points, minimum);
  const step = Math.max(intervalMs / 1000, Math.ceil((range.to - range.from) / 1000 / MAX_POINTS));
  const scrape = rangeUtil.intervalToSeconds(minimum);
  return { interval, intervalMs, step, rateInterval: `${Math.max(step + scrape, 4 * scrape)}s` };
}

function send(expression, isInstant, range, step) {
  if (isInstant) return query(expression, range.to);
  const align = (time) => Math.floor(time / 1000 / step) * step; // as Grafana's backend does
  return queryRange(expression, align(range.from), align(range.to), step);
}

async function run(panel, { target, isInstant }, range, width, replace) {
  const intervals = intervalsOf(panel, target, range, width);
  const { step } = intervals;
  const expression = replace(target.expr, intervals);
  const report = { refId: target.refId, expr: expression, isInstant };
  try {
    const frames = asSeries(
      target,
      expression,
      await send(expression, isInstant, range, step),
      isInstant ? undefined : step * 1000,
    );
    report.series = frames.filter((frame) => frame.length > 0).length;
    return { report, frames, format: target.format ?? "time_series" };
  } catch (error) {
    return { report: { ...report, error: error.message }, frames: [], format: "error" };
  }
}

/** Run every query of a panel; return its frames and a report of each query. */
export async function queryPanel(panel, range, width, replace) {
  const targets = (panel.targets ?? []).filter(({ hide, expr }) => !hide && expr);
  const requests = targets.flatMap((target) => [
    ...((target.range ?? !target.instant) ? [{ target, isInstant: false }] : []),
    ...(target.instant ? [{ target, isInstant: true }] : []),
  ]);
  const results = await Promise.all(
    requests.map((request) => run(panel, request, range, width, replace)),
  );
  const framesOf = (...formats) =>
    results.filter(({ format }) => formats.includes(format)).flatMap(({ frames }) => frames);
  return {
    queries: results.map(({ report }) => report),
    frames: [
      ...framesOf("time_series"),
      ...asTables(framesOf("table")),
      ...asHeatmaps(framesOf("heatmap")),
    ],
  };
}
