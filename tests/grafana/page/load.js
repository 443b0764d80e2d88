// From the JSON of a panel to the frames that its visualization draws, through Grafana's
// transformations and overrides.
import {
  applyFieldOverrides,
  getPanelOptionsWithDefaults,
  transformDataFrame,
} from "@grafana/data";
import { cloneDeep } from "lodash";
import { lastValueFrom } from "rxjs";
import { queryPanel } from "./prometheus.js";
import { pluginOf } from "./registries.js";

const NO_CONFIG = { defaults: {}, overrides: [] };
const BY_NAME = ["byName", "byRegexp"];

/**
 * Return frames, options and field configuration of a panel, and note in its state what the report
 * tells of them.
 */
export async function load({ panel, scope, state }, { range, theme, variables }, width) {
  const plugin = pluginOf(panel.type);
  if (!plugin) throw new Error(`panels of the type ${panel.type} cannot be drawn`);
  const inScope = (replace) => (text, more, format) => replace(text, { ...scope, ...more }, format);
  const answers = await queryPanel(panel, range, width, inScope(variables.replaceQuery));
  const replace = inScope((text, more, format) => variables.replace(text, more, format ?? "text"));
  const { options, fieldConfig } = getPanelOptionsWithDefaults({
    plugin,
    currentOptions: panel.options,
    currentFieldConfig: cloneDeep(panel.fieldConfig ?? NO_CONFIG),
    isAfterPluginChange: false,
  });
  const data = await lastValueFrom(
    transformDataFrame(panel.transformations ?? [], answers.frames, { interpolate: replace }),
  );
  const registry = plugin.fieldConfigRegistry;
  const overrides = { fieldConfig, fieldConfigRegistry: registry, replaceVariables: replace };
  const frames = applyFieldOverrides({ data, theme, timeZone: "browser", ...overrides });
  Object.assign(state, {
    queries: answers.queries,
    state: stateOf(panel, answers.queries, frames),
    overrides: matchedOverrides(panel, frames),
    unknownProperties: unknownProperties(panel, registry),
  });
  return { frames, options, fieldConfig, replace };
}

function stateOf(panel, queries, frames) {
  if (queries.some(({ error }) => error)) return "error";
  const hasRows = frames.some((frame) => frame.fields.length > 0 && frame.length > 0);
  return hasRows || panel.type === "text" ? "data" : "empty";
}

/** Return the overrides by a field's name, and whether such a field is in the frames. */
function matchedOverrides(panel, frames) {
  const fields = frames.flatMap((frame) => frame.fields);
  const names = fields.flatMap(({ name, state, config }) => [
    name,
    state?.displayName,
    config.displayName,
    config.displayNameFromDS,
  ]);
  const overrides = (panel.fieldConfig?.overrides ?? []).filter(({ matcher }) =>
    BY_NAME.includes(matcher.id),
  );
  return overrides.map(({ matcher: { id, options } }) => {
    const pattern = id === "byRegexp" ? new RegExp(options.replace(/^\/|\/$/g, "")) : undefined;
    const matches = (name) =>
      name !== undefined && name !== null && (pattern ? pattern.test(name) : name === options);
    return { name: options, isMatched: names.some(matches) };
  });
}

function unknownProperties(panel, registry) {
  const properties = (panel.fieldConfig?.overrides ?? []).flatMap(
    (override) => override.properties,
  );
  return properties.map(({ id }) => id).filter((id) => !registry.getIfExists(id));
}
