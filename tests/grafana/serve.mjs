// A server on loopback for the pages: the page itself, the board of each view, fonts, images, and
// Prometheus.
import { createReadStream } from "node:fs";
import { createServer } from "node:http";
import { dirname, extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";

const PACKAGES = join(dirname(fileURLToPath(import.meta.url)), "node_modules");
const PAGE = `<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<link rel="stylesheet" href="/main.css">
<body><div id="root"></div><script src="/main.js"></script>`;
const API = "/prometheus/";
const TYPES = {
  ".css": "text/css",
  ".js": "text/javascript",
  ".svg": "image/svg+xml",
  ".woff2": "font/woff2",
};
const INTER = "@fontsource/inter/files/inter-latin";
// Names under which Grafana's style sheets look for fonts, and the packages that have them.
const FONTS = {
  "Inter-Regular.woff2": `${INTER}-400-normal.woff2`,
  "Inter-Italic.woff2": `${INTER}-400-italic.woff2`,
  "Inter-Medium.woff2": `${INTER}-500-normal.woff2`,
  "L0xTDF4xlVMF-BfR8bXMIhJHg45mwgGEFl0_3vrtSM1J-gEPT5Ese6hmHSh0mQ.woff2":
    "@fontsource/roboto-mono/files/roboto-mono-latin-400-normal.woff2",
};

function send(response, status, type, body) {
  response.writeHead(status, { "Content-Type": type }).end(body);
}

function sendFile(response, file) {
  const type = TYPES[extname(file)] ?? "application/octet-stream";
  createReadStream(file)
    .on("error", () => send(response, 404, "text/plain", `there is no ${file}`))
    .on("open", () => response.writeHead(200, { "Content-Type": type }))
    .pipe(response);
}

async function bodyOf(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  return chunks.length ? Buffer.concat(chunks) : undefined;
}

/** Pass a request on to the Prometheus of its view, and note how long the answer takes. */
async function ask(view, path, request, response) {
  const started = performance.now();
  const headers = { "Content-Type": "application/x-www-form-urlencoded" };
  try {
    const answer = await fetch(view.prometheus + path, {
      method: request.method,
      headers,
      body: await bodyOf(request),
    });
    const text = await answer.text();
    // Grafana shows the error of the body; the status would make the browser report it a second
    // time.
    send(response, 200, "application/json", text);
  } catch (error) {
    send(
      response,
      200,
      "application/json",
      JSON.stringify({ status: "error", error: `${error.message}: ${error.cause}` }),
    );
  }
  if (/^\/api\/v1\/query/.test(path)) view.seconds.push((performance.now() - started) / 1000);
}

function file(bundle, path) {
  const name = path.split("/").at(-1);
  if (name in FONTS) return join(PACKAGES, FONTS[name]);
  if (path.startsWith("/public/build/"))
    return join(PACKAGES, "@grafana/ui/dist/public", normalize(path.slice(13)));
  return join(bundle, name);
}

/**
 * Start the server. `add` registers a view of a board and gives its URL and, later, what its
 * queries cost.
 */
export async function serve(bundle) {
  const views = [];
  const server = createServer((request, response) => {
    const { pathname, search } = new URL(request.url, "http://localhost");
    // Grafana's packages ask for fonts and images both from the root and relative to the page.
    const [, number, path] = pathname.match(/^(?:\/views\/(\d+))?(\/.*)$/);
    if (path === "/") return send(response, 200, "text/html", PAGE);
    if (path === "/view.json")
      return send(response, 200, "application/json", JSON.stringify(views[number]));
    if (path.startsWith(API))
      return ask(views[number], path.slice(API.length - 1) + search, request, response);
    return sendFile(response, file(bundle, path));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const origin = `http://127.0.0.1:${server.address().port}`;
  return {
    close: () => server.close(),
    add(view) {
      const own = { ...view, seconds: [] };
      views.push(own);
      const sum = () => own.seconds.reduce((total, each) => total + each, 0);
      return {
        url: `${origin}/views/${views.length - 1}/`,
        queries: () => ({
          count: own.seconds.length,
          seconds: sum(),
          slowest: Math.max(0, ...own.seconds),
        }),
      };
    },
  };
}
