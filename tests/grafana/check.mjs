// Check dashboards/json against the types that Grafana 11, 12 and 13 publish: node check.mjs DASHBOARD.json...
//
// The types of a dashboard do not define a panel's `options` and `fieldConfig`. Each panel type publishes its own types,
// which are used for these. Unknown keys are errors, because a renamed option leaves its old key behind.
import Ajv from "ajv";
import { existsSync, mkdirSync, readFileSync, symlinkSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { createGenerator } from "ts-json-schema-generator";

const require = createRequire(import.meta.url);
const VERSIONS = ["grafana-11", "grafana-12", "grafana-13"];
// Keys that Grafana reads but its types lack: data sources add their own keys to an annotation.
// Properties of overrides that these versions do not have: Grafana leaves out what it does not know.
const UNKNOWN = {
  "custom.wrapText": ["grafana-11"],
  "custom.hideFrom": ["grafana-11"],
  "custom.hidden": ["grafana-12", "grafana-13"], // before 12.3
};
const ANNOTATION_KEYS = ["expr", "titleFormat", "textFormat", "useValueForTime"];

class Types {
  constructor(version) {
    this.version = version;
    this.root = dirname(require.resolve(`${version}/package.json`));
    this.known = new Map();
    this.#linkSchema();
  }

  // A panel's types import "@grafana/schema"; here, the name of that package contains the version.
  #linkSchema() {
    const folder = join(this.root, "node_modules", "@grafana");
    if (existsSync(folder)) return;
    mkdirSync(folder, { recursive: true });
    symlinkSync(this.root, join(folder, "schema"));
  }

  file(folder, name) {
    const places = [`dist/types/raw/${folder}/x/types.gen.d.ts`, `dist/esm/raw/${folder}/x/${name}_types.gen.d.ts`];
    const path = places.map((place) => join(this.root, place)).find(existsSync);
    if (!path) throw new Error(`${this.version} has no types of ${folder}`);
    return path;
  }

  panel(type, part) {
    const names = { timeseries: "TimeSeries", "state-timeline": "StateTimeline", "status-history": "StatusHistory" };
    const name = names[type] ?? type[0].toUpperCase() + type.slice(1);
    const folder = `composable/${type.replace("-", "")}/panelcfg`;
    return this.validator(this.file(folder, `${name}PanelCfg`), part);
  }

  dashboard(type) {
    return this.validator(this.file("dashboard", "dashboard"), type);
  }

  validator(path, type) {
    const key = `${path} ${type}`;
    if (!this.known.has(key)) {
      const generator = createGenerator({ path, type, skipTypeCheck: true, additionalProperties: false });
      const ajv = new Ajv({ strict: false, allErrors: true });
      const schema = generator.createSchema(type);
      this.known.set(key, { all: ajv.compile(schema), some: ajv.compile(withoutRequired(schema)) });
    }
    return this.known.get(key);
  }
}

function withoutRequired(schema) {
  const copy = structuredClone(schema);
  for (const definition of Object.values(copy.definitions)) delete definition.required;
  return copy;
}

function* errors(where, validate, value) {
  if (validate(value)) return;
  for (const error of validate.errors) {
    yield `${where}${error.instancePath}: ${error.message} ${JSON.stringify(error.params)}`;
  }
}

// Every panel, also those in collapsed rows.
function panelsOf(board) {
  return board.panels.flatMap((panel) => (panel.type === "row" ? (panel.panels ?? []) : [panel]));
}

function* findings(types, board) {
  const plain = structuredClone(board);
  for (const annotation of plain.annotations?.list ?? []) {
    for (const key of ANNOTATION_KEYS) delete annotation[key];
  }
  yield* errors("dashboard", types.dashboard("Dashboard").some, plain);
  for (const panel of panelsOf(board)) {
    const where = `panel "${panel.title}" (${panel.type})`;
    yield* errors(`${where} options`, types.panel(panel.type, "Options").some, panel.options);
    const custom = panel.fieldConfig.defaults.custom ?? {};
    if (Object.keys(custom).length) {
      yield* errors(`${where} custom`, types.panel(panel.type, "FieldConfig").some, custom);
    }
    for (const { id, value } of panel.fieldConfig.overrides.flatMap((override) => override.properties)) {
      if (UNKNOWN[id]?.includes(types.version)) continue;
      const own = id.startsWith("custom.");
      const validator = own ? types.panel(panel.type, "FieldConfig") : types.dashboard("FieldConfig");
      yield* errors(`${where} override ${id}`, validator.some, { [id.replace("custom.", "")]: value });
    }
  }
}

let failed = 0;
for (const version of VERSIONS) {
  const types = new Types(version);
  for (const path of process.argv.slice(2)) {
    const all = [...findings(types, JSON.parse(readFileSync(path, "utf8")))];
    for (const finding of all) console.error(`${version}: ${path}: ${finding}`);
    failed += all.length ? 1 : 0;
  }
}
console.log(`${VERSIONS.length * (process.argv.length - 2) - failed} passed, ${failed} failed`);
process.exitCode = failed ? 1 : 0;
