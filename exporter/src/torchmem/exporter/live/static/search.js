// The search field: which ranks match, by run, launch, rank and state.

/** Return the words for a rank's state. */
export const stateName = (state) => (state === "oom" ? "out of memory" : state);

const FIELDS = {
  run: (rank, word) => rank.run.toLowerCase().includes(word),
  rank: (rank, word) => String(rank.rank) === word,
  state: (rank, word) => rank.state === word || stateName(rank.state).split(" ").some((part) => part.startsWith(word)),
};

// Only with its name: the digits of a launch are in many words.
const NAMED = { ...FIELDS, launch: (rank, word) => (rank.launch ?? "").startsWith(word) };

/** Return whether a rank matches all words of a search; `run:`, `launch:`, `rank:` and `state:` name a field. */
export function matcher(search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [name, ...rest] = word.split(":");
    return Object.hasOwn(NAMED, name) && rest.length ? [[NAMED[name]], rest.join(":")] : [Object.values(FIELDS), word];
  });
  return (rank) => words.every(([fields, word]) => fields.some((matches) => matches(rank, word)));
}
