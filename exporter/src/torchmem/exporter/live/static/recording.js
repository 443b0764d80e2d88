// A memory snapshot as a recording: the state of the allocator after each event of its trace.
//
// PyTorch records addresses, so nothing is simulated. The state before the first event follows from
// the state at the end by undoing every event. Only the sizes of blocks that were freed within the
// trace and allocated before it are not certain: requests are recorded unrounded.

const MIB = 2 ** 20;
const MIN_BLOCK = 512;
const SMALL_SIZE = MIB; // largest request of the small pool, and largest rest of a large block
const SMALL_SEGMENT = 2 * MIB;
const LARGE_PAGE = 20 * MIB;
const MAX_POINTS = 1500;
const ACTIONS = new Set([
  "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
]);

/** A snapshot that cannot be shown; the message is a sentence. */
export class SnapshotError extends Error {}

const isSize = (value) => Number.isSafeInteger(value) && value >= 0;

function need(isTrue) {
  if (!isTrue) throw new SnapshotError("The file is a pickle, but not a memory snapshot of PyTorch.");
}

/** Return the indices of the devices that have segments or a trace. */
export function devicesOf(snapshot) {
  need(Array.isArray(snapshot?.segments));
  const traces = Array.isArray(snapshot.device_traces) ? snapshot.device_traces : [];
  const found = new Set(snapshot.segments.map((segment) => segment?.device ?? 0).filter(isSize));
  traces.forEach((trace, device) => trace?.length && found.add(device));
  return [...found].sort((a, b) => a - b);
}

/** The recording of one device. Bytes; times in seconds since the first event, or null. */
export class Recording {
  constructor(snapshot, device) {
    this.device = device;
    this.largePage = (Number(snapshot.allocator_settings?.large_segment_size_mb) || 20) * MIB || LARGE_PAGE;
    const trace = snapshot.device_traces?.[device];
    this.events = (Array.isArray(trace) ? trace : []).filter((event) => ACTIONS.has(event?.action));
    this.events.forEach((event) => need(isSize(event.addr) && isSize(event.size)));
    this.times = this.readTimes();
    this.memory = new Memory();
    const own = snapshot.segments.filter((segment) => (segment?.device ?? 0) === device);
    own.forEach((segment) => this.memory.addRecorded(segment));
    this.facts = snapshot.torchmem?.devices?.[device] ?? null;
    this.sizes = new Float64Array(this.events.length);
    this.position = this.events.length;
    this.moveToBegin();
  }

  get length() {
    return this.events.length;
  }

  readTimes() {
    const first = this.events[0]?.time_us;
    if (!this.events.length || !this.events.every((event) => isSize(event.time_us))) return null;
    return this.events.map((event) => (event.time_us - first) / 1e6);
  }

  /** Undo all events; then repeat them once, which gives every block its true size. */
  moveToBegin() {
    for (let index = this.events.length - 1; index >= 0; index -= 1) this.undo(index);
    this.position = 0;
    this.memory.fillSlack();
  }

  /** Show the state after `count` events. */
  seek(count) {
    while (this.position < count) {
      this.apply(this.position);
      this.position += 1;
    }
    while (this.position > count) {
      this.position -= 1;
      this.undo(this.position);
    }
  }

  apply(index) {
    const { action, addr, size, stream = 0, pool_id: pool } = this.events[index];
    const { memory } = this;
    if (action === "alloc") {
      this.sizes[index] = memory.allocate(addr, this.sizes[index] || roundUp(size), !this.sizes[index]);
    } else if (action === "free_requested") memory.setPending(addr, true);
    else if (action === "free_completed") {
      this.sizes[index] = memory.free(addr)?.size ?? roundUp(size);
    } else if (action === "segment_alloc") memory.addSegment(addr, size, stream, pool, false);
    else if (action === "segment_map") memory.map(addr, size, stream, pool);
    else if (action === "segment_unmap") memory.unmap(addr, size);
    else memory.removeSegment(addr);
  }

  undo(index) {
    const { action, addr, size, stream = 0, pool_id: pool } = this.events[index];
    const { memory } = this;
    if (action === "alloc") {
      const block = memory.free(addr);
      if (block?.isSure) this.sizes[index] = block.size;
    } else if (action === "free_requested") memory.setPending(addr, false);
    else if (action === "free_completed") {
      memory.allocate(addr, this.sizes[index] || roundUp(size), false);
      memory.setPending(addr, true);
    } else if (action === "segment_alloc") memory.removeSegment(addr);
    else if (action === "segment_map") memory.unmap(addr, size);
    else if (action === "segment_unmap") memory.map(addr, size, stream, pool);
    else memory.addSegment(addr, size, stream, pool, false);
  }

  /** Return the map of the device now, in the form of /api/v1/map. */
  map() {
    const segments = this.memory.segments.map((segment) => segment.map());
    const largest = this.memory.measure(this.largePage).largest;
    return {
      index: this.device, uuid: null, large_page_bytes: this.largePage, merged_blocks: 0, omitted_bytes: 0,
      layout: { largest_free_block_bytes: largest }, segments,
    };
  }

  /** Return for how long the block at an address has been allocated, in seconds; null if unknown. */
  age(addr) {
    if (!this.times || !this.position) return null;
    for (let index = this.position - 1; index >= 0; index -= 1) {
      const event = this.events[index];
      if (event.action === "alloc" && event.addr === addr) return this.times[this.position - 1] - this.times[index];
    }
    return -this.times[this.position - 1];
  }

  /**
   * Return columns over the trace: about MAX_POINTS moments, in each stretch the one with the most
   * allocated bytes, and the one with the most stranded bytes of all. `headroom` is null where it is
   * unknown.
   */
  timeline() {
    const moments = this.moments();
    const columns = {
      events: moments, times: this.times && moments.map((count) => this.times[Math.max(0, count - 1)]),
      allocated: [], reserved: [], stranded: [], fragmentation: [], headroom: [],
    };
    const driver = this.driverFree();
    for (const count of moments) {
      this.seek(count);
      const sums = this.memory.measure(this.largePage);
      columns.allocated.push(sums.allocated);
      columns.reserved.push(sums.reserved);
      columns.stranded.push(sums.stranded);
      columns.fragmentation.push(sums.free ? 1 - sums.largest / sums.free : null);
      columns.headroom.push(driver === null ? null : this.memory.headroom(sums, driver - sums.reserved));
    }
    return columns;
  }

  moments() {
    const stride = Math.max(1, Math.ceil(this.events.length / MAX_POINTS));
    const chosen = new Set([0, this.events.length]);
    let best = -1;
    let at = 0;
    this.seek(0);
    let stranded = this.memory.measure(this.largePage).stranded;
    let [worst, worstAt] = [stranded, 0];
    for (let count = 1; count <= this.events.length; count += 1) {
      stranded = this.next(stranded);
      if (stranded > worst) [worst, worstAt] = [stranded, count];
      if (this.memory.allocated > best) [best, at] = [this.memory.allocated, count];
      if (count % stride === 0) {
        chosen.add(at);
        best = -1;
      }
    }
    chosen.add(worstAt);
    return [...chosen].sort((a, b) => a - b);
  }

  /** Show the state after one more event, and return its stranded bytes, given those before. */
  next(stranded) {
    const { action, addr } = this.events[this.position];
    const segment = action.startsWith("segment_") ? null : this.memory.find(addr);
    const before = segment?.strandedNear(addr, this.largePage) ?? 0;
    this.seek(this.position + 1);
    if (action.startsWith("segment_")) return this.memory.measure(this.largePage).stranded;
    return stranded + (segment?.strandedNear(addr, this.largePage) ?? 0) - before;
  }

  /** Return free bytes at the driver plus reserved ones, which stay the same; null if unknown. */
  driverFree() {
    const { free_bytes: free, reserved_bytes: reserved } = this.facts ?? {};
    const isKnown = isSize(free) && isSize(reserved) && !this.memory.segments.some((s) => s.expandable);
    return isKnown ? free + reserved : null;
  }
}

const roundUp = (size) => Math.max(MIN_BLOCK, Math.ceil(size / MIN_BLOCK) * MIN_BLOCK);

/** Return the position of the last entry at or before an address in a list sorted by address. */
function lastAt(list, address) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].address <= address) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Segments by address, with their blocks in use; what lies between these is free. */
export class Memory {
  constructor() {
    this.segments = [];
    this.allocated = 0;
  }

  addRecorded(recorded) {
    const { address, total_size: size, stream = 0, segment_pool_id: pool = [0, 0], blocks } = recorded;
    need(isSize(address) && isSize(size) && Array.isArray(blocks));
    const segment = this.addSegment(address, size, stream, pool, Boolean(recorded.is_expandable));
    segment.pool = recorded.segment_type === "small" ? "small" : "large";
    let at = address;
    for (const block of blocks) {
      need(isSize(block?.size) && block.size > 0);
      if (block.state !== "inactive") {
        segment.blocks.push({ address: at, size: block.size, isPending: block.state !== "active_allocated", isSure: true });
        segment.used += block.size;
        this.allocated += block.size;
      }
      at += block.size;
    }
    need(at === address + size);
  }

  addSegment(address, size, stream, pool, expandable) {
    const segment = new Segment(address, size, stream, pool, expandable);
    this.segments.splice(lastAt(this.segments, address) + 1, 0, segment);
    return segment;
  }

  find(address) {
    const segment = this.segments[lastAt(this.segments, address)];
    return segment && address < segment.address + segment.size ? segment : null;
  }

  removeSegment(address) {
    const index = lastAt(this.segments, address);
    if (this.segments[index]?.address !== address) return;
    this.allocated -= this.segments[index].used;
    this.segments.splice(index, 1);
  }

  /** Map pages of an expandable segment, beside those of the same pool that are mapped. */
  map(address, size, stream, pool) {
    const index = lastAt(this.segments, address);
    const before = this.segments[index];
    const after = this.segments[index + 1];
    const isJoined = (segment) => segment?.expandable && segment.stream === stream;
    let segment = before;
    if (isJoined(before) && before.address + before.size === address) before.size += size;
    else segment = this.addSegment(address, size, stream, pool, true);
    if (isJoined(after) && after.address === address + size) {
      segment.size += after.size;
      segment.blocks.push(...after.blocks);
      segment.used += after.used;
      if (segment !== before) segment.pool = after.pool;
      this.segments.splice(this.segments.indexOf(after), 1);
    }
    segment.dirty = true;
  }

  unmap(address, size) {
    const segment = this.find(address);
    if (!segment) return;
    const end = segment.address + segment.size;
    const rest = end - address - size;
    segment.size = address - segment.address;
    segment.dirty = true;
    if (rest > 0) {
      const tail = this.addSegment(address + size, rest, segment.stream, segment.poolId, true);
      tail.pool = segment.pool;
      const first = lastAt(segment.blocks, address) + 1;
      tail.blocks = segment.blocks.splice(first);
      tail.used = tail.blocks.reduce((sum, block) => sum + block.size, 0);
      segment.used -= tail.used;
    }
    if (segment.size === 0) this.segments.splice(this.segments.indexOf(segment), 1);
  }

  /** Add a block; with `mayGrow` it takes a rest that PyTorch would not have split off. */
  allocate(address, size, mayGrow) {
    const segment = this.find(address);
    if (!segment) return size;
    const taken = segment.allocate(address, size, mayGrow);
    this.allocated += taken;
    return taken;
  }

  /** Remove the block at an address and return it, or null if there is none. */
  free(address) {
    const block = this.find(address)?.free(address) ?? null;
    this.allocated -= block?.size ?? 0;
    return block;
  }

  setPending(address, isPending) {
    const segment = this.find(address);
    const block = segment?.block(address);
    if (block) {
      block.isPending = isPending;
      segment.dirty = true;
    }
  }

  /** Give blocks of uncertain size the rests that PyTorch would not have split off. */
  fillSlack() {
    for (const segment of this.segments) {
      for (const block of segment.blocks) {
        if (block.isSure) continue;
        const slack = segment.gapAfter(block);
        if (segment.pool === "large" && slack <= SMALL_SIZE) {
          block.size += slack;
          segment.used += slack;
          this.allocated += slack;
        }
      }
      segment.dirty = true;
    }
  }

  /**
   * Return the sums that a layout has: see memory_layout.js. Private pools are not free memory.
   * `small` and `large` are the largest free blocks of these pools.
   */
  measure(largePage) {
    const sums = { allocated: this.allocated, reserved: 0, stranded: 0, releasable: 0, small: 0, large: 0 };
    for (const segment of this.segments) {
      sums.reserved += segment.size;
      if (segment.isPrivate) continue;
      segment.refresh(largePage);
      sums.stranded += segment.stranded;
      sums.releasable += segment.releasable;
      sums[segment.pool] = Math.max(sums[segment.pool], segment.largest);
    }
    sums.largest = Math.max(sums.small, sums.large);
    sums.free = sums.stranded + sums.releasable;
    return sums;
  }

  /**
   * Return the largest allocation that would succeed, after the flush before a retry. The rule is
   * that of allocator/headroom.py for default settings and segments that are not expandable.
   */
  headroom(sums, driverFree) {
    const obtainable = driverFree + sums.releasable;
    const request = Math.floor(obtainable / SMALL_SEGMENT) * SMALL_SEGMENT;
    let fresh = obtainable >= SMALL_SEGMENT ? SMALL_SIZE : 0;
    if (obtainable >= LARGE_PAGE || request >= LARGE_PAGE / 2) fresh = request;
    return Math.max(fresh, sums.large > SMALL_SIZE ? sums.large : 0, Math.min(sums.small, SMALL_SIZE));
  }
}

class Segment {
  constructor(address, size, stream, pool, expandable) {
    this.address = address;
    this.size = size;
    this.stream = isSize(stream) ? stream : 0;
    this.poolId = Array.isArray(pool) && pool.length === 2 && pool.every(isSize) ? pool : [0, 0];
    this.expandable = expandable;
    this.pool = size <= SMALL_SEGMENT ? "small" : "large";
    this.blocks = [];
    this.used = 0;
    this.dirty = true;
  }

  get isPrivate() {
    return this.poolId[0] !== 0 || this.poolId[1] !== 0;
  }

  block(address) {
    const block = this.blocks[lastAt(this.blocks, address)];
    return block?.address === address ? block : null;
  }

  allocate(address, size, mayGrow) {
    const index = lastAt(this.blocks, address) + 1;
    const end = this.blocks[index]?.address ?? this.address + this.size;
    const room = end - address;
    const rest = room - size;
    const isSplit = this.pool === "small" ? rest >= MIN_BLOCK : rest > SMALL_SIZE;
    const taken = mayGrow && !isSplit ? room : Math.min(size, room);
    if (taken <= 0) return 0;
    this.blocks.splice(index, 0, { address, size: taken, isPending: false, isSure: mayGrow });
    this.used += taken;
    this.dirty = true;
    return taken;
  }

  free(address) {
    const index = lastAt(this.blocks, address);
    const block = this.blocks[index];
    if (block?.address !== address) return null;
    this.blocks.splice(index, 1);
    this.used -= block.size;
    this.dirty = true;
    return block;
  }

  gapAfter(block) {
    const next = this.blocks[lastAt(this.blocks, block.address) + 1];
    return (next?.address ?? this.address + this.size) - block.address - block.size;
  }

  /** Yield address and size of each free block. */
  *gaps() {
    let at = this.address;
    for (const block of this.blocks) {
      if (block.address > at) yield [at, block.address - at];
      at = block.address + block.size;
    }
    if (at < this.address + this.size) yield [at, this.address + this.size - at];
  }

  /**
   * Return what changes of the stranded bytes with the block at an address: without the whole free
   * pages elsewhere. Unlike `refresh`, this does not visit every block.
   */
  strandedNear(address, largePage) {
    if (this.isPrivate) return 0;
    const free = this.size - this.used;
    if (!this.expandable) return this.blocks.length ? free : 0;
    const index = lastAt(this.blocks, address);
    const block = this.blocks[index]?.address === address ? this.blocks[index] : null;
    const previous = this.blocks[block ? index - 1 : index];
    const begin = previous ? previous.address + previous.size : this.address;
    const end = this.blocks[index + 1]?.address ?? this.address + this.size;
    if (!block) return free - this.wholePages(begin, end, largePage);
    const after = block.address + block.size;
    return free - this.wholePages(begin, address, largePage) - this.wholePages(after, end, largePage);
  }

  /** Return the bytes of the whole pages in a free range of an expandable segment. */
  wholePages(begin, end, largePage) {
    const page = this.pool === "small" ? SMALL_SEGMENT : largePage;
    const count = Math.floor((end - this.address) / page) - Math.ceil((begin - this.address) / page);
    return Math.max(0, count) * page;
  }

  refresh(largePage) {
    if (!this.dirty) return;
    const free = this.size - this.used;
    this.largest = 0;
    this.releasable = this.expandable || this.blocks.length ? 0 : free;
    for (const [address, size] of this.gaps()) {
      this.largest = Math.max(this.largest, size);
      if (this.expandable) this.releasable += this.wholePages(address, address + size, largePage);
    }
    this.stranded = free - this.releasable;
    this.dirty = false;
  }

  map() {
    const sizes = [];
    let states = "";
    let at = this.address;
    for (const block of this.blocks) {
      if (block.address > at) {
        sizes.push(block.address - at);
        states += "f";
      }
      sizes.push(block.size);
      states += block.isPending ? "p" : "a";
      at = block.address + block.size;
    }
    if (at < this.address + this.size) {
      sizes.push(this.address + this.size - at);
      states += "f";
    }
    return { address: this.address, pool: this.pool, stream: this.stream, pool_id: this.poolId,
      expandable: this.expandable, sizes, states };
  }
}
