// A server with the embedded model, Chromium, and a page that notes what must not happen.

import { spawn } from "node:child_process";
import { accessSync, constants } from "node:fs";
import { createServer } from "node:net";
import { delimiter, join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const BROWSERS = ["chromium", "chromium-browser", "google-chrome"];
const READY_S = 120;

export const KEY = "secret-of-the-test";

/** Start `mlx_parallm serve FLAGS`; `{url, stop()}` once it is ready. */
export async function startServer(...flags) {
  const port = await freePort();
  const python = process.env.PYTHON ?? "python3";
  // The server ends when its descriptor 3 does, which is when this process has ended.
  const link = ["-m", "mlx_parallm.peers.child_process", "3"];
  const args = [...link, "mlx_parallm", "serve", "--port", String(port), ...flags];
  const child = spawn(python, args, { cwd: ROOT, stdio: ["ignore", "pipe", "pipe", "pipe"] });
  const url = `http://127.0.0.1:${port}/`;
  let log = "";
  for (const stream of [child.stdout, child.stderr]) stream.on("data", (data) => (log += data));
  const ended = new Promise((resolve) => child.once("exit", resolve));
  const stop = () => {
    child.kill("SIGTERM");
    return ended;
  };
  for (let tries = 0; tries < READY_S * 10; tries++) {
    if (child.exitCode !== null) break;
    const response = await fetch(`${url}health`).catch(() => null);
    if (response?.ok) return { url, stop };
    await new Promise((wake) => setTimeout(wake, 100));
  }
  await stop();
  throw new Error(`The server did not start:\n${log}`);
}

function freePort() {
  return new Promise((resolve, reject) => {
    const probe = createServer().once("error", reject);
    probe.listen(0, "127.0.0.1", () => {
      const { port } = probe.address();
      probe.close(() => resolve(port));
    });
  });
}

/** Chromium of CHROMIUM or of the path, with flags. */
export async function startBrowser(...flags) {
  // Chromium's own sandbox does not run as root.
  const args = process.getuid?.() === 0 ? [...flags, "--no-sandbox"] : flags;
  return chromium.launch({ executablePath: findChromium(), args });
}

function findChromium() {
  if (process.env.CHROMIUM) return process.env.CHROMIUM;
  for (const folder of (process.env.PATH ?? "").split(delimiter)) {
    for (const name of BROWSERS) {
      try {
        accessSync(join(folder, name), constants.X_OK);
        return join(folder, name);
      } catch {
        // Not there: the next.
      }
    }
  }
  throw new Error("Chromium is needed: apt install chromium, or set CHROMIUM to its path.");
}

/** A page of a fresh context, and `faults`: errors, and requests to other hosts. */
export async function openPage(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  const page = await context.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => {
    // The browser itself notes each 401, which a server with a key answers first.
    if (message.type() === "error" && !message.text().includes("401")) faults.push(message.text());
  });
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(url).origin) faults.push(request.url());
  });
  await page.addInitScript(watchShifts);
  await page.goto(url);
  return { page, faults };
}

/** Runs in the page: adds up the layout shifts that nobody's input caused. */
function watchShifts() {
  window.shifts = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts += entry.value;
  }).observe({ type: "layout-shift", buffered: true });
}

/** Enter the key and wait for the models. */
export async function enterKey(page, key = KEY) {
  await page.getByLabel("Key", { exact: true }).fill(key);
  await page.getByRole("button", { name: "Use key" }).click();
}

/** Say something, and wait until every pane has answered. */
export async function say(page, text) {
  const before = await page.locator(".answer:visible").count();
  await page.getByLabel("Message").fill(text);
  await page.getByLabel("Message").press("Control+Enter");
  await page.waitForFunction((count) => document.querySelectorAll(".answer").length > count, before);
  await answered(page);
}

/** Wait until no answer streams. */
export async function answered(page) {
  await page.waitForFunction(() => !document.querySelector('.answer[aria-busy="true"]'));
}
