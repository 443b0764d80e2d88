// The segments and blocks of one device as one row of parts, and what they add up to.
//
// Stranded and releasable bytes are defined as in torchmem's Python package
// (allocator/fragmentation.py); a test compares both for any memory.

const MIB = 2 ** 20;
const SMALL_PAGE = 2 * MIB;

/** The states of parts, in the order in which they are stacked and listed. */
export const STATES = [
  "allocated", "pending", "private_used", "private_free", "releasable", "stranded",
];
const [ALLOCATED, PENDING, PRIVATE_USED, PRIVATE_FREE, RELEASABLE, STRANDED] = STATES.keys();

/**
 * Return the layout of a device map as /api/v1/map has it.
 *
 * Positions are bytes from the beginning of the row, in which segments follow each other:
 * segments of the default pools by stream, then segments of each private pool. A free block of an
 * expandable segment becomes up to three parts, because only its full pages can go back to the
 * driver.
 */
export function layoutOf(device) {
  const segments = ordered(device.segments);
  const room = 3 * segments.reduce((sum, segment) => sum + segment.sizes.length, 0);
  const layout = {
    device,
    count: 0,
    start: new Float64Array(room + 1),
    state: new Uint8Array(room),
    block: new Uint32Array(room),
    blockCount: 0,
    blockStart: new Float64Array(room / 3 + 1),
    blockSegment: new Uint32Array(room / 3),
    blockMerged: new Uint8Array(room / 3),
    segments: [],
    groups: [],
    largest: device.layout?.largest_free_block_bytes ?? 0,
    total: 0,
  };
  for (const segment of segments) addSegment(layout, segment, device.large_page_bytes);
  layout.blockStart[layout.blockCount] = layout.start[layout.count] = layout.total;
  layout.bytes = bytesByState(layout);
  layout.free = layout.bytes.releasable + layout.bytes.stranded;
  layout.fragmentation = layout.free ? 1 - layout.largest / layout.free : null;
  return layout;
}

const isPrivate = (segment) => segment.pool_id[0] !== 0 || segment.pool_id[1] !== 0;

function ordered(segments) {
  const rank = (segment) => [
    isPrivate(segment) ? 1 : 0, segment.pool_id[0], segment.pool_id[1],
    segment.pool === "large" ? 0 : 1, segment.stream, segment.address,
  ];
  return segments
    .map((segment) => [rank(segment), segment])
    .sort(([a], [b]) => {
      const different = a.findIndex((value, index) => value !== b[index]);
      return different < 0 ? 0 : a[different] - b[different];
    })
    .map(([, segment]) => segment);
}

/** Return the name of the group of a segment: its pool, and its stream in the default pools. */
export function groupName(segment) {
  const stream = segment.stream === 0 ? "" : `, stream 0x${segment.stream.toString(16)}`;
  const name = segment.pool === "large" ? "Large pool" : "Small pool";
  return isPrivate(segment) ? `Private pool ${segment.pool_id.join(",")}` : name + stream;
}

function addSegment(layout, segment, largePage) {
  const { sizes, states } = segment;
  const name = groupName(segment);
  const last = layout.groups.at(-1);
  if (last?.name !== name) layout.groups.push({ name, start: layout.total, segments: 0, bytes: 0 });
  const start = layout.total;
  const index = layout.segments.length;
  const page = segment.pool === "small" ? SMALL_PAGE : largePage;
  for (let i = 0; i < sizes.length; i += 1) {
    const [size, letter] = [sizes[i], states[i]];
    const isMerged = letter < "a";
    layout.blockStart[layout.blockCount] = layout.total;
    layout.blockSegment[layout.blockCount] = index;
    layout.blockMerged[layout.blockCount] = isMerged ? 1 : 0;
    layout.blockCount += 1;
    addBlock(layout, segment, letter.toLowerCase(), size, start, isMerged ? Infinity : page);
  }
  const group = layout.groups.at(-1);
  group.segments += 1;
  group.bytes += layout.total - start;
  layout.segments.push({ segment, start, size: layout.total - start });
}

function addBlock(layout, segment, letter, size, segmentStart, page) {
  if (isPrivate(segment)) {
    addPart(layout, letter === "f" ? PRIVATE_FREE : PRIVATE_USED, size);
  } else if (letter !== "f") {
    addPart(layout, letter === "a" ? ALLOCATED : PENDING, size);
  } else if (!segment.expandable) {
    addPart(layout, segment.sizes.length === 1 ? RELEASABLE : STRANDED, size);
  } else {
    const begin = layout.total - segmentStart;
    const first = Math.ceil(begin / page) * page;
    const full = Math.max(0, Math.floor((begin + size) / page) * page - first);
    if (!(full > 0)) {
      addPart(layout, STRANDED, size);
      return;
    }
    addPart(layout, STRANDED, first - begin);
    addPart(layout, RELEASABLE, full);
    addPart(layout, STRANDED, begin + size - first - full);
  }
}

function addPart(layout, state, size) {
  if (size <= 0) return;
  layout.start[layout.count] = layout.total;
  layout.state[layout.count] = state;
  layout.block[layout.count] = layout.blockCount - 1;
  layout.count += 1;
  layout.total += size;
}

function bytesByState(layout) {
  const sums = new Float64Array(STATES.length);
  for (let part = 0; part < layout.count; part += 1) {
    sums[layout.state[part]] += layout.start[part + 1] - layout.start[part];
  }
  return Object.fromEntries(STATES.map((name, state) => [name, sums[state]]));
}

/** Return the index of the last entry of the sorted `values` that is not above `value`. */
export function indexAt(values, count, value, from = 0) {
  let low = from;
  let high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Return what is known of the block that holds the position. */
export function blockAt(layout, position) {
  const part = indexAt(layout.start, layout.count, position);
  return blockOf(layout, layout.block[part], part);
}

/** Return what is known of a block; `part` is the part of it that is meant. */
export function blockOf(layout, index, part = partOf(layout, index)) {
  const { segment, start, size } = layout.segments[layout.blockSegment[index]];
  const from = layout.blockStart[index];
  const parts = {};
  for (let i = partOf(layout, index); i < layout.count && layout.block[i] === index; i += 1) {
    const name = STATES[layout.state[i]];
    parts[name] = (parts[name] ?? 0) + layout.start[i + 1] - layout.start[i];
  }
  return {
    index,
    part,
    state: STATES[layout.state[part]],
    parts,
    start: from,
    size: layout.blockStart[index + 1] - from,
    address: segment.address + from - start,
    isMerged: layout.blockMerged[index] === 1,
    segment,
    segmentStart: start,
    segmentSize: size,
  };
}

function partOf(layout, index) {
  return indexAt(layout.start, layout.count, layout.blockStart[index]);
}

/** Count the blocks of each state; one of several parts counts in the state of the first. */
export function countBlocks(layout) {
  const counts = Object.fromEntries(STATES.map((name) => [name, 0]));
  for (let part = 0; part < layout.count; part += 1) {
    if (part === 0 || layout.block[part] !== layout.block[part - 1]) {
      counts[STATES[layout.state[part]]] += 1;
    }
  }
  return counts;
}
