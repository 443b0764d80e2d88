// The page of page/ as one script and one style sheet, kept in node_modules/.cache until page/ or
// the packages change.
import { createHash } from "node:crypto";
import { mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { dirname, join } from "node:path";
import { build } from "esbuild";

const ROOT = dirname(fileURLToPath(import.meta.url));
const CACHE = join(ROOT, "node_modules", ".cache", "page");

async function fingerprint() {
  const hash = createHash("sha256");
  const sources = (await readdir(join(ROOT, "page"))).sort().map((name) => join("page", name));
  for (const name of ["package-lock.json", "bundle.mjs", ...sources])
    hash.update(await readFile(join(ROOT, name)));
  return hash.digest("hex").slice(0, 16);
}

async function make(folder) {
  await rm(CACHE, { recursive: true, force: true });
  await mkdir(folder, { recursive: true });
  const { outputFiles } = await build({
    entryPoints: [join(ROOT, "page", "main.jsx")],
    outdir: folder,
    bundle: true,
    write: false,
    format: "iife",
    target: "chrome120",
    jsx: "automatic",
    define: { "process.env.NODE_ENV": '"production"', global: "globalThis" },
    loader: { ".svg": "dataurl", ".woff": "empty", ".woff2": "empty", ".ttf": "empty" },
    logLevel: "error",
  });
  for (const { path, contents } of outputFiles) await writeFile(path, contents);
}

/** Return the folder of main.js and main.css. */
export async function bundle() {
  const folder = join(CACHE, await fingerprint());
  const made = await readdir(folder).catch(() => []);
  if (made.length < 2) await make(folder);
  return folder;
}
