// Speech in the playground, in Chromium with a microphone that beeps: a server of a tiny speech model
// that hears TEXT in everything, beside the embedded model.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { answered, openPage, startBrowser, startServer } from "./setup.js";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const TEXT = "Hello there.";
const WRITE = `import sys; from pathlib import Path; from tests.builders.speech_folders import write_scripted_speech
write_scripted_speech(Path(sys.argv[1]), sys.argv[2])`;
const { pcmOf, wavOf } = await import(new URL("../../mlx_parallm/api/page/assets/wav.js", import.meta.url));
const TALKER = "mlx-parallm-demo";
const RATE = 16_000;
let folder;
let ear;
let server;
let browser;

before(async () => {
  folder = mkdtempSync(join(tmpdir(), "page-test-"));
  ear = join(folder, "ear");
  execFileSync(process.env.PYTHON ?? "python3", ["-c", WRITE, ear, TEXT], { cwd: ROOT });
  server = await startServer("--max-model-len", "512", "--model", TALKER, ear);
  browser = await startBrowser("--use-fake-device-for-media-stream");
});

after(async () => {
  await browser?.close();
  await server?.stop();
  if (folder) rmSync(folder, { recursive: true });
});

/**
 * A test with a page of its own, where the microphone is allowed, and what is sent to be heard:
 * `{path, fields, wav}`. It must end without a fault, but for those with the text `ignored`.
 */
function speechTest(name, run, { ignored = null, ...options } = {}) {
  test(name, { timeout: 90_000 }, async () => {
    const { page, faults } = await openPage(browser, server.url, { permissions: ["microphone"], ...options });
    const sent = [];
    // The files of a form are in the requests of routes only.
    await page.route("**/v1/audio/*", (route) => {
      const request = route.request();
      sent.push({ path: new URL(request.url()).pathname, ...formOf(request.postDataBuffer()) });
      return route.continue();
    });
    await page.locator("option", { hasText: ear }).first().waitFor({ state: "attached" });
    await run(page, sent);
    assert.deepEqual(faults.filter((fault) => ignored === null || !fault.includes(ignored)), []);
    await page.context().close();
  });
}

/** The fields of a form, and its file. */
function formOf(body) {
  const text = body.toString("latin1");
  const boundary = text.slice(0, text.indexOf("\r\n"));
  const fields = {};
  let wav = null;
  for (const part of text.split(boundary).slice(1, -1)) {
    const end = part.indexOf("\r\n\r\n");
    const [head, content] = [part.slice(0, end), part.slice(end + 4, -2)];
    const [, name] = /name="([^"]*)"/.exec(head);
    const file = /filename="([^"]*)"/.exec(head);
    if (file) wav = Buffer.from(content, "latin1");
    fields[name] = file ? file[1] : content;
  }
  return { fields, wav };
}

const button = (page, name) => page.getByRole("button", { name, exact: true });
const sendButton = (page) => page.getByRole("button", { name: "Send ⏎" });
const waiting = (page) => page.locator("[data-part=clip] audio");
const lastAnswer = (page) => page.locator(".answer:visible").last();
const setting = (page, label, pane = 0) => page.getByLabel(label).nth(pane);
const TONE = Buffer.from(
  wavOf([pcmOf(Float32Array.from({ length: 2 * RATE }, (_, i) => 0.3 * Math.sin(i / 20)))], RATE),
);
const FILE = { name: "tone.wav", mimeType: "audio/wav", buffer: TONE };

async function send(page) {
  const before = await page.locator(".answer").count();
  await sendButton(page).click();
  await page.waitForFunction((count) => document.querySelectorAll(".answer").length > count, before);
  await answered(page);
}

async function choose(page, file = FILE) {
  await page.locator("[data-part=audio-file]").setInputFiles([file]);
  await waiting(page).waitFor();
}

speechTest("a file is heard by the model for it, which is chosen", async (page, sent) => {
  assert.equal(await setting(page, "Model").inputValue(), TALKER);
  await choose(page);
  assert.equal(await setting(page, "Model").inputValue(), ear);
  assert.equal(await setting(page, "Temperature").isVisible(), false);
  await page.getByLabel("Language", { exact: true }).first().fill("de");
  await page.getByLabel("Prompt", { exact: true }).fill("Oslo");
  await send(page);
  assert.equal(await waiting(page).count(), 0);
  const [{ path, fields, wav }] = sent;
  assert.equal(path, "/v1/audio/transcriptions");
  assert.deepEqual(fields, { model: ear, language: "de", prompt: "Oslo", stream: "true", file: "tone.wav" });
  assert.deepEqual(wav, TONE);
  assert.match(await lastAnswer(page).locator(".stats").textContent(), /2\.00 s heard, .* × real time/);
  assert.equal(await page.locator(".answer.failed").count(), 0);
  const player = page.locator(".turn.user audio");
  assert.equal(await player.evaluate((audio) => audio.duration), 2);
  await button(page, "Again").click();
  await answered(page);
  assert.equal(sent.length, 2);
  assert.deepEqual(sent[1], sent[0]);
  await button(page, "Clear").first().click();
  assert.equal(await player.count(), 0);
});

speechTest("the microphone is recorded, sent with Enter and played", async (page, sent) => {
  await button(page, "Record").click();
  const line = page.getByRole("group", { name: "Recording" });
  await line.getByText("0:01").waitFor();
  assert.ok(await page.waitForFunction(() => document.querySelector("[data-part=level]").value > 0.1));
  assert.equal(await button(page, "Record").isDisabled(), true);
  await button(page, "Stop recording").click();
  await waiting(page).waitFor();
  assert.equal(await line.isVisible(), false);
  await page.keyboard.press("Enter");
  await lastAnswer(page).waitFor();
  await answered(page);
  const [{ fields, wav }] = sent;
  assert.equal(fields.file, "recording.wav");
  assert.deepEqual([wav.toString("latin1", 0, 4), wav.readUInt32LE(24)], ["RIFF", RATE]);
  assert.equal(wav.length, 44 + wav.readUInt32LE(40));
  const samples = new Int16Array(wav.buffer.slice(wav.byteOffset + 44, wav.byteOffset + wav.length));
  assert.ok(samples.length >= RATE && samples.some((sample) => Math.abs(sample) > 1000));
  assert.equal(await lastAnswer(page).locator(".content").textContent(), TEXT);
  assert.ok((await page.locator(".turn.user audio").evaluate((audio) => audio.duration)) >= 1);
});

speechTest("what is being recorded can be discarded, and Send ends it", async (page, sent) => {
  await button(page, "Record").click();
  await button(page, "Discard").click();
  assert.equal(await waiting(page).count(), 0);
  await button(page, "Record").click();
  await page.getByRole("group", { name: "Recording" }).getByText("0:01").waitFor();
  await send(page);
  assert.equal(await page.getByRole("group", { name: "Recording" }).isVisible(), false);
  assert.ok(sent[0].wav.length > 2 * RATE);
});

speechTest("a microphone that goes leaves what it has recorded", async (page) => {
  await page.evaluate(() => {
    const media = navigator.mediaDevices;
    const ask = media.getUserMedia.bind(media);
    media.getUserMedia = async (wish) => (window.stream = await ask(wish));
  });
  await button(page, "Record").click();
  await page.getByRole("group", { name: "Recording" }).getByText("0:01").waitFor();
  await page.evaluate(() => window.stream.getAudioTracks()[0].dispatchEvent(new Event("ended")));
  await waiting(page).waitFor();
  assert.equal(await page.evaluate(() => window.stream.getAudioTracks()[0].readyState), "ended");
});

speechTest("a browser that cannot resample the microphone sends its own rate", async (page, sent) => {
  const rate = await page.evaluate((unable) => {
    const connect = AudioContext.prototype.createMediaStreamSource;
    AudioContext.prototype.createMediaStreamSource = function (stream) {
      // As Firefox does.
      if (this.sampleRate === unable) throw new DOMException("different rates", "NotSupportedError");
      return connect.call(this, stream);
    };
    return new AudioContext().sampleRate;
  }, RATE);
  await button(page, "Record").click();
  await page.getByRole("group", { name: "Recording" }).getByText("0:01").waitFor();
  await send(page);
  assert.notEqual(rate, RATE);
  assert.equal(sent[0].wav.readUInt32LE(24), rate);
  assert.equal(await lastAnswer(page).locator(".content").textContent(), TEXT);
});

speechTest("a microphone that is denied is told", async (page) => {
  await button(page, "Record").click();
  await page.getByText("denied the microphone").waitFor();
  assert.equal(await button(page, "Record").isDisabled(), false);
}, { permissions: [] });

speechTest("a page that is not secure has no microphone, and says so", async (page) => {
  await page.evaluate(() => Object.defineProperty(navigator, "mediaDevices", { value: undefined }));
  await button(page, "Record").click();
  await page.getByText("only to pages of https or of localhost").waitFor();
});

speechTest("two panes hear the same recording, one with times and in English", async (page, sent) => {
  await setting(page, "Model").selectOption(ear);
  await button(page, "Compare").click();
  await choose(page);
  assert.equal(await setting(page, "Model", 1).inputValue(), ear);
  await button(page, "Settings").nth(1).click();
  await setting(page, "Translate to English", 1).check();
  assert.equal(await setting(page, "Colour tokens by probability", 1).isVisible(), true);
  await setting(page, "Times of the segments", 1).check();
  assert.equal(await setting(page, "Colour tokens by probability", 1).isVisible(), false);
  await button(page, "Settings").nth(1).click();
  await send(page);
  const ways = sent.map(({ path, fields }) => [path, fields.response_format, fields.stream]).sort();
  assert.deepEqual(ways, [
    ["/v1/audio/transcriptions", undefined, "true"],
    ["/v1/audio/translations", "verbose_json", undefined],
  ]);
  assert.deepEqual(await page.locator(".answer .content").allTextContents(), [TEXT, `0:00.0 – 0:01.0  ${TEXT}`]);
  assert.equal(await page.locator(".turn.user audio:visible").count(), 2);
  assert.match(await page.locator(".numbers").nth(1).textContent(), /Total\d/);
});

speechTest("of what was heard tokens are coloured", async (page) => {
  await choose(page);
  await setting(page, "Colour tokens by probability").check();
  await send(page);
  // The tokens of this model are bytes.
  assert.deepEqual(await lastAnswer(page).locator(".token").allTextContents(), [...TEXT]);
});

speechTest("of a recording the browser keeps the name, and a chat model reads it", async (page) => {
  await choose(page);
  await send(page);
  const kept = await page.evaluate(() => localStorage.getItem("mlx-parallm-chats"));
  assert.ok(kept.length < 10_000 && kept.includes("tone.wav"), kept);
  await page.reload();
  await page.locator(".turn.user", { hasText: "tone.wav, 0:02" }).waitFor();
  await page.locator("option", { hasText: ear }).first().waitFor({ state: "attached" });
  await button(page, "Again").click();
  await page.locator(".failed .note", { hasText: "is not kept: choose it again" }).waitFor();
  await setting(page, "Model").selectOption(TALKER);
  await page.getByLabel("Message").fill("Hello");
  await send(page);
  assert.equal(await lastAnswer(page).evaluate((answer) => answer.classList.contains("failed")), false);
});

speechTest("a model is not sent what it does not take", async (page, sent) => {
  await choose(page);
  await setting(page, "Model").selectOption(TALKER);
  await sendButton(page).click();
  await page.getByText(`${TALKER} does not take audio.`).waitFor();
  await setting(page, "Model").selectOption(ear);
  await button(page, "Remove audio").click();
  await page.getByLabel("Prompt", { exact: true }).fill("words");
  await sendButton(page).click();
  await page.getByText("needs an audio file or a recording").waitFor();
  assert.deepEqual(sent, []);
});

speechTest("what the server refuses is shown as it says it", async (page) => {
  await page.locator("[data-part=audio-file]").setInputFiles([{ ...FILE, buffer: TONE.subarray(0, 200) }]);
  await sendButton(page).click();
  await page.locator(".answer.failed .note", { hasText: /truncated/i }).waitFor();
}, { ignored: "400" });

speechTest("a file of the browser's formats is dropped, and sent as WAV", async (page, sent) => {
  await page.locator("#playground-view").evaluate(async (element) => {
    const context = new AudioContext();
    const tone = new OscillatorNode(context);
    const place = new MediaStreamAudioDestinationNode(context);
    tone.connect(place);
    tone.start();
    const recorder = new MediaRecorder(place.stream);
    const recorded = new Promise((resolve) => recorder.addEventListener("dataavailable", ({ data }) => resolve(data)));
    recorder.addEventListener("start", () => tone.stop(context.currentTime + 0.5));
    tone.addEventListener("ended", () => recorder.stop());
    recorder.start();
    const transfer = new DataTransfer();
    transfer.items.add(new File([await recorded], "memo.webm", { type: "audio/webm" }));
    element.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: transfer }));
  });
  await waiting(page).waitFor();
  await send(page);
  const [{ fields, wav }] = sent;
  assert.equal(fields.file, "memo.wav");
  assert.deepEqual([wav.readUInt16LE(22), wav.readUInt32LE(24)], [1, RATE]);
  assert.ok(wav.length > 2 * 0.3 * RATE);
  assert.equal(await page.locator(".answer.failed").count(), 0);
});

speechTest("a file that the browser cannot play is refused", async (page) => {
  const file = { name: "x.m4a", mimeType: "audio/mp4", buffer: Buffer.from("no sound") };
  await page.locator("[data-part=audio-file]").setInputFiles([file]);
  await page.getByText("This browser cannot play x.m4a").waitFor();
  assert.equal(await waiting(page).count(), 0);
});

speechTest("everything fits on a phone", async (page) => {
  const fits = () => page.evaluate(() => document.documentElement.scrollWidth <= innerWidth);
  assert.ok(await fits());
  await button(page, "Record").click();
  await button(page, "Stop recording").waitFor();
  assert.ok(await fits());
  await button(page, "Stop recording").click();
  await waiting(page).waitFor();
  assert.ok(await fits());
}, { viewport: { width: 390, height: 844 } });
