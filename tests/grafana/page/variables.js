// Template variables: their choices, their values, and their places in a text.
import { builtIn } from "./built_in_variables.js";
import { formats, forPrometheus } from "./variable_formats.js";
import { labelValues, query } from "./prometheus.js";

const ALL = "$__all";
const PLACES = /\$(\w+)|\$\{(\w+)(?:\.([^:^}]+))?(?::([^}]+))?\}/g;

/**
 * Compare two options by the order of Grafana's VariableSort; 1 and 2 are alphabetical, 3 and 4
 * numerical, and so on.
 */
function compareBy(sort) {
  const number = (text) => Number(text.match(/\d+/)?.[0] ?? -1);
  const natural = (a, b) => a.text.localeCompare(b.text, "en", { numeric: true });
  const insensitive = (a, b) => a.text.toLowerCase().localeCompare(b.text.toLowerCase());
  const compare = [
    (a, b) => (a.text < b.text ? -1 : Number(a.text > b.text)),
    (a, b) => number(a.text) - number(b.text),
    insensitive,
    natural,
  ][Math.ceil(sort / 2) - 1];
  return sort % 2 === 0 ? (a, b) => compare(b, a) : compare;
}

/** Return the options that a variable's regular expression finds in the texts of its query. */
function matching(texts, regex) {
  if (!regex) return texts.map((text) => ({ text, value: text }));
  const [, source, flags] = regex.match(/^\/(.*)\/([a-z]*)$/s) ?? [undefined, regex, ""];
  const pattern = new RegExp(source, `${flags.replace("g", "")}g`);
  return texts.flatMap((text) => {
    const matches = [...text.matchAll(pattern)];
    const named = (name) => matches.find(({ groups }) => groups?.[name])?.groups[name];
    const [value, label] = [named("value"), named("text")];
    if (value ?? label) return [{ text: label ?? value, value: value ?? label }];
    return matches
      .map((match) => match[1] ?? match[0])
      .map((found) => ({ text: found, value: found }));
  });
}

function asText({ metric: { __name__: name = "", ...labels }, value: [seconds, number] }) {
  const pairs = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  return `${name}{${pairs.join(",")}} ${number} ${seconds * 1000}`;
}

async function runQuery(text, range) {
  const [, selector, label] = text.match(/^label_values\((?:(.+),\s*)?(\w+)\)\s*$/s) ?? [];
  if (label) return labelValues(label, selector, range);
  const [, expression] = text.match(/^query_result\((.+)\)\s*$/s) ?? [];
  if (!expression) throw new Error(`unknown query of a variable: ${text}`);
  return (await query(expression, range.to)).result.map(asText);
}

async function optionsOf(variable, range, replace) {
  const text = typeof variable.query === "string" ? variable.query : (variable.query?.query ?? "");
  switch (variable.type) {
    case "query": {
      const texts = await runQuery(replace(text, { range }, forPrometheus), range);
      const found = matching(texts.filter(Boolean), replace(variable.regex ?? "", {}, "regex"));
      const options = [...new Map(found.map((option) => [option.value, option])).values()];
      return variable.sort ? options.sort(compareBy(variable.sort)) : options;
    }
    case "datasource":
      return [{ text: "Prometheus", value: "prometheus" }];
    case "custom":
    case "interval":
      return text.split(",").map((entry) => {
        const [label, value] = entry.trim().split(/\s+:\s+/);
        return { text: label, value: value ?? label };
      });
    case "textbox":
    case "constant":
      return [{ text, value: text }];
    default:
      throw new Error(`unknown type of variable: ${variable.type}`);
  }
}

/** Return the values of a variable: those given, those saved with the board, all, or the first. */
function valuesOf({ type, options, current, includeAll }, given) {
  if (given)
    return [given]
      .flat()
      .map((value) => options.find(({ text }) => text === value)?.value ?? value);
  const saved = type === "textbox" ? [] : [current?.value ?? []].flat();
  const known = saved.filter(
    (value) => value === ALL || options.some((option) => option.value === value),
  );
  if (known.length > 0) return known;
  return includeAll ? [ALL] : options.slice(0, 1).map(({ value }) => value);
}

class Variables {
  constructor(board, range) {
    Object.assign(this, { board, range, byName: new Map() });
    this.replace = this.replace.bind(this);
    this.replaceQuery = (text, scope) => this.replace(text, scope, forPrometheus);
  }

  get list() {
    return [...this.byName.values()].map((variable) => ({
      ...variable,
      ...this.lookUp(variable.name, {}),
    }));
  }

  lookUp(name, scope) {
    const variable = this.byName.get(name);
    if (scope.variables?.[name] || !variable) return scope.variables?.[name];
    const isAll = variable.values.includes(ALL);
    const option = (value) =>
      variable.options.find((each) => each.value === value) ?? { text: value, value };
    const chosen = isAll ? variable.options : variable.values.map(option);
    return {
      variable,
      isAll,
      values: chosen.map(({ value }) => value),
      texts: isAll ? ["All"] : chosen.map(({ text }) => text),
    };
  }

  /**
   * Replace variables; `format` is the name of a format, or a function, for those that name none.
   */
  replace(text, scope = {}, format = "glob") {
    return text?.replace(PLACES, (whole, plain, braced, path, own) => {
      const name = plain ?? braced;
      const value = builtIn(name, path, scope, this);
      if (value !== undefined) return formats[own]?.([String(value)], name) ?? String(value);
      const found = this.lookUp(name, scope);
      return found ? this.#written(found, name, own ?? format, Boolean(own)) : whole;
    });
  }

  #written({ variable, isAll, values, texts }, name, format, isExplicit) {
    if (format === "text") return texts.join(" + ");
    if (format === "queryparam") return formats.queryparam(isAll ? [ALL] : values, name);
    if (isAll && variable.allValue) return variable.allValue;
    if (typeof format === "function") return format(values, variable);
    return formats[isExplicit ? format.split(":")[0] : format](values, name);
  }

  /** Return the values over which a panel or a row repeats, each as the scope of one copy. */
  scopesOf(name) {
    const found = this.lookUp(name, {});
    if (!found) return [];
    const { variable, isAll, values } = found;
    const texts = isAll ? variable.options.map(({ text }) => text) : found.texts;
    const one = (value, i) => ({
      variable,
      isAll: false,
      values: [value],
      texts: [texts[i] ?? value],
    });
    return values.map((value, i) => ({ variables: { [name]: one(value, i) } }));
  }
}

/**
 * Read the variables of a board, from left to right; `given` holds chosen values or texts by name.
 */
export async function readVariables(board, given, range) {
  const variables = new Variables(board, range);
  for (const definition of board.templating?.list ?? []) {
    const variable = { ...definition, options: [] };
    try {
      variable.options = await optionsOf(variable, range, variables.replace);
    } catch (error) {
      variable.error = error.message;
    }
    variable.values = valuesOf(variable, given[variable.name]);
    variables.byName.set(variable.name, variable);
  }
  return variables;
}
