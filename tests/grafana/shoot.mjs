// Take screenshots of pages of a running Grafana: node shoot.mjs SHOTS.json
//
// SHOTS.json is a list of {url, picture}. The environment variable CHROMIUM has the path of the
// browser, AUTHORIZATION the value of that header, if Grafana wants one.
import { readFile } from "node:fs/promises";
import { chromium } from "playwright-core";

const { CHROMIUM, AUTHORIZATION } = process.env;
const shots = JSON.parse(await readFile(process.argv[2], "utf8"));
const browser = await chromium.launch({
  executablePath: CHROMIUM,
  args: ["--no-sandbox", "--disable-gpu"],
});
try {
  const extraHTTPHeaders = AUTHORIZATION ? { Authorization: AUTHORIZATION } : {};
  const page = await browser.newPage({
    viewport: { width: 1600, height: 1080 },
    timezoneId: "UTC",
    extraHTTPHeaders,
  });
  for (const { url, picture } of shots) {
    await page.goto(url, { waitUntil: "networkidle" });
    await page.screenshot({ path: picture });
  }
} finally {
  await browser.close();
}
