// Drive a page in Chromium: one command per line of standard input, one answer per line of standard
// output. Commands are {"name": …, arguments}; answers {"value": …} or {"error": "…"}. The
// environment variable CHROMIUM has the path of the browser.
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const TIMEOUT = 60_000;
const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM,
  args: ["--no-sandbox", "--disable-gpu"],
});
const context = await browser.newContext({ timezoneId: "UTC", viewport: { width: 1440, height: 1000 } });
const page = await context.newPage();
page.setDefaultTimeout(TIMEOUT);
// What a page that works never does: errors, refused resources and styles, requests to other hosts.
const problems = [];
page.on("pageerror", (error) => problems.push(String(error.stack ?? error)));
page.on("console", (message) => {
  const isConnection = /net::ERR_|Failed to load resource/.test(message.text());
  if (message.type() === "error" && !isConnection) problems.push(message.text());
});
page.on("request", (request) => {
  const { origin, protocol } = new URL(request.url());
  const own = page.url().startsWith("about:") || origin === new URL(page.url()).origin;
  if (!own && protocol.startsWith("http")) problems.push(`request to ${origin}`);
});

let meter = null;

const commands = {
  goto: ({ url }) => page.goto(url).then(() => null),
  reload: () => page.reload().then(() => null),
  evaluate: ({ code }) => page.evaluate(code),
  // Not waitForFunction, whose use of eval the page's policy forbids.
  async wait({ code }) {
    const end = Date.now() + TIMEOUT;
    for (;;) {
      const value = await page.evaluate(code);
      if (value) return value;
      if (Date.now() > end) throw new Error(`never true: ${code}`);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  },
  click: ({ selector }) => page.locator(selector).first().click(),
  hover: ({ selector }) => page.locator(selector).first().hover(),
  choose: ({ selector, paths }) => page.locator(selector).setInputFiles(paths).then(() => null),
  async wheel({ selector, x, y, delta }) {
    const box = await page.locator(selector).first().boundingBox();
    await page.mouse.move(box.x + x, box.y + y);
    await page.mouse.wheel(0, delta);
  },
  async drag({ selector, from, to }) {
    const box = await page.locator(selector).first().boundingBox();
    await page.mouse.move(box.x + from[0], box.y + from[1]);
    await page.mouse.down();
    await page.mouse.move(box.x + to[0], box.y + to[1], { steps: 4 });
    await page.mouse.up();
  },
  press: ({ key }) => page.keyboard.press(key),
  resize: ({ width, height }) => page.setViewportSize({ width, height }),
  media: ({ colors, motion }) => page.emulateMedia({ colorScheme: colors, reducedMotion: motion }),
  authenticate: ({ user, password }) => context.setHTTPCredentials({ username: user, password }),
  screenshot: ({ path, full }) => page.screenshot({ path, fullPage: full, animations: "disabled" }).then(() => null),
  async cpu() {
    meter ??= await context.newCDPSession(page);
    await meter.send("Performance.enable", { timeDomain: "threadTicks" });
    const { metrics } = await meter.send("Performance.getMetrics");
    return metrics.find(({ name }) => name === "TaskDuration").value;
  },
  problems: () => problems.splice(0),
  async axe() {
    await page.evaluate(await readFile(AXE, "utf8"));
    const { violations } = await page.evaluate(() => globalThis.axe.run());
    return violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.slice(0, 3).map((node) => node.html).join(" | ")}`);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { name, ...given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await commands[name](given)) ?? null };
  } catch (error) {
    answer = { error: String(error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();
