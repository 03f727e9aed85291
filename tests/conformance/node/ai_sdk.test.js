// its providers for OpenAI's chat and responses, for compatible servers, and for Anthropic

import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool,
} from "ai";
import { z } from "zod";
import {
  ANNA, BASE_URL, EXTRACT, KEY, MODEL, Person, SUM, tellsTheResult, WEATHER, WEATHER_RESULT,
} from "./exercises.js";

const openai = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "mlx-parallm",
  baseURL: BASE_URL,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: BASE_URL, apiKey: KEY });

const MODELS = {
  "OpenAI chat": openai.chat(MODEL),
  "OpenAI responses": openai.responses(MODEL),
  compatible: compatible(MODEL),
  "Anthropic messages": anthropic(MODEL),
};

function weatherTool(cities) {
  return tool({
    description: "Get the current weather in a city",
    inputSchema: z.object({ city: z.string().describe("The city.") }),
    execute: async ({ city }) => {
      cities.push(city);
      return WEATHER_RESULT;
    },
  });
}

for (const [name, model] of Object.entries(MODELS)) {
  const options = { model, temperature: 0, maxOutputTokens: 300 };

  test(`text, whole and streamed (${name})`, async () => {
    const whole = await generateText({ ...options, prompt: SUM });
    assert.match(whole.text, /42/);
    assert.equal(whole.finishReason, "stop");
    assert.ok(whole.usage.outputTokens > 0);
    const stream = streamText({ ...options, prompt: SUM });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  for (const way of ["whole", "stream"]) {
    test(`tool round trip (${name}, ${way})`, async () => {
      const cities = [];
      const run = {
        ...options,
        prompt: WEATHER,
        tools: { get_weather: weatherTool(cities) },
        stopWhen: stepCountIs(3),
      };
      const answer = way === "stream" ? streamText(run) : await generateText(run);
      const text = await answer.text;
      assert.deepEqual(cities, ["Paris"]);
      assert.equal((await answer.steps).length, 2);
      assert.ok(tellsTheResult(text), text);
    });
  }

  test(`generateObject (${name})`, async () => {
    const { object } = await generateObject({ ...options, schema: Person, prompt: EXTRACT });
    assert.deepEqual(object, ANNA);
  });

  test(`streamObject (${name})`, async () => {
    const stream = streamObject({ ...options, schema: Person, prompt: EXTRACT });
    const parts = [];
    for await (const part of stream.partialObjectStream) parts.push(part);
    assert.deepEqual(await stream.object, ANNA);
    assert.deepEqual(parts.at(-1), ANNA);
  });

  test(`a call is forced (${name})`, async () => {
    const { toolCalls } = await generateText({
      ...options,
      prompt: WEATHER,
      tools: { get_weather: tool({ inputSchema: z.object({ city: z.string() }) }) },
      toolChoice: "required",
    });
    assert.equal(toolCalls[0].toolName, "get_weather");
    assert.deepEqual(toolCalls[0].input, { city: "Paris" });
  });
}

test("reasoning is apart from the text", async () => {
  const { reasoningText, text } = await generateText({
    model: compatible(MODEL), temperature: 0, prompt: SUM,
  });
  assert.ok(reasoningText.length > 0);
  assert.doesNotMatch(text, /think>/);
});

test("errors", async () => {
  await assert.rejects(
    generateText({ model: compatible("no-such-model"), prompt: SUM, maxRetries: 0 }),
    (error) => APICallError.isInstance(error) && error.statusCode === 404 && !error.isRetryable,
  );
  const stranger = createOpenAI({ baseURL: BASE_URL, apiKey: "wrong" });
  await assert.rejects(
    generateText({ model: stranger.chat(MODEL), prompt: SUM, maxRetries: 0 }),
    (error) => APICallError.isInstance(error) && error.statusCode === 401,
  );
});
