// The page in Chromium, against a server with the embedded model under two names and a key.

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, rmSync } from "node:fs";
import { createServer, request } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { answered, enterKey, KEY, openPage, say, startBrowser, startServer } from "./setup.js";

const NAMES = ["first-model", "second-model"];
const PHONE = { viewport: { width: 390, height: 844 } };
let server;
// seeing: a server of a model that takes images beside one that does not.
let seeing;
let browser;

before(async () => {
  const names = NAMES.flatMap((name) => ["--served-model-name", name]);
  [server, seeing] = await Promise.all([
    startServer("--api-key", KEY, "--max-model-len", "2048", ...names),
    startServer("--max-model-len", "1024", "--model", "mlx-parallm-demo", "demo:see"),
  ]);
  browser = await startBrowser();
});

after(async () => {
  await browser?.close();
  await server?.stop();
  await seeing?.stop();
});

/**
 * A test with a page of its own, which has the key; it must end without a fault, but for those with
 * the text `ignored`, such as a status that the browser notes.
 */
function pageTest(name, run, { ignored = null, ...options } = {}) {
  test(name, { timeout: 90_000 }, async () => {
    const { page, faults } = await openPage(browser, server.url, options);
    await enterKey(page);
    await page.locator("option", { hasText: NAMES[0] }).first().waitFor({ state: "attached" });
    await run(page);
    assert.deepEqual(faults.filter((fault) => ignored === null || !fault.includes(ignored)), []);
    await page.context().close();
  });
}

const setting = (page, label, pane = 0) => page.getByLabel(label).nth(pane);
const lastAnswer = (page) => page.locator(".answer").last();

test("the key is asked for, refused, kept for the tab and taken away again", async () => {
  const { page, faults } = await openPage(browser, server.url);
  const dialog = page.getByRole("dialog");
  await dialog.getByText("wants an API key").waitFor();
  await enterKey(page, "wrong");
  await dialog.getByText("refused this key").waitFor();
  await enterKey(page);
  await dialog.waitFor({ state: "hidden" });
  await page.locator("option", { hasText: NAMES[1] }).first().waitFor({ state: "attached" });
  await page.reload();
  await page.locator("option", { hasText: NAMES[1] }).first().waitFor({ state: "attached" });
  assert.equal(await dialog.isVisible(), false);
  const stored = await page.evaluate(() => [Object.values(sessionStorage), Object.values(localStorage)]);
  assert.deepEqual(stored, [[KEY], []]);
  await page.getByRole("button", { name: "API key" }).click();
  await enterKey(page, "");
  await dialog.getByText("wants an API key").waitFor();
  assert.deepEqual(faults, []);
  await page.context().close();
});

pageTest("an answer streams, with reasoning that folds, and times", async (page) => {
  await page.evaluate(() => {
    window.lengths = new Set();
    const log = document.querySelector(".log");
    const note = () => window.lengths.add(log.querySelector(".answer")?.textContent.length ?? 0);
    new MutationObserver(note).observe(log, { subtree: true, childList: true, characterData: true });
  });
  await setting(page, "Temperature").fill("0");
  await say(page, "What is 347 + 586?");
  assert.ok((await page.evaluate(() => window.lengths.size)) > 5, "the text grew in steps");
  const answer = lastAnswer(page);
  await answer.locator(".content", { hasText: "933" }).waitFor();
  const thoughts = answer.locator(".thoughts");
  assert.match(await thoughts.textContent(), /carry/);
  await answer.getByText("Reasoning", { exact: true }).click();
  await thoughts.waitFor({ state: "hidden" });
  assert.match(await answer.locator("footer").textContent(), /first token .* tokens\/s .* total .* tokens/);
  assert.match(await page.locator("#live").textContent(), /933/);
  await say(page, "What is 2 + 2?");
  await answer.getByRole("button", { name: "Again" }).waitFor();
  assert.equal(await page.locator(".turn").count(), 4);
  await page.locator(".answer").first().getByRole("button", { name: "Again" }).click();
  await answered(page);
  assert.equal(await page.locator(".turn").count(), 2);
  await page.getByRole("button", { name: "Clear" }).first().click();
  assert.equal(await page.locator(".turn").count(), 0);
});

pageTest("markup in texts stays text", async (page) => {
  const evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>";
  await setting(page, "Temperature").fill("0");
  await say(page, `Repeat exactly: ${evil}`);
  assert.ok((await page.locator(".user").textContent()).includes(evil));
  assert.ok((await lastAnswer(page).textContent()).includes("<"));
  assert.equal(await page.locator(".log :is(img, script)").count(), 0);
  assert.equal(await page.title(), "mlx_parallm");
});

test("no script of the page can write markup", async () => {
  const { page } = await openPage(browser, server.url);
  await assert.rejects(page.evaluate(() => (document.body.innerHTML = "<b>x</b>")), /TrustedHTML/);
  await page.context().close();
});

pageTest("tokens are coloured, and tell their alternatives by pointer and by key", async (page) => {
  await setting(page, "Colour tokens by probability").check();
  await setting(page, "Temperature").fill("2");
  await setting(page, "Max tokens").fill("40");
  await say(page, "Tell me a joke");
  const tokens = lastAnswer(page).locator(".token");
  assert.ok((await tokens.count()) > 5);
  const levels = await tokens.evaluateAll((all) => new Set(all.map((one) => one.className)).size);
  assert.ok(levels > 1, "more than one colour at temperature 2");
  await tokens.nth(2).hover();
  const card = page.getByRole("tooltip");
  await card.waitFor();
  const rows = await card.locator(".token-row").count();
  assert.ok(rows === 5 || rows === 6);
  assert.equal(await card.locator(".chosen").count(), 1);
  await page.mouse.move(0, 0);
  await card.waitFor({ state: "hidden" });
  await tokens.first().focus();
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.evaluate(() => document.activeElement.dataset.i), "1");
  await card.waitFor();
  await page.keyboard.press("Escape");
  await card.waitFor({ state: "hidden" });
  await setting(page, "Colour tokens by probability").uncheck();
  await tokens.first().waitFor({ state: "hidden" });
});

pageTest("tokens that are no text are marked as special", async (page) => {
  await setting(page, "Colour tokens by probability").check();
  await setting(page, "Temperature").fill("0");
  await say(page, "What is 2 + 2?");
  const tokens = lastAnswer(page).locator(".token");
  const special = lastAnswer(page).locator(".token.special");
  assert.equal(await tokens.last().textContent(), "<|im_end|>");
  assert.match(await tokens.last().getAttribute("class"), /special/);
  assert.ok((await special.count()) < (await tokens.count()));
  await tokens.last().hover();
  await page.getByRole("tooltip").getByText("Special token").waitFor();
  await tokens.first().hover();
  await page.getByRole("tooltip").getByText("Special token").waitFor({ state: "detached" });
});

pageTest("the keyboard writes, sends and breaks lines", async (page) => {
  const message = page.getByLabel("Message");
  const isFocused = () => message.evaluate((field) => field === document.activeElement);
  await page.getByRole("dialog").waitFor({ state: "hidden" });
  await page.waitForFunction(() => document.activeElement.ariaLabel === "Message");
  const first = await page.evaluate(
    () => document.querySelector("#playground-view :is(input, select, textarea)").ariaLabel,
  );
  assert.equal(first, "Message");
  await page.keyboard.type("Repeat exactly:");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("one two");
  assert.equal(await message.inputValue(), "Repeat exactly:\none two");
  await message.evaluate((field) => {
    const composing = { key: "Enter", isComposing: true, bubbles: true, cancelable: true };
    field.dispatchEvent(new KeyboardEvent("keydown", composing));
  });
  assert.equal(await page.locator(".turn").count(), 0);
  await page.keyboard.press("Enter");
  await page.locator(".user", { hasText: "one two" }).waitFor();
  assert.equal(await message.inputValue(), "");
  await answered(page);
  assert.equal(await isFocused(), true);
  await message.fill("What is 2 + 2?");
  await page.getByRole("button", { name: "Send" }).click();
  await answered(page);
  await page.waitForFunction(() => document.activeElement.dataset.part === "send");
  await page.getByRole("button", { name: "API key" }).click();
  await enterKey(page);
  await page.waitForFunction(() => document.activeElement.id === "key-button");
});

pageTest("the chat is there again after a look at the API", async (page) => {
  await setting(page, "Temperature").fill("0");
  await setting(page, "Model").selectOption(NAMES[1]);
  await setting(page, "Colour tokens by probability").check();
  await say(page, "What is 47 + 38?");
  await page.getByLabel("Message").fill("half a mess");
  const shown = await page.locator(".log").first().innerText();
  await page.getByRole("link", { name: "API", exact: true }).click();
  await page.getByRole("button", { name: "Authorize" }).waitFor();
  await page.goBack();
  await page.locator("option", { hasText: NAMES[1] }).first().waitFor({ state: "attached" });
  await page.waitForFunction((name) => document.querySelector("[name=model]").value === name, NAMES[1]);
  assert.equal(await page.locator(".log").first().innerText(), shown);
  assert.equal(await page.getByLabel("Message").inputValue(), "half a mess");
  assert.equal(await setting(page, "Temperature").inputValue(), "0");
  const bodies = [];
  page.on("request", (request) => bodies.push(...[request.postDataJSON()].filter(Boolean)));
  await say(page, "And 1 more?");
  assert.deepEqual(bodies[0].messages.map(({ role }) => role), ["user", "assistant", "user"]);
  assert.equal(bodies[0].model, NAMES[1]);
  await page.getByRole("button", { name: "Clear" }).first().click();
  await page.reload();
  await page.locator("option", { hasText: NAMES[0] }).first().waitFor({ state: "attached" });
  assert.equal(await page.locator(".turn").count(), 0);
});

pageTest("a comparison with tool results is there again after a look at the API", async (page) => {
  await page.getByRole("button", { name: "Compare" }).click();
  await page.getByRole("button", { name: "Call a tool" }).click();
  for (const i of [0, 1]) {
    await page.getByRole("button", { name: "Settings" }).nth(i).click();
    await setting(page, "Temperature", i).fill("0");
    await page.getByRole("button", { name: "Settings" }).nth(i).click();
  }
  await page.getByLabel("Message").press("Enter");
  for (const i of [0, 1]) {
    const pane = page.locator(".pane").nth(i);
    await pane.getByLabel("Result of get_weather").fill('{"temperature": 21}');
    await pane.getByRole("button", { name: "Send results" }).click();
    await pane.locator(".answer").nth(1).waitFor();
    await answered(page);
  }
  const shown = await page.locator(".panes").innerText();
  await page.getByRole("link", { name: "API", exact: true }).click();
  await page.getByRole("button", { name: "Authorize" }).waitFor();
  await page.goBack();
  await page.locator("option", { hasText: NAMES[0] }).first().waitFor({ state: "attached" });
  await page.waitForFunction((name) => document.querySelector("[name=model]").value === name, NAMES[0]);
  assert.equal(await page.locator(".panes").innerText(), shown);
  const result = page.getByLabel("Result of get_weather").first();
  assert.equal(await result.inputValue(), '{"temperature": 21}');
  assert.equal(await result.isEditable(), false);
});

pageTest("chats are kept in the browser: listed, opened, renamed and deleted", async (page) => {
  const dialog = page.getByRole("dialog", { name: "Chats" });
  const list = () => page.getByRole("button", { name: "Chats" }).click();
  const names = () => dialog.locator(".chat-name").allTextContents();
  await setting(page, "Temperature").fill("0");
  await list();
  await dialog.getByText("No chat yet.").waitFor();
  await dialog.getByRole("button", { name: "Close" }).click();
  await say(page, "What is 47 + 38?");
  const shown = await page.locator(".log").first().innerText();
  await list();
  assert.deepEqual(await names(), ["What is 47 + 38?"]);
  await dialog.getByRole("button", { name: "New chat" }).click();
  assert.equal(await page.locator(".turn").count(), 0);
  await say(page, "What is 2 + 2?");
  await page.reload();
  await page.locator("option", { hasText: NAMES[0] }).first().waitFor({ state: "attached" });
  await list();
  assert.deepEqual(await names(), ["What is 2 + 2?", "What is 47 + 38?"]);
  await dialog.getByRole("button", { name: "Rename What is 47 + 38?" }).click();
  await page.keyboard.type("No");
  await page.keyboard.press("Escape");
  assert.equal(await dialog.isVisible(), true);
  await dialog.getByRole("button", { name: "Rename What is 47 + 38?" }).click();
  await page.keyboard.type("Sums");
  await page.keyboard.press("Enter");
  assert.deepEqual(await names(), ["What is 2 + 2?", "Sums"]);
  await dialog.getByRole("button", { name: "Sums", exact: true }).click();
  assert.equal(await page.locator(".log").first().innerText(), shown);
  await say(page, "And 1 more?");
  await list();
  assert.deepEqual(await names(), ["Sums", "What is 2 + 2?"]);
  await dialog.getByRole("button", { name: "Delete What is 2 + 2?" }).click();
  assert.deepEqual(await names(), ["Sums"]);
  await dialog.getByRole("button", { name: "Close" }).click();
  assert.equal(await page.locator(".turn").count(), 4);
  await page.getByRole("button", { name: "Clear" }).first().click();
  await list();
  await dialog.getByText("No chat yet.").waitFor();
  assert.deepEqual(await page.evaluate(() => Object.keys(localStorage)), []);
});

pageTest("an answer that streams is kept as far as it came where another chat is opened", async (page) => {
  await page.getByLabel("Message").fill("Count from 1 to 99");
  await page.getByRole("button", { name: "Send" }).click();
  await page.locator(".answer .content:not(:empty)").waitFor();
  const dialog = page.getByRole("dialog", { name: "Chats" });
  await page.getByRole("button", { name: "Chats" }).click();
  await dialog.getByRole("button", { name: "New chat" }).click();
  await say(page, "What is 2 + 2?");
  await page.getByRole("button", { name: "Chats" }).click();
  await dialog.getByRole("button", { name: "Count from 1 to 99", exact: true }).click();
  await lastAnswer(page).getByText("Stopped.").waitFor();
  assert.equal(await page.locator(".turn").count(), 2);
});

test("models are loaded, pinned and unloaded", { timeout: 90_000 }, async () => {
  const own = await startServer("--model", "mlx-parallm-demo", "demo:embed");
  try {
    const { page, faults } = await openPage(browser, own.url);
    await page.getByRole("link", { name: "Server", exact: true }).click();
    const row = page.locator("#models tbody tr", { hasText: "demo:embed" });
    const state = row.locator('td[data-name="State"]');
    await state.getByText("loaded", { exact: true }).waitFor();
    await row.getByRole("button", { name: "Pin" }).click();
    await state.getByText("loaded, pinned").waitFor();
    assert.equal(await row.getByRole("button", { name: "Pin" }).count(), 0);
    page.once("dialog", (question) => question.dismiss());
    await row.getByRole("button", { name: "Unload" }).click();
    assert.equal(await row.count(), 1);
    page.once("dialog", (question) => question.accept());
    await row.getByRole("button", { name: "Unload" }).click();
    await page.waitForFunction(() => !document.querySelector("#models").textContent.includes("demo:embed"));
    assert.deepEqual(faults, []);
    await page.context().close();
  } finally {
    await own.stop();
  }
});

test("a model that lies in a folder is loaded by a button, and lies there again", { timeout: 90_000 }, async () => {
  const folder = mkdtempSync(join(tmpdir(), "page-test-"));
  cpSync(new URL("../../mlx_parallm/demo_models/chat", import.meta.url), join(folder, "mine"), { recursive: true });
  const own = await startServer("--model", "demo:embed", "--model-dir", folder);
  try {
    const { page, faults } = await openPage(browser, own.url);
    await page.getByRole("link", { name: "Server", exact: true }).click();
    const row = page.locator("#models tbody tr", { hasText: "mine" });
    const state = row.locator('td[data-name="State"]');
    await state.getByText("available", { exact: true }).waitFor();
    assert.match(await row.locator('td[data-name="Files"]').textContent(), /MiB/);
    await row.getByRole("button", { name: "Load" }).click();
    await state.getByText("loaded", { exact: true }).waitFor();
    await page.getByRole("link", { name: "Playground" }).click();
    await page.locator("option", { hasText: "mine" }).first().waitFor({ state: "attached" });
    await say(page, "What is 2 + 2?");
    await page.getByRole("link", { name: "Server", exact: true }).click();
    page.once("dialog", (question) => question.accept());
    await row.getByRole("button", { name: "Unload" }).click();
    await state.getByText("available", { exact: true }).waitFor();
    assert.deepEqual(faults, []);
    await page.context().close();
  } finally {
    await own.stop();
    rmSync(folder, { recursive: true });
  }
});

test("models that are elsewhere are loaded by a button, and refusals are shown", { timeout: 60_000 }, async () => {
  const { page } = await openPage(browser, server.url);
  const asked = [];
  const card = { id: "other", root: "other", created: 0, max_model_len: null, tasks: null, pinned: false };
  let model = { ...card, status: "available", progress: 0, size_bytes: 3 << 20 };
  await page.route("**/v1/models", (route) => route.fulfill({ json: { object: "list", data: [model] } }));
  await page.route("**/v1/models/load", (route) => {
    asked.push(route.request().postDataJSON());
    if (asked.length === 1) return route.fulfill({ status: 403, json: { error: { message: "needs the admin key" } } });
    model = { ...model, status: "loading", progress: 0.25 };
    return route.fulfill({ json: model });
  });
  await page.goto(`${server.url}#server`);
  await page.reload();
  const row = page.locator("#models tbody tr");
  await row.getByText("3.0 MiB").waitFor();
  await row.getByRole("button", { name: "Load other" }).click();
  await page.getByRole("alert").getByText("needs the admin key").waitFor();
  await row.getByRole("button", { name: "Load other" }).click();
  await row.getByText("loading 25 %").waitFor();
  assert.deepEqual(asked, [{ model: "other", pin: false }, { model: "other", pin: false }]);
  assert.equal(await row.getByRole("button").count(), 0);
  model = { ...model, status: "loaded", progress: 1, ttl: 300, expires_in_s: 240 };
  await row.getByText("in 4 min").waitFor();
  await page.context().close();
});

test("the chat offers only models that generate", { timeout: 60_000 }, async () => {
  const { page, faults } = await openPage(browser, server.url);
  const models = [["encoder", ["embed"]], ["talker", ["generate"]], ["unloaded", null]];
  let known = models;
  const answer = (route) => {
    const data = known.map(([id, tasks]) => ({ id, tasks, root: id, created: 1, max_model_len: 9 }));
    return route.fulfill({ json: { object: "list", data } });
  };
  await page.route("**/v1/models", answer);
  await page.reload();
  const offered = () => page.locator("select[name=model]").first().locator("option").allTextContents();
  await page.locator("option", { hasText: "talker" }).first().waitFor({ state: "attached" });
  assert.deepEqual(await offered(), ["talker"]);
  known = models.slice(0, 1);
  await page.reload();
  await page.locator("#models code", { hasText: "encoder" }).waitFor({ state: "attached" });
  assert.deepEqual(await offered(), []);
  await page.getByLabel("Message").fill("hello");
  await page.getByLabel("Message").press("Enter");
  assert.match(await page.getByRole("alert").textContent(), /No model of this server generates/);
  assert.deepEqual(faults, []);
  await page.context().close();
});

test("the API's documentation is folded, begins with chat and takes a key", { timeout: 60_000 }, async () => {
  const { page } = await openPage(browser, `${server.url}docs`);
  await page.getByRole("button", { name: "Authorize" }).waitFor();
  const groups = page.locator(".opblock-tag");
  assert.match(await groups.first().textContent(), /^chat/);
  assert.equal(await page.locator(".opblock").count(), 0);
  await page.context().close();
});

pageTest("a tool is called, its result typed, and the model goes on", async (page) => {
  await page.getByRole("button", { name: "Call a tool" }).click();
  await setting(page, "Temperature").fill("0");
  await page.getByLabel("Message").press("Control+Enter");
  const result = page.getByLabel("Result of get_weather");
  await result.waitFor();
  const args = await lastAnswer(page).getByLabel("Arguments").textContent();
  assert.deepEqual(JSON.parse(args), { city: "Oslo" });
  await result.fill('{"temperature": 21, "sky": "sunny"}');
  await page.getByRole("button", { name: "Send results" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".answer").length === 2);
  await answered(page);
  assert.match(await lastAnswer(page).locator(".content").textContent(), /21/);
  assert.equal(await page.locator(".failed").count(), 0);
});

pageTest("an answer keeps to a schema", async (page) => {
  await page.getByRole("button", { name: "Answer in JSON" }).click();
  await setting(page, "Temperature").fill("1");
  await page.getByLabel("Message").press("Control+Enter");
  await page.waitForFunction(() => document.querySelector(".answer"));
  await answered(page);
  const person = JSON.parse(await lastAnswer(page).locator(".content").textContent());
  assert.deepEqual(Object.keys(person).sort(), ["age", "city", "name"]);
  assert.equal(typeof person.age, "number");
});

pageTest("a chat that is cleared while it streams is gone", async (page) => {
  await page.getByLabel("Message").fill("Count from 1 to 99");
  await page.getByRole("button", { name: "Send" }).click();
  await page.locator(".answer .content:not(:empty)").waitFor();
  await page.getByRole("button", { name: "Clear" }).first().click();
  await page.getByRole("button", { name: "Send" }).waitFor();
  assert.equal(await page.locator(".turn").count(), 0);
  assert.equal(await page.locator("[data-part=tokens]").first().textContent(), "–");
});

pageTest("two settings of two models are compared", async (page) => {
  await page.getByRole("button", { name: "Compare" }).click();
  await page.getByRole("button", { name: "Settings" }).nth(1).click();
  await setting(page, "Model", 1).selectOption(NAMES[1]);
  await setting(page, "Thinking", 1).selectOption("off");
  await page.getByRole("button", { name: "Settings" }).nth(1).click();
  const bodies = [];
  page.on("request", (request) => {
    if (request.url().endsWith("completions")) bodies.push(request.postDataJSON());
  });
  await say(page, "What is 347 + 586?");
  assert.deepEqual(bodies.map((body) => body.model).sort(), NAMES);
  assert.deepEqual(bodies.map((body) => body.messages), [bodies[0].messages, bodies[0].messages]);
  const panes = page.locator(".pane");
  assert.equal(await panes.nth(0).locator(".thoughts").isVisible(), true);
  assert.equal(await panes.nth(1).locator(".thoughts").isVisible(), false);
  for (const i of [0, 1]) {
    const numbers = await panes.nth(i).locator(".numbers dd").allTextContents();
    assert.equal(numbers.length, 4);
    assert.ok(numbers.every((text) => /\d/.test(text)), numbers.join(" "));
  }
  assert.match(await panes.nth(1).getByRole("heading", { level: 2 }).textContent(), /thinking off/);
  await page.getByRole("button", { name: "Compare" }).click();
  await panes.nth(1).waitFor({ state: "hidden" });
});

pageTest("an answer can be stopped", async (page) => {
  await page.getByLabel("Message").fill("Count from 1 to 99");
  await page.getByRole("button", { name: "Send" }).click();
  await page.getByRole("button", { name: "Stop" }).click();
  await lastAnswer(page).getByText("Stopped.").waitFor();
  assert.equal(await page.getByRole("button", { name: "Send" }).isVisible(), true);
  await say(page, "What is 2 + 2?");
  assert.match(await lastAnswer(page).locator(".content").textContent(), /4/);
});

pageTest("what cannot be sent is told at the field, and nothing is sent", async (page) => {
  let sent = 0;
  page.on("request", (request) => (sent += Number(request.method() === "POST")));
  for (const [label, text] of [["Tools", "[{"], ["Tools", "{}"], ["Temperature", "3"]]) {
    const field = setting(page, label);
    await field.fill(text);
    await page.getByLabel("Message").fill("hello");
    await page.getByLabel("Message").press("Control+Enter");
    const problem = page.getByRole("alert");
    assert.match(await problem.textContent(), new RegExp(label));
    assert.equal(await field.evaluate((one) => one === document.activeElement), true);
    await field.fill("");
  }
  assert.equal(sent, 0);
  assert.equal(await page.locator(".turn").count(), 0);
});

test("what the server refuses is shown as it says it", async () => {
  const { page } = await openPage(browser, server.url);
  await enterKey(page);
  await page.locator("option", { hasText: NAMES[0] }).first().waitFor({ state: "attached" });
  await setting(page, "Max tokens").fill("99999");
  await say(page, "hello");
  await page.locator(".failed .note", { hasText: "maximum context length" }).waitFor();
  await page.context().close();
});

pageTest("charts move, and the models are listed", async (page) => {
  await page.getByRole("link", { name: "Playground" }).click();
  await say(page, "Count from 1 to 40");
  await page.getByRole("link", { name: "Server", exact: true }).click();
  assert.equal(await page.locator(".chart").count(), 8);
  const paths = () => page.locator(".chart .line-0").evaluateAll((all) => all.map((one) => one.getAttribute("d")));
  await page.waitForFunction(() =>
    [...document.querySelectorAll(".chart")].every((chart) => chart.querySelector(".line-0").getAttribute("d")));
  const drawn = await paths();
  await page.waitForFunction((old) =>
    [...document.querySelectorAll(".chart .line-0")].some((one, i) => one.getAttribute("d") !== old[i]), drawn);
  const peak = await page.locator(".chart", { hasText: "Generated tokens" }).locator(".axis-top").textContent();
  assert.ok(Number.parseInt(peak) > 1, peak);
  const latency = page.getByRole("img", { name: /Time to first token: median .* m?s, p95 .* m?s/ });
  await latency.waitFor();
  await latency.hover({ position: { x: 5, y: 20 } });
  await page.getByText(/\d s ago/).first().waitFor();
  const rows = page.locator("#models tbody tr");
  assert.deepEqual(await rows.locator("code").allTextContents(), NAMES);
  assert.match(await rows.first().textContent(), /2,048 tokens/);
});

test("a disk that keeps KV has a row, also after a restart", { timeout: 180_000 }, async () => {
  const folder = mkdtempSync(join(tmpdir(), "page-test-"));
  const prompt = Array.from({ length: 200 }, (_, number) => `line ${number}`).join("\n");
  const body = JSON.stringify({ prompt, max_tokens: 2 });
  const options = { method: "POST", headers: { "content-type": "application/json" }, body };
  try {
    for (const [found, waited] of [[/^0 \(0 %\)$/, "No prompt has waited"], [/\(9\d %\)$/, "1 prompt waited"]]) {
      const keeping = await startServer("--kv-disk", folder, "--kv-disk-bytes", "64MiB");
      try {
        assert.equal((await fetch(new URL("v1/completions", keeping.url), options)).status, 200);
        const { page, faults } = await openPage(browser, keeping.url);
        await page.getByRole("link", { name: "Server", exact: true }).click();
        const section = page.locator("#tiers");
        const cell = (name) => section.locator(`td[data-name="${name}"]`);
        await cell("Used").getByText(/iB of 64 MiB/).waitFor();
        assert.deepEqual(await cell("Place").allTextContents(), ["Disk"]);
        assert.equal(await cell("State").textContent(), "on");
        await cell("Prompt tokens found").getByText(found).waitFor();
        await section.getByText(waited).waitFor();
        assert.deepEqual(faults, []);
        await page.context().close();
      } finally {
        await keeping.stop();
      }
    }
  } finally {
    rmSync(folder, { recursive: true });
  }
});

test("training sessions have a row each while there are some", { timeout: 90_000 }, async () => {
  const folder = mkdtempSync(join(tmpdir(), "page-test-"));
  const trained = await startServer("--model", "demo:mlm", "--data-dir", folder);
  const send = async (method, path, body) => {
    const options = { method, headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
    const response = await fetch(new URL(`v1/mezo/${path}`, trained.url), options);
    assert.equal(response.status, 200);
    return response.json();
  };
  try {
    const { page, faults } = await openPage(browser, trained.url);
    const asked = page.waitForResponse(/mezo/);
    await page.getByRole("link", { name: "Server", exact: true }).click();
    assert.equal((await asked).status(), 200);
    await page.getByRole("img", { name: /Generated tokens/ }).waitFor();
    const section = page.locator("#sessions");
    assert.equal(await section.isVisible(), false);
    const session = await send("POST", "sessions", {
      model: "demo:mlm",
      objective: { kind: "label_words", label_words: { good: "cat", bad: "dog" } },
      data: [{ text: "a joyful film", label: "good" }, { text: "a dull film", label: "bad" }],
      batch_size: 2,
      trainable: { layers: "top:1" },
    });
    const cell = (name) => section.locator(`td[data-name="${name}"]`);
    await cell("Status").getByText("ready").waitFor();
    assert.equal(await cell("Steps").textContent(), "0");
    assert.deepEqual(await cell("Prefix hits").allTextContents(), ["–"]);
    await cell("Latest losses").getByText("no steps").waitFor();
    await send("POST", `sessions/${session.id}/step`, { steps: 5 });
    await page.getByRole("img", { name: /Loss of mezo_\w+: loss 0\.\d+/ }).waitFor();
    await cell("Latest losses").getByText("last 5 steps").waitFor();
    assert.equal((await cell("Latest losses").locator(".line-0").getAttribute("d")).split("L").length, 5);
    assert.equal(await cell("Prefix hits").textContent(), "80 %");
    await send("POST", `sessions/${session.id}/run`, { steps: 1_000_000 });
    await cell("Steps/s").getByText(/\d/).waitFor();
    assert.equal(await cell("Status").textContent(), "running");
    assert.match(await cell("Steps").textContent(), /^[\d,]+ of 1,000,005$/);
    await cell("Latest losses").getByText("last 300 steps").waitFor();
    await page.locator("td .chart svg").hover({ position: { x: 100, y: 10 } });
    await cell("Latest losses").getByText(/\d+ steps ago/).waitFor();
    await send("POST", `sessions/${session.id}/pause`);
    await cell("Status").getByText("paused").waitFor();
    await send("DELETE", `sessions/${session.id}`);
    await section.waitFor({ state: "hidden" });
    assert.deepEqual(faults, []);
    await page.context().close();
  } finally {
    await trained.stop();
    rmSync(folder, { recursive: true, force: true });
  }
});

pageTest("a server that keeps no sessions is asked once and shows none", async (page) => {
  let count = 0;
  await page.route("**/v1/mezo/sessions", (route) => {
    count += 1;
    return route.fulfill({ status: 409, json: { error: { message: "set --data-dir" } } });
  });
  const watched = () => page.getByRole("img", { name: /Generated tokens: tokens \d/ }).waitFor();
  const isAsked = page.waitForResponse(/mezo/);
  await page.getByRole("link", { name: "Server", exact: true }).click();
  await isAsked;
  await watched();
  // The metrics are read every second, the sessions every two: six readings later it would show.
  for (let reading = 0; reading < 6; reading++) await page.waitForResponse(/metrics$/);
  assert.equal(count, 1);
  assert.equal(await page.locator("#sessions").isVisible(), false);
}, { ignored: "409" });

pageTest("the servers of a fleet have a row each, if there is one", async (page) => {
  const versions = { models: { m: "7" }, adapters: {} };
  const lost = { url: "http://10.0.0.2:8000", number: null, ready: false, reason: "It is silent.", here: false };
  const own = { url: "http://10.0.0.1:8000", number: 7, ready: true, reason: null, here: true, ...versions };
  let data = [own, lost];
  await page.route("**/metrics", async (route) => {
    const response = await route.fetch();
    const fleet = 'mlx_parallm:fleet_servers{state="ready"} 1\n';
    return route.fulfill({ response, body: (await response.text()) + (data ? fleet : "") });
  });
  await page.route("**/v1/peers", (route) => route.fulfill({ json: { object: "fleet", data } }));
  await page.getByRole("link", { name: "Server", exact: true }).click();
  const section = page.locator("#peers");
  const cells = (name) => section.locator(`td[data-name="${name}"]`);
  await cells("Server").first().waitFor();
  assert.deepEqual(await cells("Server").allTextContents(), ["http://10.0.0.1:8000 (this one)", "http://10.0.0.2:8000"]);
  assert.deepEqual(await cells("State").allTextContents(), ["ready", "not readyIt is silent."]);
  assert.deepEqual(await cells("Weights").allTextContents(), ["m: 7", "–"]);
  data = [];
  await section.waitFor({ state: "hidden" });
});

for (const scheme of ["light", "dark"]) {
  pageTest(`the theme follows a ${scheme} system until it is chosen`, async (page) => {
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const isDark = async () => Number(/\d+/.exec(await ground())[0]) < 128;
    assert.equal(await isDark(), scheme === "dark");
    await page.getByRole("button", { name: "Theme: system" }).click();
    assert.equal(await isDark(), false);
    await page.getByRole("button", { name: "Theme: light" }).click();
    assert.equal(await isDark(), true);
    await page.reload();
    assert.equal(await isDark(), true);
    await page.getByRole("button", { name: "Theme: dark" }).click();
    assert.equal(await isDark(), scheme === "dark");
  }, { colorScheme: scheme });
}

for (const [name, options] of [["a desk", {}], ["a phone", PHONE]]) {
  pageTest(`nothing is cut off, shifts or lacks a name at the width of ${name}`, async (page) => {
    const isWide = () => page.evaluate(() => document.scrollingElement.scrollWidth > innerWidth);
    const check = async () => assert.equal(await isWide(), false);
    await check();
    await say(page, "What is 47 + 38?");
    await page.getByRole("button", { name: "Compare" }).click();
    await say(page, "What is 47 + 38?");
    await check();
    await page.getByRole("link", { name: "Server", exact: true }).click();
    await page.getByRole("img", { name: /Generated tokens: tokens \d/ }).waitFor();
    await check();
    const nameless = await page.evaluate(() => {
      const all = [...document.querySelectorAll("button, input, select, textarea, [role=img]")];
      const isNamed = (one) => one.labels?.length || one.ariaLabel || one.textContent.trim();
      return all.filter((one) => !isNamed(one)).map((one) => one.outerHTML);
    });
    assert.deepEqual(nameless, []);
    assert.ok((await page.evaluate(() => window.shifts)) < 0.1);
  }, options);
}

test("it works below a prefix that a proxy strips", { timeout: 60_000 }, async () => {
  const proxy = createServer((incoming, outgoing) => {
    if (!incoming.url.startsWith("/llm/")) return outgoing.writeHead(404).end();
    const { method, headers } = incoming;
    const onward = request(new URL(incoming.url.slice(5), server.url), { method, headers }, (answer) => {
      outgoing.writeHead(answer.statusCode, answer.headers);
      answer.pipe(outgoing);
    });
    return incoming.pipe(onward);
  });
  await new Promise((ready) => proxy.listen(0, "127.0.0.1", ready));
  const { page, faults } = await openPage(browser, `http://127.0.0.1:${proxy.address().port}/llm/`);
  await enterKey(page);
  await page.locator("option", { hasText: NAMES[0] }).first().waitFor({ state: "attached" });
  await say(page, "What is 2 + 2?");
  assert.match(await lastAnswer(page).locator(".content").textContent(), /4/);
  assert.deepEqual(faults, []);
  await page.context().close();
  proxy.closeAllConnections();
  proxy.close();
});

test("a server that has gone is told", { timeout: 60_000 }, async () => {
  const other = await startServer("--max-model-len", "256");
  const { page } = await openPage(browser, other.url);
  await page.locator("#status[data-state=up]").waitFor();
  assert.equal(await page.getByRole("dialog").isVisible(), false, "no key, no question");
  await other.stop();
  await page.locator("#status[data-state=down]", { hasText: "no connection" }).waitFor();
  await page.context().close();
});

const DOT =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";

/** A test with a page of `seeing`. */
function seeingTest(name, run) {
  test(name, { timeout: 90_000 }, async () => {
    const { page, faults } = await openPage(browser, seeing.url);
    await page.locator("option", { hasText: "demo:see" }).first().waitFor({ state: "attached" });
    await run(page);
    assert.deepEqual(faults, []);
    await page.context().close();
  });
}

pageTest("images are not offered where no model takes them", async (page) => {
  assert.equal(await page.getByRole("button", { name: "Image", exact: true }).isVisible(), false);
  assert.equal(await page.getByRole("button", { name: "Look at a drawing" }).isVisible(), false);
  const file = { name: "dot.png", mimeType: "image/png", buffer: Buffer.from(DOT, "base64") };
  await page.locator("[data-part=image-files]").setInputFiles([file]);
  await page.getByText("No model of this server takes images.").waitFor();
  assert.equal(await page.locator(".thumbnail").count(), 0);
});

pageTest("audio is not offered where no model hears it", async (page) => {
  for (const name of ["Audio file", "Record"]) {
    assert.equal(await page.getByRole("button", { name, exact: true }).isVisible(), false);
  }
  const file = { name: "a.wav", mimeType: "audio/wav", buffer: Buffer.from("RIFF") };
  await page.locator("[data-part=audio-file]").setInputFiles([file]);
  await page.getByText("No model of this server takes audio.").waitFor();
  assert.equal(await page.locator("[data-part=clip] audio").count(), 0);
});

seeingTest("a drawing is answered by the model that takes images, which is chosen for it", async (page) => {
  assert.equal(await setting(page, "Model").inputValue(), "mlx-parallm-demo");
  await page.getByRole("button", { name: "Look at a drawing" }).click();
  assert.equal(await setting(page, "Model").inputValue(), "demo:see");
  await setting(page, "Model").selectOption("mlx-parallm-demo");
  await page.getByRole("button", { name: "Send" }).click();
  await page.getByText("mlx-parallm-demo does not take images.").waitFor();
  await setting(page, "Model").selectOption("demo:see");
  await say(page, "How many circles are there?");
  await lastAnswer(page).getByText("2", { exact: true }).waitFor();
  await say(page, "Where is the green square?");
  await lastAnswer(page).getByText("bottom", { exact: true }).waitFor();
});

seeingTest("other examples are answered after a drawing, and Clear undoes them", async (page) => {
  const model = setting(page, "Model");
  const clear = page.getByRole("button", { name: "Clear" }).first();
  const drawing = page.getByRole("button", { name: "Look at a drawing" });
  await setting(page, "Temperature").fill("0");
  await drawing.click();
  await page.getByRole("button", { name: "Send" }).click();
  await answered(page);
  await clear.click();
  assert.equal(await model.inputValue(), "mlx-parallm-demo");
  for (const name of ["Call a tool", "Answer in JSON", "Think in steps"]) {
    await drawing.click();
    assert.equal(await model.inputValue(), "demo:see");
    await page.getByRole("button", { name }).click();
    assert.equal(await model.inputValue(), "mlx-parallm-demo");
    assert.equal(await page.locator(".thumbnail").count(), 0);
    await page.getByRole("button", { name: "Send" }).click();
    await answered(page);
    assert.doesNotMatch(await lastAnswer(page).textContent(), /400/);
    await clear.click();
    assert.equal(await setting(page, "Temperature").inputValue(), "0");
    const { format, tools } = await page.locator("form[data-part=settings]").first().evaluate(
      (form) => Object.fromEntries(new FormData(form)),
    );
    assert.deepEqual([format, tools], ["text", ""]);
  }
  await drawing.click();
  await model.selectOption("mlx-parallm-demo");
  await clear.click();
  assert.equal(await page.locator(".thumbnail").count(), 0);
  assert.equal(await page.locator("[data-part=prompt]").inputValue(), "");
});

seeingTest("images are added by button, drop and paste, removed, sent and shown", async (page) => {
  const sent = [];
  await page.route("**/v1/chat/completions", (route) => {
    sent.push(route.request().postDataJSON());
    const chunk = { choices: [{ index: 0, delta: { content: "a red dot" }, finish_reason: "stop" }] };
    const body = `data: ${JSON.stringify(chunk)}\n\ndata: [DONE]\n\n`;
    return route.fulfill({ contentType: "text/event-stream", body });
  });
  const waiting = page.locator(".thumbnail");
  const file = { name: "dot.png", mimeType: "image/png", buffer: Buffer.from(DOT, "base64") };
  await page.locator("[data-part=image-files]").setInputFiles([file]);
  await waiting.nth(0).waitFor();
  for (const [target, kind] of [["#playground-view", "drop"], ["[data-part=prompt]", "paste"]]) {
    await page.locator(target).evaluate((element, [type, base64]) => {
      const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], "dot.png", { type: "image/png" }));
      const options = { bubbles: true, cancelable: true };
      const event =
        type === "drop"
          ? new DragEvent(type, { ...options, dataTransfer: transfer })
          : new ClipboardEvent(type, { ...options, clipboardData: transfer });
      element.dispatchEvent(event);
    }, [kind, DOT]);
    await waiting.nth(kind === "drop" ? 1 : 2).waitFor();
  }
  await page.getByRole("button", { name: "Remove image 2" }).click();
  assert.equal(await waiting.count(), 2);
  const text = { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("x") };
  await page.locator("[data-part=image-files]").setInputFiles([text]);
  await page.getByText("notes.txt is not a PNG").waitFor();
  await say(page, "What is this?");
  assert.equal(await waiting.count(), 0);
  assert.deepEqual(sent[0].messages.at(-1).content, [
    ...Array(2).fill({ type: "image_url", image_url: { url: `data:image/png;base64,${DOT}` } }),
    { type: "text", text: "What is this?" },
  ]);
  const shown = page.locator(".turn.user img");
  assert.equal(await shown.count(), 2);
  assert.ok(await shown.first().evaluate((image) => image.decode().then(() => image.naturalWidth === 1)));
  await lastAnswer(page).getByText("a red dot").waitFor();
});
