// A text dropped on the page: an error message or a log, explained in the browser as by `torchmem why`.

import { el } from "./dom.js";
import { bytes, count } from "./format.js";
import { kindsOf } from "./messages.js";
import { adviceList, facts } from "./words.js";

const MAX_KINDS = 12;
const MAX_RANKS = 8;
let loaded = null;

/** Draw what a text says into `section`. */
export async function showText(section, text) {
  loaded ??= fetch(new URL("messages.json", import.meta.url)).then((answer) => answer.json());
  const table = await loaded;
  const kinds = kindsOf(text, table);
  const of = (role) => kinds.filter(({ format }) => format.role === role).slice(0, MAX_KINDS);
  if (!of("oom").length) section.append(el("p", { class: "map-summary" }, "No message in this text says that memory ran out."));
  for (const kind of of("oom")) section.append(explanation(kind, table));
  for (const kind of [...of("notice"), ...of("other"), ...of("consequence")]) {
    section.append(el("p", { class: "soft" }, `${heading(kind, of("oom"))}: ${kind.format.meaning}`));
  }
  section.append(el("p", { class: "soft" },
    "In a terminal, ", el("code", {}, "torchmem why FILE…"), " also tells steps, times and tables, and reads logs of any size."));
}

function heading({ line, count: times, ranks, format }, ooms) {
  const causing = new Set(ooms.flatMap((kind) => [...kind.ranks]));
  const shown = [...ranks].filter((rank) => format.role !== "consequence" || !causing.has(rank)).slice(0, MAX_RANKS);
  const kind = { consequence: "A consequence", notice: "A warning", other: "Passed over" }[format.role];
  return `${kind}, ${count(times)}×, from line ${count(line)}${shown.length ? `, rank ${shown.join(", ")}` : ""}`;
}

function explanation(kind, table) {
  const { format, cause, candidates } = kind;
  const general = format.name === "pytorch" && candidates.length
    ? candidates.map((each) => ({ text: table.advice_if[each], lines: [] })) : table.advice[cause] ?? [];
  const advice = format.advice.length ? format.advice : general;
  const next = format.next ?? table.next[cause ?? "unknown"];
  return el("section", { class: "oom" },
    el("h3", {}, place(kind)),
    el("p", { class: "lead" }, `${sentence(kind, table)}.`),
    el("p", {}, format.meaning),
    kind.ownPid === null ? null : el("p", {}, `The listed process ${kind.ownPid} is this process itself, under its pid on the host.`),
    facts(numbers(kind, table)),
    advice.length ? el("h4", {}, `What to do, ${candidates.length ? "by cause" : "most promising first"}`) : null,
    advice.length ? adviceList(advice) : null,
    el("p", {}, `To learn ${next.tells}: `, el("code", {}, next.line)));
}

function place({ rank, ranks, line, count: times, numbers: { gpu } }) {
  const others = [...ranks].filter((other) => other !== rank).slice(0, MAX_RANKS);
  return [
    rank === null ? "" : `rank ${rank}`, gpu === undefined ? "" : `cuda:${gpu}`, `line ${count(line)}`,
    times > 1 ? `${count(times)} times` : "", others.length ? `also rank ${others.join(", ")}` : "",
  ].filter(Boolean).join(", ");
}

function sentence({ format: { summary }, cause, candidates, numbers: { requested, free }, others }, table) {
  const [largest] = others;
  if (summary) return summary;
  if (cause === "refused") return `The driver refused ${bytes(requested)}, although ${bytes(free)} was free`;
  if (cause === "external" && largest?.bytes) return `Process ${largest.pid} holds ${bytes(largest.bytes)} of the GPU`;
  if (cause) return `${table.causes[cause][0].toUpperCase()}${table.causes[cause].slice(1)}`;
  if (!candidates.length) return "Memory ran out; the message does not say why";
  const named = candidates.map((each) => `${each} (${table.phrases[each]})`);
  return `The message does not decide between ${named.slice(0, -1).join(", ")} and ${named.at(-1)}`;
}

function numbers({ numbers: known, others, compaction }, table) {
  const found = Object.entries(table.numbers)
    .filter(([name]) => known[name] !== undefined && known[name] !== null)
    .map(([name, subject]) => ({ subject, text: bytes(known[name]) }));
  for (const { pid, bytes: size } of others) if (size !== null) found.push({ subject: `process ${pid}`, text: bytes(size) });
  if (compaction !== null) found.push({ subject: "compaction gives at most", text: bytes(compaction) });
  return found;
}
