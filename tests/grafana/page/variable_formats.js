// How the values of a variable are written into a text: Grafana's formats, as in ${name:csv}.
import { textUtil } from "@grafana/data";

const escapeRegex = (value) => value.replace(/[\\^$*+?.()|[\]{}/]/g, "\\$&");
// A query is a quoted string within which the backslash counts, so each is doubled.
const escapeInQuery = (value) =>
  value.replace(/\\/g, "\\\\\\\\").replace(/[$^*{}[\]'+?.()|]/g, "\\\\$&");
const alone = (values, many) => (values.length === 1 ? values[0] : many);

export const formats = {
  csv: (values) => values.join(","),
  doublequote: (values) => values.map((value) => `"${value.replaceAll('"', '\\"')}"`).join(","),
  glob: (values) => alone(values, `{${values.join(",")}}`),
  html: (values) => textUtil.escapeHtml(values.join(", ")),
  json: (values) => JSON.stringify(alone(values, values)),
  percentencode: (values) => encodeURIComponent(alone(values, `{${values.join(",")}}`)),
  pipe: (values) => values.join("|"),
  queryparam: (values, name) =>
    values.map((value) => `var-${name}=${encodeURIComponent(value)}`).join("&"),
  raw: (values) => values.join(","),
  regex: (values) => alone(values.map(escapeRegex), `(${values.map(escapeRegex).join("|")})`),
};

/**
 * Write values as Grafana's Prometheus data source does in a query: as a regular expression if
 * there can be several.
 */
export function forPrometheus(values, variable) {
  if (!variable.multi && !variable.includeAll)
    return (values[0] ?? "").replace(/\\/g, "\\\\").replace(/'/g, "\\\\'");
  const escaped = values.map(escapeInQuery);
  return alone(escaped, `(${escaped.join("|")})`);
}
