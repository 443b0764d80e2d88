// Grafana's own variables: intervals, the time range, and the field or row that a link belongs to.
import { dateTimeFormat } from "@grafana/data";

function valueOf(path, context) {
  const raw = context?.field?.values[context.rowIndex] ?? context?.calculatedValue?.numeric;
  if (!path || path === "raw") return raw;
  return path === "time" ? dateTimeFormat(raw) : context?.field?.display?.(raw)[path];
}

function cellOf(path, context) {
  const [, plain, quoted] = path?.match(/^fields(?:\.(\w+)|\[["']?(.*?)["']?\])/) ?? [];
  const key = plain ?? quoted;
  const isNamed = ({ state, config, name }, i) =>
    [state?.displayName, config.displayName, name, String(i)].includes(key);
  const field = context?.frame?.fields.find(isNamed);
  return field && context.rowIndex !== undefined ? field.values[context.rowIndex] : undefined;
}

function fieldOf(path, context) {
  return path === "name"
    ? context?.field?.name
    : context?.field?.labels?.[path?.replace(/^labels\./, "")];
}

/** Return the value of a variable of Grafana's own; undefined for any other name. */
export function builtIn(name, path, scope, { range, board, byName, replace }) {
  const milliseconds = range.to - range.from;
  const context = scope.__dataContext?.value;
  const time = (moment) => (path === "date" ? moment.toISOString() : moment.valueOf());
  const values = {
    __range: () => `${Math.floor(milliseconds / 1000)}s`,
    __range_s: () => Math.floor(milliseconds / 1000),
    __range_ms: () => milliseconds,
    __interval: () => scope.interval,
    __interval_ms: () => scope.intervalMs,
    __rate_interval: () => scope.rateInterval,
    __from: () => time(range.from),
    __to: () => time(range.to),
    __dashboard: () => (path === "uid" ? board.uid : board.title),
    __url_time_range: () => `from=${range.from.valueOf()}&to=${range.to.valueOf()}`,
    __all_variables: () =>
      [...byName.keys()].map((key) => replace(`\${${key}:queryparam}`)).join("&"),
    __series: () => context?.frame?.name,
    __field: () => fieldOf(path, context),
    __value: () => valueOf(path, context),
    __data: () => cellOf(path, context),
  };
  return values[name]?.();
}
