// Read a pickle of builtin values, such as PyTorch's memory snapshots.
//
// It makes None, booleans, numbers, texts, lists, tuples and dicts, and refuses everything else, so
// nothing in a file can run. Opcodes: Lib/pickletools.py of Python.

const MARK = Symbol("mark");
const PROTOCOL = 5;
const text = new TextDecoder("utf-8", { fatal: false });

/** A file that is no such pickle; the message is a sentence. */
export class PickleError extends Error {}

/** Return the value of a pickle. Dicts become objects, whose keys are texts, and tuples arrays. */
export function unpickle(buffer) {
  try {
    return new Reader(buffer).read();
  } catch (error) {
    if (error instanceof RangeError) throw new PickleError("The file is truncated.");
    throw error;
  }
}

class Reader {
  constructor(buffer) {
    this.bytes = new Uint8Array(buffer);
    this.view = new DataView(buffer);
    this.at = 0;
    this.stack = [];
    this.memo = [];
  }

  read() {
    if (this.bytes[0] !== 0x80) throw new PickleError("The file is not a pickle.");
    for (;;) {
      const opcode = this.u1();
      if (opcode === 0x2e) break; // STOP
      const act = ACTS[opcode];
      if (!act) throw refused(opcode);
      act(this);
    }
    return this.pop();
  }

  u1() {
    const value = this.view.getUint8(this.at);
    this.at += 1;
    return value;
  }

  u2() {
    this.at += 2;
    return this.view.getUint16(this.at - 2, true);
  }

  u4() {
    this.at += 4;
    return this.view.getUint32(this.at - 4, true);
  }

  u8() {
    this.at += 8;
    return Number(this.view.getBigUint64(this.at - 8, true));
  }

  string(length) {
    if (this.at + length > this.bytes.length) throw new RangeError();
    const from = this.at;
    this.at += length;
    return text.decode(this.bytes.subarray(from, this.at));
  }

  /** Read a little-endian two's complement of `length` bytes. */
  long(length) {
    if (length > 16) throw new PickleError("The file has a number that no snapshot has.");
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

  get(index) {
    if (!(index in this.memo)) throw damaged();
    this.stack.push(this.memo[index]);
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
      dict[key] = values[i + 1];
    }
  }
}

const damaged = () => new PickleError("The file is damaged, or not a pickle of plain values.");

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
  0x47: push((r) => {
    r.at += 8;
    return r.view.getFloat64(r.at - 8, false);
  }),
  0x8c: push((r) => r.string(r.u1())),
  0x58: push((r) => r.string(r.u4())),
  0x8d: push((r) => r.string(r.u8())),
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
  0x94: (r) => r.memo.push(r.top()), // MEMOIZE
  0x71: (r) => (r.memo[r.u1()] = r.top()), // BINPUT
  0x72: (r) => {
    const index = r.u4();
    if (index > r.bytes.length) throw damaged();
    r.memo[index] = r.top();
  },
  0x68: (r) => r.get(r.u1()),
  0x6a: (r) => r.get(r.u4()),
  0x30: (r) => r.pop(),
};
