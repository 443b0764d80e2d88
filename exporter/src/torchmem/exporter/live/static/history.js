// The last ten minutes of each GPU and rank, kept in the browser.

export const SECONDS = 600;
const MAX_POINTS = 600;
const MAX_SERIES = 4096;

/** The groups of parts that a GPU's history shows, from below. */
export const GROUPS = [
  { name: "in_use", label: "tensors" },
  { name: "stranded", label: "stranded" },
  { name: "releasable", label: "releasable" },
  { name: "outside_allocator", label: "outside the allocator" },
  { name: "other_processes", label: "others" },
];
const GROUP_OF = {
  stranded: 1, releasable: 2, cached: 2, private_pools: 2,
  outside_allocator: 3, other_processes: 4, not_pytorch: 4, driver: 4,
};

/** What a rank's history shows, as fields of the state document. */
export const RANK_FIELDS = [
  "tensor_bytes", "reserved_bytes", "headroom_flush_bytes", "fragmentation_ratio", "alloc_retries",
];

/** Columns of numbers over time: the first holds Unix seconds, unknown values are null. */
class Series {
  constructor(width) {
    this.columns = Array.from({ length: width + 1 }, () => []);
  }

  add(time, values) {
    const [times] = this.columns;
    if (times.length && time <= times.at(-1)) return;
    times.push(time);
    values.forEach((value, index) => this.columns[index + 1].push(value ?? null));
    const old = times.findIndex((at) => at >= time - SECONDS);
    const excess = Math.max(old, times.length - MAX_POINTS);
    if (excess > 0) this.columns.forEach((column) => column.splice(0, excess));
  }
}

const series = new Map();

function seriesOf(key, width) {
  if (!series.has(key) && series.size < MAX_SERIES) series.set(key, new Series(width));
  return series.get(key);
}

/** Return the columns of a GPU: times and bytes by group; undefined if there are none. */
export const ofGpu = (gpu) => series.get(gpu.uuid)?.columns;

/** Return the columns of a rank on a GPU: times and RANK_FIELDS; undefined if there are none. */
export const ofRank = (gpu, rank) => series.get(`${gpu.uuid} ${rank.id}`)?.columns;

/** Add a state; forget what it no longer has. */
export function remember(state) {
  const known = new Set();
  for (const gpu of state.gpus) {
    known.add(gpu.uuid);
    if (gpu.parts.length) seriesOf(gpu.uuid, GROUPS.length)?.add(state.time, groups(gpu));
    for (const rank of gpu.ranks) {
      const key = `${gpu.uuid} ${rank.id}`;
      known.add(key);
      const values = RANK_FIELDS.map((field) => rank[field]);
      if (isLive(rank)) seriesOf(key, RANK_FIELDS.length)?.add(state.time, values);
    }
  }
  for (const key of series.keys()) if (!known.has(key)) series.delete(key);
}

function groups(gpu) {
  const sums = GROUPS.map(() => 0);
  for (const part of gpu.parts) {
    if (part.name !== "free") sums[GROUP_OF[part.name] ?? 0] += part.bytes;
  }
  return sums;
}

/** Return whether the process still runs. */
export const isLive = (rank) => rank.state === "running" || rank.state === "stalled";
