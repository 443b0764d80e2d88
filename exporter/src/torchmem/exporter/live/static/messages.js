// The messages in a text that say that memory ran out, and the cause that their numbers allow.
//
// The patterns, bounds and words are those of `torchmem why`, in messages.json; what is done with
// them is as in torchmem/explain/texts, and tests compare both on the same texts.

const ESCAPES = /\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])/g;
const UNITS = { b: 1, bytes: 1, k: 2 ** 10, m: 2 ** 20, g: 2 ** 30, t: 2 ** 40 };
const SUFFIXES = { bytes: 1, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30 };
const PLAIN = new Set(["gpu", "pid", "tokens", "fraction"]);
const WORDS = new Set(["program", "library", "backend"]);
const ALIASES = { task: "program", task_pid: "pid" };
const FALLBACK = "cut_off";
const MAX_LINE = 64 * 1024;
const MAX_CONTINUATIONS = 40;
const MAX_WORDS = 600;
const MAX_EXAMINED = 50000;
const CAUSES = ["capacity", "fragmentation", "limit", "external", "pending", "library"];

/** Return each kind of message in a text, as they are found: format, cause, numbers, rank, line, count. */
export function kindsOf(text, table) {
  const kinds = new Map();
  const numbered = text.split("\n").flatMap((whole, at) => whole.replace(/\r$/, "").split("\r").map((part) => [part, at + 1]));
  const lines = numbered.map(([part]) => part);
  const triggers = new RegExp(table.formats.flatMap((known) => known.triggers).map(escaped).join("|"));
  let examined = 0;
  for (let at = 0; at < lines.length && examined < MAX_EXAMINED; at += 1) {
    if (!triggers.test(lines[at])) continue;
    examined += 1;
    const line = readLine(lines[at].slice(0, MAX_LINE), table);
    for (const message of messagesIn(line.text, (start) => continued(lines, at, line, start, table), table)) {
      add(kinds, message, line.rank ?? label(line.text.slice(0, message.start), table)[0], numbered[at][1], table);
    }
  }
  return [...kinds.values()];
}

function add(kinds, message, rank, line, table) {
  const judged = judge(message, table);
  const key = [message.format.name, judged.cause, judged.detail, judged.candidates.join()].join("|");
  if (!kinds.has(key)) kinds.set(key, { ...message, ...judged, rank, line, count: 0, ranks: new Set() });
  const kind = kinds.get(key);
  count(kind, { rank, line, requested: message.numbers.requested ?? null, numbers: message.numbers });
  if (rank !== null) kind.ranks.add(rank);
}

/** Count a message. NCCL writes two lines for one failure, of which the second has the size. */
function count(kind, message) {
  const before = kind.newest;
  kind.newest = message;
  const isNext = before?.rank === message.rank && before?.line + 1 === message.line;
  if (!isNext || before.requested !== null || message.requested === null) kind.count += 1;
  else if (!isKnown(kind.numbers.requested)) kind.numbers = message.numbers;
}

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

function readLine(raw, table) {
  let text = raw.replace(ESCAPES, "");
  const start = text.indexOf("{");
  if (start >= 0 && start <= table.bounds.label_columns && text.trimEnd().endsWith("}")) {
    const found = unwrapped(text.slice(start), table);
    if (found) return found;
  }
  if (text.includes("\\n")) text = text.replaceAll("\\n", "\n").replaceAll('\\"', '"');
  const [rank, end] = label(text.slice(0, table.bounds.label_columns), table);
  return { text, rank, label: end };
}

function unwrapped(text, table) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    return null;
  }
  const inner = table.json_texts.map((key) => found?.[key]).find((value) => typeof value === "string");
  if (inner === undefined) return null;
  const line = readLine(inner.replace(/\n+$/, ""), table);
  const rank = table.json_ranks.map((key) => String(found[key] ?? "")).find((value) => /^[0-9]{1,12}$/.test(value));
  return { ...line, rank: rank === undefined ? line.rank : Number(rank) };
}

/** Return the rank that a label gives, or null, and where the label ends if the text begins with it. */
function label(text, table) {
  for (const [number, [pattern, flags]] of table.labels.entries()) {
    const found = [...text.matchAll(new RegExp(pattern, flags))];
    if (!found.length) continue;
    const last = number ? found.at(-1) : found[0];
    const isBeginning = !/[A-Za-z]{3}/.test(text.slice(0, last.index));
    return [Number(last[1]), isBeginning ? last.index + last[0].length : 0];
  }
  return [null, 0];
}

function continued(lines, at, first, start, table) {
  const words = first.text.slice(start).split(/\s+/).filter(Boolean);
  if (first.rank === null && isMixed(lines, at, table.bounds.near)) return words.join(" ");
  for (const raw of lines.slice(at + 1, at + 1 + MAX_CONTINUATIONS)) {
    const line = readLine(raw.slice(0, MAX_LINE), table);
    if (line.rank !== first.rank) continue;
    words.push(...line.text.slice(line.label).replace(/^[> ]+/, "").split(/\s+/).filter(Boolean));
    if (words.length > MAX_WORDS) break;
  }
  return words.slice(0, MAX_WORDS).join(" ");
}

/** Return whether messages with other beginnings stand near a line, as of other ranks. */
function isMixed(lines, at, near) {
  const begins = (text) => text.match(/out of memory[^\r\n]{0,60}/g) ?? [];
  const own = new Set(begins(lines[at]));
  const around = (from, step) => {
    let text = "";
    for (let next = from; next >= 0 && next < lines.length && text.length < near; next += step) {
      text = step > 0 ? `${text}${lines[next]}\n` : `${lines[next]}\n${text}`;
    }
    return step > 0 ? text.slice(0, near) : text.slice(-near);
  };
  return begins(around(at - 1, -1) + around(at + 1, 1)).some((each) => !own.has(each));
}

function messagesIn(line, more, table) {
  const found = [];
  let at = 0;
  for (let first = firstIn(line, at, table); first; first = firstIn(line, at, table)) {
    let message = readMessage(first.format, first.match, line, table);
    if (message.format.chains.length && !message.isWhole) message = longer(message, first.match, more(first.match.index), table);
    found.push(message);
    at = Math.max(first.match.index + first.match[0].length, message.end);
  }
  if (found.length) return found;
  const format = table.formats.find(({ name }) => name === FALLBACK);
  const match = new RegExp(format.pattern, "m").exec(line);
  return match ? [wrapped(format, match, more(match.index), table)] : [];
}

function firstIn(text, at, table) {
  let best = null;
  for (const format of table.formats) {
    if (format.name === FALLBACK || !format.triggers.some((trigger) => text.includes(trigger))) continue;
    const pattern = new RegExp(format.pattern, "gm");
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match && (!best || match.index < best.match.index)) best = { format, match };
  }
  return best;
}

function longer(message, match, text, table) {
  const again = new RegExp(message.format.pattern, "y").exec(text);
  if (!again) return message;
  const found = readMessage(message.format, again, text, table);
  return { ...found, start: match.index, end: match.index + found.end, isJoined: true };
}

/** Return the message whose beginning is on two lines, or that one is cut off. */
function wrapped(format, match, text, table) {
  const first = firstIn(text, 0, table);
  if (!first || first.match.index > match[0].length + 1) return readMessage(format, match, match.input, table);
  const found = readMessage(first.format, first.match, text, table);
  return { ...found, start: match.index, end: match.index + found.end, isJoined: true };
}

function readMessage(format, match, text, table) {
  const head = { numbers: {}, holders: [] };
  take(head, match, table);
  const begin = match.index + match[0].length;
  let best = { ...head, end: begin, isWhole: !format.chains.length };
  for (const chain of format.chains) {
    const found = follow(chain, text, begin, head, table);
    if (found.end > best.end) best = found;
  }
  return { format, start: match.index, ...best };
}

function follow(chain, text, begin, head, table) {
  const found = { numbers: { ...head.numbers }, holders: [...head.holders], end: begin, isWhole: false };
  for (const clause of chain) {
    const pattern = new RegExp(clause.pattern, "y");
    let times = 0;
    for (let match; times === 0 || clause.repeats; times += 1) {
      pattern.lastIndex = found.end;
      match = pattern.exec(text);
      if (!match) break;
      take(found, match, table);
      found.end += match[0].length;
    }
    if (clause.is_required && !times) return found;
    if (clause.ends) return { ...found, isWhole: true };
  }
  return found;
}

function take(found, match, table) {
  const groups = Object.entries(match.groups ?? {}).filter(([, text]) => text !== undefined);
  const held = groups.find(([name]) => name === "holds");
  if (held) {
    const pid = groups.find(([name]) => name === "pid");
    found.holders.push({ pid: pid ? Number(pid[1]) : null, bytes: sizeOf(held[1], table) });
    return;
  }
  for (const [group, text] of groups) {
    const name = ALIASES[group] ?? group;
    const [stem, unit] = [name.slice(0, Math.max(0, name.lastIndexOf("_"))), name.slice(name.lastIndexOf("_") + 1)];
    if (WORDS.has(name)) found.numbers[name] = text;
    else if (PLAIN.has(name)) found.numbers[name] = Number(text);
    else if (unit in SUFFIXES) found.numbers[stem] = bounded(Number(text.replaceAll(",", "")) * SUFFIXES[unit], table);
    else found.numbers[name] = sizeOf(text, table);
  }
}

function sizeOf(text, table) {
  const [, number, unit] = /^([\d.]+) ?(\w+)$/.exec(text.trim());
  const key = unit.toLowerCase();
  return bounded(Number(number) * (UNITS[key] ?? UNITS[key[0]] ?? 1), table);
}

const bounded = (value, table) => (value >= 0 && value < table.bounds.max_bytes ? Math.round(value) : null);

const UNKNOWN = { cause: null, detail: null, candidates: [], others: [], ownPid: null, compaction: null };

function judge(message, table) {
  const known = { pytorch: judgeAllocator, malloc_async: judgeMallocAsync, vllm_free_memory: judgeStart }[message.format.name];
  return { ...UNKNOWN, ...(known ? known(message, table) : { cause: message.format.cause }) };
}

function judgeAllocator(message, table) {
  const numbers = settled(message.numbers);
  const { others, ownPid } = othersOf(numbers, message.holders, table);
  const found = { others, ownPid };
  if (!isConsistent(numbers, message.holders, table) && !isOversubscribed(message, numbers, table)) return found;
  const { total, free } = numbers;
  const needed = tensorsOf(numbers) + (numbers.requested ?? 0);
  if (isKnown(total) && needed > total + tolerance(table, total)) return { ...found, cause: "capacity" };
  if (!message.isWhole || !isKnown(total) || !isKnown(free)) return found;
  if (wasRefused(numbers, table)) return message.isJoined ? found : { ...found, cause: "refused" };
  return { ...found, ...weighed(numbers, message.holders, others, table) };
}

/** PyTorch counts free blocks of private pools as allocated. */
const tensorsOf = ({ allocated, private: pools }) => Math.max(0, (allocated ?? 0) - (pools ?? 0));

const isKnown = (value) => value !== null && value !== undefined;

function settled(numbers) {
  let { allocated, reserved, unallocated } = numbers;
  if (isKnown(allocated) && !isKnown(reserved) && isKnown(unallocated)) reserved = allocated + unallocated;
  if (isKnown(allocated) && isKnown(reserved) && !isKnown(unallocated)) unallocated = Math.max(0, reserved - allocated);
  return { ...numbers, reserved, unallocated };
}

function tolerance(table, ...sizes) {
  const units = sizes.map((size) => [2 ** 30, 2 ** 20, 2 ** 10].find((unit) => unit <= (size ?? 0)) ?? 1);
  return Math.round(units.reduce((sum, unit) => sum + table.bounds.printed * unit, 0)) + 1;
}

const sum = (holders) => holders.reduce((total, holder) => total + (holder.bytes ?? 0), 0);

function isConsistent(numbers, holders, table) {
  if (!isKnown(numbers.total)) return true;
  const free = numbers.free ?? 0;
  const reserved = Math.max(numbers.reserved ?? 0, numbers.allocated ?? 0);
  const held = sum(holders);
  const slack = tolerance(table, numbers.total, free, reserved, held) + table.bounds.slack;
  return free + Math.max(reserved, held) <= numbers.total + slack &&
    (!isKnown(numbers.reserved) || (numbers.allocated ?? 0) <= numbers.reserved + slack);
}

/** On Windows and WSL, the driver moves what does not fit into host memory. */
function isOversubscribed({ isJoined, isWhole }, numbers, { bounds: { slack } }) {
  return isWhole && !isJoined && isKnown(numbers.total) &&
    (numbers.free ?? 0) <= slack && tensorsOf(numbers) > numbers.total + slack;
}

function wasRefused({ free, requested, allowed, reserved }, table) {
  const slack = tolerance(table, free ?? 0, requested ?? 0, reserved ?? 0, allowed);
  return (free ?? 0) >= (requested ?? 0) + slack && (!isKnown(allowed) || (reserved ?? 0) + (requested ?? 0) + slack <= allowed);
}

function othersOf(numbers, holders, table) {
  const listed = holders.filter(({ pid }) => pid !== null).sort((one, other) => (other.bytes ?? 0) - (one.bytes ?? 0));
  if (listed.length < holders.length || !isKnown(numbers.reserved)) return { others: listed, ownPid: null };
  const least = numbers.reserved - tolerance(table, numbers.reserved);
  const own = listed.filter(({ bytes }) => bytes !== null && bytes >= least && bytes <= numbers.reserved + table.bounds.own_extra);
  if (own.length !== 1) return { others: listed, ownPid: null };
  return { others: listed.filter((each) => each !== own[0]), ownPid: own[0].pid };
}

function weighed(numbers, holders, others, table) {
  const { total, free, requested, reserved, unallocated } = numbers;
  const limit = isKnown(numbers.allowed) ? Math.min(numbers.allowed, total) : total;
  const obtainable = (amount) => (limit < total ? Math.min(amount, limit - reserved) : amount);
  const outside = Math.max(0, total - free - reserved);
  const rooms = (foreign) => ({
    compaction: Math.max(0, obtainable(free)) + unallocated + (numbers.private ?? 0),
    ...(limit < total ? { limit: free } : {}),
    ...(foreign > 0 ? { neighbors: obtainable(free + foreign) } : {}),
  });
  const causes = new Set();
  for (const ratio of [table.bounds.min_room, table.bounds.large_room]) {
    for (const foreign of foreignOf(outside, holders, others, table)) {
      const gains = Object.entries(rooms(foreign)).filter(([, room]) => room - requested >= Math.max(0, ratio * total));
      const best = gains.sort((one, other) => other[1] - one[1])[0];
      causes.add(best ? table.cause_by_change[best[0]] : "capacity");
    }
  }
  const spare = rooms(0).compaction - requested;
  const compaction = spare >= 0 ? spare : null;
  if (causes.size > 1) return { candidates: CAUSES.filter((cause) => causes.has(cause)), compaction };
  const [cause] = causes;
  const mayWait = unallocated >= Math.max(requested, table.bounds.waiting * tensorsOf(numbers));
  const isPool = (numbers.private ?? 0) > unallocated;
  if (cause === "fragmentation" && mayWait && !isPool) return { candidates: ["fragmentation", "pending"], compaction };
  return { cause, detail: cause === "fragmentation" && isPool ? "pool" : null, compaction };
}

/** Return the least and the most that other processes may hold. */
function foreignOf(outside, holders, others, table) {
  const listed = sum(others);
  const most = Math.max(listed, outside - table.bounds.context, 0);
  if (holders.length && holders.every(({ bytes }) => bytes !== null)) return [listed, most];
  return [Math.max(listed, outside - table.bounds.communicators, 0), most];
}

function judgeMallocAsync({ numbers, isWhole }, table) {
  const needed = (numbers.allocated ?? 0) + (numbers.requested ?? 0);
  const { total, allowed, free, requested } = numbers;
  if (isKnown(total) && needed > total + tolerance(table, total)) return { cause: "capacity" };
  if (!isWhole || !isKnown(free)) return {};
  if (isKnown(allowed) && needed > allowed - tolerance(table, allowed)) return { cause: "limit" };
  if (free >= (requested ?? 0) + tolerance(table, free, requested)) return { cause: "refused" };
  return { candidates: ["capacity", "fragmentation", "external"] };
}

function judgeStart({ numbers: { total, free, requested } }, table) {
  if (!isKnown(total) || !isKnown(free) || !isKnown(requested) || free > total || requested > total) return {};
  const foreign = Math.max(0, total - free - table.bounds.context);
  return { cause: foreign && free + foreign >= requested ? "external" : "limit" };
}
