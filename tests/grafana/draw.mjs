// Draw dashboards without a Grafana server: node draw.mjs JOBS.json
//
// Grafana's own packages draw the panels in headless Chromium, with the data of a real Prometheus.
// JOBS.json is a list of jobs; each has `board` (file), `prometheus` (URL), `at` (milliseconds
// since 1970, the end of the time range), `picture` and `report` (files to write), and may have
// `range`, `theme`, `width`, `variables`, `openRows`, and `firstScreen`. Prints a line for each job
// as it is done. The environment variable CHROMIUM has the path of the browser.
import { readFile, writeFile } from "node:fs/promises";
import { chromium } from "playwright-core";
import { bundle } from "./bundle.mjs";
import { serve } from "./serve.mjs";

const PAGES = 2; // at a time
const SETTLE_TIMEOUT = 600_000; // all rows with 1,024 ranks, on a busy machine
const SCREEN_HEIGHT = 1080;

async function settled(page) {
  await page.waitForFunction("window.dashboard?.isSettled()", undefined, {
    timeout: SETTLE_TIMEOUT,
    polling: 50,
  });
}

/** Collect what the browser reports as wrong while a page is open. */
function problemsOf(page) {
  const problems = [];
  page.on("pageerror", (error) => problems.push(error.stack ?? String(error)));
  page.on("requestfailed", (request) =>
    problems.push(`${request.url()}: ${request.failure()?.errorText}`),
  );
  page.on("console", (message) => {
    if (message.type() === "error") problems.push(message.text());
  });
  return problems;
}

async function draw(browser, server, job) {
  const width = job.width ?? 1600;
  const view = server.add({ ...job, board: JSON.parse(await readFile(job.board, "utf8")) });
  const page = await browser.newPage({
    viewport: { width, height: SCREEN_HEIGHT },
    timezoneId: "UTC",
    locale: "en-US",
  });
  const problems = problemsOf(page);
  await page.goto(view.url, { timeout: SETTLE_TIMEOUT });
  await settled(page);
  const height = await page.evaluate("document.documentElement.scrollHeight");
  if (job.firstScreen)
    await page.addStyleTag({ content: "html, body { overflow: hidden !important; }" });
  else await page.setViewportSize({ width, height }); // a table draws only the rows in the window
  await settled(page);
  const report = await page.evaluate("window.dashboard.report()");
  await page.screenshot({ path: job.picture });
  await page.close();
  const queries = view.queries();
  await writeFile(
    job.report,
    JSON.stringify({ key: job.key, ...report, width, height, queries, problems }, null, 1) + "\n",
  );
  const { count, seconds } = queries;
  console.log(`${job.picture}: ${height} pixels high, ${count} queries, ${seconds.toFixed(1)} s`);
}

async function main() {
  const jobs = JSON.parse(await readFile(process.argv[2], "utf8"));
  const server = await serve(await bundle());
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"],
    ignoreDefaultArgs: ["--hide-scrollbars"],
  });
  const waiting = [...jobs];
  const work = async () => {
    for (let job = waiting.shift(); job; job = waiting.shift()) await draw(browser, server, job);
  };
  try {
    await Promise.all(Array.from({ length: PAGES }, work));
  } finally {
    await browser.close();
    server.close();
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
