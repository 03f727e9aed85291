// Takes the images of the documentation: a comparison by day, and the charts of a busy server by night.

import { fileURLToPath } from "node:url";
import { answered, enterKey, KEY, openPage, startBrowser, startServer } from "./setup.js";

const LOAD_S = 190;
const MODEL = "mlx-parallm-demo";
const SYSTEM = "You are a patient helper who answers briefly, sorts lists and does sums step by step. ".repeat(4);
const target = (name) => fileURLToPath(new URL(`../../docs/${name}`, import.meta.url));

async function playground(browser, url) {
  const { page } = await openPage(browser, url, { colorScheme: "light" });
  await enterKey(page);
  await page.getByRole("button", { name: "Compare" }).click();
  const settings = page.getByRole("button", { name: "Settings" });
  for (const i of [0, 1]) {
    await settings.nth(i).click();
    await page.getByLabel("Temperature").nth(i).fill("0");
    if (i === 1) {
      await page.getByLabel("Thinking").nth(1).selectOption("off");
      await page.getByLabel("Colour tokens by probability").nth(1).check();
    }
    await settings.nth(i).click();
  }
  for (const text of ["Hello, who are you?", "What is 68 * 47?"]) {
    await page.getByLabel("Message").fill(text);
    await page.getByLabel("Message").press("Control+Enter");
    await answered(page);
  }
  await page.locator(".pane").nth(1).locator(".answer").last().locator(".token", { hasText: "0" }).last().hover();
  await page.screenshot({ path: target("page-light.png") });
  await page.context().close();
}

/** Ask sums, by more clients and by fewer, until the time is over. */
async function load(url) {
  const endMs = Date.now() + LOAD_S * 1000;
  const client = async (number) => {
    for (let turn = 0; Date.now() < endMs; turn++) {
      const wave = Math.sin(((endMs - Date.now()) / 1000 / 75) * 2 * Math.PI);
      if (number > 9 + 7 * wave) {
        await new Promise((wake) => setTimeout(wake, 500));
        continue;
      }
      const question = `What is ${100 + number * 37 + turn} + ${200 + turn * 13}?`;
      const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: question }];
      const response = await fetch(`${url}v1/chat/completions`, {
        method: "POST",
        headers: { "content-type": "application/json", authorization: `Bearer ${KEY}` },
        body: JSON.stringify({ model: MODEL, messages, max_tokens: 160, stream: true }),
      });
      await response.text();
    }
  };
  await Promise.all(Array.from({ length: 16 }, (_, number) => client(number)));
}

async function charts(browser, url) {
  const { page } = await openPage(browser, `${url}#server`, { colorScheme: "dark" });
  await enterKey(page);
  await Promise.race([load(url), page.waitForTimeout((LOAD_S - 5) * 1000)]);
  await page.screenshot({ path: target("page-dark.png") });
  await page.context().close();
}

const server = await startServer("--api-key", KEY, "--max-model-len", "1024", "--max-num-seqs", "12");
const browser = await startBrowser();
try {
  const wanted = process.argv[2];
  if (wanted !== "charts") await playground(browser, server.url);
  if (wanted !== "playground") await charts(browser, server.url);
} finally {
  await browser.close();
  await server.stop();
}
