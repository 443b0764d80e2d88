// Read a pickle of builtin values, such as PyTorch's memory snapshots.
//
// It makes None, booleans, numbers, texts, lists, tuples and dicts, and refuses everything else, so
// nothing in a file can run. Opcodes: Lib/pickletools.py of Python.
//
// A byte of a pickle can make an object of 50 bytes. So the file is read twice, in windows: first its
// values are counted, then those that are kept are made. A value that is memorized but not used again
// is not held, and omitted items of dicts, such as stacks, are forgotten at once.

const MARK = Symbol("mark");
const PROTOCOL = 5;
const WINDOW_BYTES = 4 * 2 ** 20;
const MAX_OBJECTS = 6e6; // texts, lists, tuples and dicts
const MAX_NUMBERS = 30e6;
const MAX_TEXT_BYTES = 64 * 2 ** 20;
const MAX_STACK = 100_000; // Python adds at most 1,000 items to a list or dict at once
const text = new TextDecoder("utf-8", { fatal: false });

/** A file that is not such a pickle; the message is a sentence. */
export class PickleError extends Error {}

/** Return the value of a pickle. Dicts become objects, whose keys are texts, and tuples arrays. */
export function unpickle(buffer) {
  return unpickleFrom((from, length) => buffer.slice(from, from + length), buffer.byteLength);
}

/**
 * Return the value of a pickle of `size` bytes, of which `read(from, length)` returns a buffer.
 *
 * Items of dicts whose keys are in the set `omitted` are left out.
 */
export function unpickleFrom(read, size, omitted = new Set()) {
  try {
    const used = new Counter(read, size).count();
    return new Reader(read, size, used, omitted).read();
  } catch (error) {
    if (error instanceof RangeError) throw new PickleError("The file is truncated.");
    throw error;
  }
}

/** The bytes of a file in windows. */
class Bytes {
  constructor(read, size) {
    Object.assign(this, { load: read, size, begin: 0, at: 0, bytes: new Uint8Array(0) });
    this.need(1);
    if (this.bytes[0] !== 0x80) throw new PickleError("The file is not a pickle.");
  }

  /** Make the next `length` bytes available. */
  need(length) {
    if (this.at + length <= this.bytes.length) return;
    const from = this.begin + this.at;
    if (from + length > this.size) throw new RangeError();
    const buffer = this.load(from, Math.min(this.size - from, Math.max(WINDOW_BYTES, length)));
    Object.assign(this, { begin: from, at: 0, bytes: new Uint8Array(buffer), view: new DataView(buffer) });
  }

  skip(length) {
    this.need(length);
    this.at += length;
    return this.at - length;
  }

  u1() {
    const at = this.skip(1);
    return this.bytes[at];
  }

  u2() {
    const at = this.skip(2); // which may read the next window
    return this.view.getUint16(at, true);
  }

  u4() {
    const at = this.skip(4);
    return this.view.getUint32(at, true);
  }

  u8() {
    const at = this.skip(8);
    return Number(this.view.getBigUint64(at, true));
  }

  /** Return the length of a string that starts here, given its opcode. */
  textLength(opcode) {
    const length = opcode === 0x8c ? this.u1() : opcode === 0x58 ? this.u4() : this.u8();
    if (length > MAX_TEXT_BYTES) throw tooLarge();
    return length;
  }
}

const TEXTS = new Set([0x8c, 0x58, 0x8d]);
const CONTAINERS = new Set([0x7d, 0x5d, 0x29, 0x85, 0x86, 0x87, 0x74]);
const NUMBERS = { 0x4b: 1, 0x4d: 2, 0x4a: 4, 0x47: 8 }; // bytes of the argument
const SKIPPED = { 0x80: 1, 0x95: 8, 0x71: 1, 0x72: 4 };
const PLAIN = new Set([0x28, 0x4e, 0x88, 0x89, 0x61, 0x65, 0x73, 0x75, 0x94, 0x30]);

/** Counts what a pickle makes, without making it, and finds which memorized values are used. */
class Counter extends Bytes {
  count() {
    this.objects = this.numbers = this.texts = 0;
    this.used = new Uint8Array(1024);
    for (let opcode = this.u1(); opcode !== 0x2e; opcode = this.u1()) {
      this.see(opcode);
      if (this.objects > MAX_OBJECTS || this.numbers > MAX_NUMBERS || this.texts > MAX_TEXT_BYTES) throw tooLarge();
    }
    return this.used;
  }

  see(opcode) {
    if (opcode === 0x68) this.use(this.u1());
    else if (opcode === 0x6a) this.use(this.u4());
    else if (CONTAINERS.has(opcode)) this.objects += 1;
    else if (opcode in NUMBERS) this.number(NUMBERS[opcode]);
    else if (opcode === 0x8a) this.number(this.u1());
    else if (opcode === 0x8b) this.number(this.u4());
    else if (TEXTS.has(opcode)) this.text(this.textLength(opcode));
    else if (opcode in SKIPPED) this.skip(SKIPPED[opcode]);
    else if (!PLAIN.has(opcode)) throw refused(opcode);
  }

  number(length) {
    this.numbers += 1;
    this.skip(length);
  }

  text(length) {
    this.objects += 1;
    this.texts += length;
    this.skip(length);
  }

  use(index) {
    if (index > 2 * this.objects) throw damaged();
    if (index >= this.used.length) {
      const larger = new Uint8Array(2 * Math.max(index, this.used.length));
      larger.set(this.used);
      this.used = larger;
    }
    this.used[index] = 1;
  }
}

class Reader extends Bytes {
  constructor(read, size, used, omitted) {
    super(read, size);
    Object.assign(this, { used, omitted, stack: [], memo: new Map(), memorized: 0 });
  }

  read() {
    for (let opcode = this.u1(); opcode !== 0x2e; opcode = this.u1()) {
      const act = ACTS[opcode];
      if (!act) throw refused(opcode);
      act(this);
      if (this.stack.length > MAX_STACK) throw tooLarge();
    }
    return this.pop();
  }

  string(opcode) {
    const length = this.textLength(opcode);
    const from = this.skip(length);
    return text.decode(this.bytes.subarray(from, from + length));
  }

  /** Read a little-endian two's complement of `length` bytes. */
  long(length) {
    if (length > 16) throw new PickleError("The file has a number that cannot be part of a snapshot.");
    let value = 0n;
    for (let i = 0; i < length; i += 1) value |= BigInt(this.u1()) << BigInt(8 * i);
    return Number(BigInt.asIntN(8 * length, value));
  }

  pop() {
    if (!this.stack.length) throw damaged();
    const value = this.stack.pop();
    if (value === MARK) throw damaged();
    return value;
  }

  /** Remove and return the values above the newest mark. */
  marked() {
    const from = this.stack.lastIndexOf(MARK);
    if (from < 0) throw damaged();
    const values = this.stack.splice(from + 1);
    this.stack.pop();
    return values;
  }

  top() {
    const value = this.stack[this.stack.length - 1];
    if (value === undefined || value === MARK) throw damaged();
    return value;
  }

  tuple(length) {
    const values = [];
    for (let i = 0; i < length; i += 1) values.unshift(this.pop());
    this.stack.push(values);
  }

  memorize(index) {
    const value = this.top();
    if (this.used[index]) this.memo.set(index, value);
    this.memorized += 1;
  }

  get(index) {
    if (!this.memo.has(index)) throw damaged();
    this.stack.push(this.memo.get(index));
  }

  append(values) {
    const list = this.top();
    if (!Array.isArray(list)) throw damaged();
    for (const value of values) list.push(value);
  }

  setItems(values) {
    const dict = this.top();
    if (typeof dict !== "object" || dict === null || Array.isArray(dict) || values.length % 2) throw damaged();
    for (let i = 0; i < values.length; i += 2) {
      const key = values[i];
      if ((typeof key !== "string" && typeof key !== "number") || key === "__proto__") throw damaged();
      if (!this.omitted.has(key)) dict[key] = values[i + 1];
    }
  }
}

const damaged = () => new PickleError("The file is damaged, or not a pickle of plain values.");

const tooLarge = () =>
  new PickleError("The file has more values than this page can hold: record fewer entries, or use `torchmem why`.");

const refused = (opcode) =>
  new PickleError(
    `The file has objects other than plain values (opcode 0x${opcode.toString(16)}), which are never loaded.`,
  );

const push = (value) => (reader) => reader.stack.push(value(reader));

const ACTS = {
  0x80: (r) => {
    if (r.u1() > PROTOCOL) throw new PickleError("The file uses a newer pickle protocol.");
  },
  0x95: (r) => r.u8(), // FRAME
  0x28: (r) => r.stack.push(MARK),
  0x4e: push(() => null),
  0x88: push(() => true),
  0x89: push(() => false),
  0x4b: push((r) => r.u1()),
  0x4d: push((r) => r.u2()),
  0x4a: push((r) => r.u4() | 0),
  0x8a: push((r) => r.long(r.u1())),
  0x8b: push((r) => r.long(r.u4())),
  0x47: push((r) => {
    const at = r.skip(8);
    return r.view.getFloat64(at, false);
  }),
  0x8c: push((r) => r.string(0x8c)),
  0x58: push((r) => r.string(0x58)),
  0x8d: push((r) => r.string(0x8d)),
  0x7d: push(() => ({})),
  0x5d: push(() => []),
  0x29: push(() => []), // EMPTY_TUPLE
  0x85: (r) => r.tuple(1),
  0x86: (r) => r.tuple(2),
  0x87: (r) => r.tuple(3),
  0x74: (r) => r.stack.push(r.marked()), // TUPLE
  0x61: (r) => {
    const value = r.pop();
    r.append([value]);
  },
  0x65: (r) => {
    const values = r.marked();
    r.append(values);
  },
  0x73: (r) => {
    const value = r.pop();
    const key = r.pop();
    r.setItems([key, value]);
  },
  0x75: (r) => {
    const values = r.marked();
    r.setItems(values);
  },
  0x94: (r) => r.memorize(r.memorized), // MEMOIZE
  0x71: (r) => r.memorize(r.u1()), // BINPUT
  0x72: (r) => r.memorize(r.u4()), // LONG_BINPUT
  0x68: (r) => r.get(r.u1()),
  0x6a: (r) => r.get(r.u4()),
  0x30: (r) => r.pop(),
};
