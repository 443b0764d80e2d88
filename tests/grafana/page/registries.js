// What Grafana's core, rather than its packages, registers: field options, transformations, and for
// each panel type its own field options and all defaults. Without an editor to show, an option is
// its default and how an override sets it.
import {
  booleanOverrideProcessor,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  identityOverrideProcessor,
  locationUtil,
  numberOverrideProcessor,
  PanelPlugin,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from "@grafana/data";
import { uniqBy } from "lodash";
import { panelTypes } from "./panel_types.js";

const DEFAULT_THRESHOLDS = {
  mode: "absolute",
  steps: [
    { value: -Infinity, color: "green" },
    { value: 80, color: "red" },
  ],
};

function option(
  id,
  process = identityOverrideProcessor,
  defaultValue = undefined,
  shouldApply = () => true,
) {
  const shown = {
    id,
    path: id,
    name: id,
    category: ["Standard options"],
    editor: () => null,
    override: () => null,
  };
  return { ...shown, process, defaultValue, shouldApply };
}

function numeric(id, process) {
  return option(id, process, undefined, (field) => field.type === "number");
}

function standardOptions() {
  return [
    option("displayName", displayNameOverrideProcessor),
    option("unit", unitOverrideProcessor),
    numeric("min", numberOverrideProcessor),
    numeric("max", numberOverrideProcessor),
    numeric("fieldMinMax", booleanOverrideProcessor),
    numeric("decimals", numberOverrideProcessor),
    option("noValue", stringOverrideProcessor),
    option("color", identityOverrideProcessor, { mode: "thresholds" }),
    option("thresholds", thresholdsOverrideProcessor, DEFAULT_THRESHOLDS),
    option("mappings", valueMappingsOverrideProcessor, []),
    option("links", dataLinksOverrideProcessor),
    option("actions"),
    option("filterable", booleanOverrideProcessor),
  ];
}

function pluginFor([id, { custom, options, color }]) {
  const plugin = new PanelPlugin(() => null);
  plugin.meta = { id, name: id };
  const useCustomConfig = (builder) => {
    for (const [path, value] of Object.entries(custom)) {
      builder.addCustomEditor({
        ...option(path, identityOverrideProcessor, value),
        category: undefined,
      });
    }
  };
  plugin.useFieldConfig({ standardOptions: { color: { defaultValue: color } }, useCustomConfig });
  plugin.setPanelOptions((builder) => {
    for (const [path, defaultValue] of Object.entries(options)) {
      builder.addCustomEditor({ id: path, path, name: path, editor: () => null, defaultValue });
    }
  });
  return [id, plugin];
}

function transformations() {
  const distinct = uniqBy(Object.values(standardTransformers), "id");
  return distinct.map((transformation) => {
    const { id, name } = transformation;
    return { id, name, editor: () => null, transformation };
  });
}

const plugins = new Map();

/** Register everything; `replace` replaces variables in the links of panels. */
export function register({ range, replace }) {
  standardEditorsRegistry.setInit(() => []);
  standardFieldConfigEditorRegistry.setInit(standardOptions);
  standardTransformersRegistry.setInit(transformations);
  locationUtil.initialize({
    config: { appSubUrl: "" },
    getVariablesUrlParams: () => ({}),
    getTimeRangeForUrl: () => ({ from: range.from.valueOf(), to: range.to.valueOf() }),
    replace,
  });
  for (const [id, plugin] of Object.entries(panelTypes).map(pluginFor)) plugins.set(id, plugin);
}

export const pluginOf = (type) => plugins.get(type);
