// The last ten minutes of each GPU: what the exporter has kept, and the states since then.

import { asked } from "./dom.js";

export const SECONDS = 600;
const MAX_POINTS = 722;

const series = new Map();
let groupOf = new Map();
let groups = [];

/** Return the columns of a GPU: times, and the bytes of each of the state's groups. */
export const ofGpu = (gpu) => series.get(gpu.uuid);

/** Ask for what the exporter has kept; what it does not know is forgotten. */
export async function load() {
  const known = await asked("api/v1/history");
  if (!known) return;
  for (const [uuid, { times, values }] of Object.entries(known.gpus)) {
    const since = series.get(uuid) ?? [[]];
    series.set(uuid, [times, ...groups.map(({ name }) => values[name] ?? times.map(() => null))]);
    since[0].forEach((time, at) => add(uuid, time, since.slice(1).map((column) => column[at])));
  }
}

/** Add a state; forget GPUs that it no longer has. */
export function remember(state) {
  groups = state.groups;
  groupOf = new Map(state.legend.map((entry) => [entry.name, groups.findIndex(({ name }) => name === entry.group)]));
  for (const gpu of state.gpus) if (gpu.parts.length || series.has(gpu.uuid)) add(gpu.uuid, state.time, sums(gpu.parts));
  const known = new Set(state.gpus.map((gpu) => gpu.uuid));
  for (const uuid of series.keys()) if (!known.has(uuid)) series.delete(uuid);
}

function add(uuid, time, values) {
  if (!series.has(uuid)) series.set(uuid, Array.from({ length: groups.length + 1 }, () => []));
  const columns = series.get(uuid);
  const [times] = columns;
  // The exporter rounds its times.
  if (times.length && time <= times.at(-1) + 0.1) return;
  [time, ...values].forEach((value, at) => columns[at].push(value));
  const old = times.findIndex((at) => at >= time - SECONDS);
  const excess = Math.max(old, times.length - MAX_POINTS);
  if (excess > 0) columns.forEach((column) => column.splice(0, excess));
}

/** Return the bytes of each group; null while nothing is known, as without NVML. */
function sums(parts) {
  const found = groups.map(() => (parts.length ? 0 : null));
  for (const part of parts) {
    const group = groupOf.get(part.name) ?? -1;
    if (group >= 0) found[group] += part.bytes;
  }
  return found;
}

/** Return whether the process still runs. */
export const isLive = (rank) => rank.state === "running" || rank.state === "stalled";
