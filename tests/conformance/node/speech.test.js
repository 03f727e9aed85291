// recordings in every form of answer, streamed too, by OpenAI's client and the AI SDK

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, experimental_transcribe as transcribe } from "ai";
import OpenAI, { toFile } from "openai";
import { BASE_URL, KEY } from "./exercises.js";

const MODEL = "hearing";
const SENTENCE = "Hello there.";
const SECONDS = 31;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY });
const provider = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });

/** A WAV file of silence, in two windows; the model hears the same in each. */
function recording() {
  const size = 2 * 16_000 * SECONDS;
  const file = Buffer.alloc(44 + size);
  file.write("RIFF\0\0\0\0WAVEfmt ");
  file.writeUInt32LE(36 + size, 4);
  file.writeUInt32LE(16, 16);
  file.writeUInt16LE(1, 20);
  file.writeUInt16LE(1, 22);
  file.writeUInt32LE(16_000, 24);
  file.writeUInt32LE(32_000, 28);
  file.writeUInt16LE(2, 32);
  file.writeUInt16LE(16, 34);
  file.write("data", 36);
  file.writeUInt32LE(size, 40);
  return file;
}

async function create(options) {
  const file = await toFile(recording(), "speech.wav");
  return client.audio.transcriptions.create({ file, model: MODEL, ...options });
}

test("openai: JSON and text", async () => {
  assert.equal((await create({})).text, SENTENCE.repeat(2));
  assert.equal(await create({ response_format: "text" }), `${SENTENCE.repeat(2)}\n`);
});

test("openai: subtitles", async () => {
  assert.match(await create({ response_format: "srt" }), /^1\n00:00:00,000 --> 00:00:01,000\nHello/);
  assert.match(await create({ response_format: "vtt" }), /^WEBVTT\n\n00:00:00\.000 --> 00:00:01/);
});

test("openai: segments", async () => {
  const options = { response_format: "verbose_json", timestamp_granularities: ["segment"] };
  const { language, duration, segments } = await create(options);
  assert.deepEqual([language, duration], ["english", SECONDS]);
  assert.deepEqual(segments.map(({ start, end }) => [start, end]), [[0, 1], [30, 31]]);
});

test("openai: a stream", async () => {
  const events = [];
  for await (const event of await create({ stream: true })) events.push(event);
  const [first, second, done] = events;
  assert.deepEqual([first.delta, second.delta, done.text], [SENTENCE, SENTENCE, SENTENCE.repeat(2)]);
});

for (const [name, openai] of Object.entries({ plain: undefined, segments: { language: "en" } })) {
  test(`AI SDK: ${name}`, async () => {
    const options = openai && { providerOptions: { openai } };
    const model = provider.transcription(MODEL);
    const answer = await transcribe({ model, audio: recording(), ...options });
    assert.equal(answer.text, SENTENCE.repeat(2));
    const times = answer.segments.map(({ startSecond, endSecond }) => [startSecond, endSecond]);
    assert.deepEqual(times, openai ? [[0, 1], [30, 31]] : []);
  });
}

test("AI SDK: words are refused", async () => {
  const providerOptions = { openai: { timestampGranularities: ["word"] } };
  const model = provider.transcription(MODEL);
  await assert.rejects(
    transcribe({ model, audio: recording(), providerOptions, maxRetries: 0 }),
    (error) => APICallError.isInstance(error) && error.statusCode === 400,
  );
});
