// chat completions and responses: streams and their helpers, `.parse`, `runTools`, errors

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import {
  ANNA, BASE_URL, EXTRACT, KEY, MODEL, Person, SUM, tellsTheResult, user,
  WEATHER, WEATHER_FUNCTION, WEATHER_RESULT,
} from "./exercises.js";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY });
const options = { model: MODEL, temperature: 0 };
const tools = [{ type: "function", function: WEATHER_FUNCTION }];
const responseTools = [{ type: "function", strict: true, ...WEATHER_FUNCTION }];
const WAYS = ["whole", "stream"];

async function textOf(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  return text;
}

/** The whole message, streamed or not. */
async function message(way, body) {
  if (way === "stream") {
    return client.chat.completions.stream({ ...options, ...body }).finalMessage();
  }
  return (await client.chat.completions.create({ ...options, ...body })).choices[0].message;
}

async function response(way, body) {
  if (way === "stream") return client.responses.stream({ ...options, ...body }).finalResponse();
  return client.responses.create({ ...options, ...body });
}

test("chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create({ ...options, messages: [user(SUM)] });
  const { content } = whole.choices[0].message;
  assert.match(content, /42/);
  assert.equal(whole.choices[0].finish_reason, "stop");
  const body = { ...options, messages: [user(SUM)], stream: true };
  assert.equal(await textOf(await client.chat.completions.create(body)), content);
});

test("usage at the end of a stream", async () => {
  const stream = client.chat.completions.stream({
    ...options, messages: [user(SUM)], stream_options: { include_usage: true },
  });
  const { usage } = await stream.finalChatCompletion();
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
});

test("structured output: chat.completions.parse", async () => {
  const answer = await client.chat.completions.parse({
    ...options, messages: [user(EXTRACT)], response_format: zodResponseFormat(Person, "person"),
  });
  assert.deepEqual(answer.choices[0].message.parsed, ANNA);
});

test("structured output: responses.parse", async () => {
  const answer = await client.responses.parse({
    ...options, input: EXTRACT, text: { format: zodTextFormat(Person, "person") },
  });
  assert.deepEqual(answer.output_parsed, ANNA);
});

for (const way of WAYS) {
  test(`tool round trip (chat, ${way})`, async () => {
    const asked = await message(way, { messages: [user(WEATHER)], tools });
    const [call] = asked.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    const content = JSON.stringify(WEATHER_RESULT);
    const result = { role: "tool", tool_call_id: call.id, content };
    const answer = await message(way, { messages: [user(WEATHER), asked, result], tools });
    assert.ok(tellsTheResult(answer.content), answer.content);
  });

  test(`tool round trip (runTools, ${way})`, async () => {
    const cities = [];
    const runner = client.chat.completions.runTools({
      ...options,
      stream: way === "stream",
      messages: [user(WEATHER)],
      tools: [{
        type: "function",
        function: {
          ...WEATHER_FUNCTION,
          parse: JSON.parse,
          function: ({ city }) => {
            cities.push(city);
            return JSON.stringify(WEATHER_RESULT);
          },
        },
      }],
    });
    const answer = await runner.finalContent();
    assert.deepEqual(cities, ["Paris"]);
    assert.ok(tellsTheResult(answer), answer);
  });

  test(`tool round trip (responses, ${way})`, async () => {
    const asked = await response(way, { input: WEATHER, tools: responseTools });
    const call = asked.output.find((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
    const output = JSON.stringify(WEATHER_RESULT);
    const result = { type: "function_call_output", call_id: call.call_id, output };
    const input = [user(WEATHER), ...asked.output, result];
    const answer = await response(way, { input, tools: responseTools });
    assert.ok(tellsTheResult(answer.output_text), answer.output_text);
    const followed = await response(way, {
      input: [result], tools: responseTools, previous_response_id: asked.id,
    });
    assert.equal(followed.output_text, answer.output_text);
  });
}

test("responses, whole and streamed", async () => {
  const whole = await client.responses.create({ ...options, input: SUM });
  assert.match(whole.output_text, /42/);
  const stream = await client.responses.create({ ...options, input: SUM, stream: true });
  const events = [];
  for await (const event of stream) events.push(event);
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, "response.completed");
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
});

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes(MODEL));
});

test("errors have OpenAI's classes", async () => {
  const messages = [user(SUM)];
  await assert.rejects(
    client.chat.completions.create({ model: "no-such-model", messages }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
  await assert.rejects(
    client.chat.completions.create({ ...options, messages, temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
  const stranger = new OpenAI({ baseURL: BASE_URL, apiKey: "wrong" });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  await assert.rejects(
    client.responses.create({ ...options, input: SUM, previous_response_id: "resp_none" }),
    OpenAI.APIError,
  );
});

test("an aborted stream ends the request", async () => {
  const stream = await client.chat.completions.create({
    model: MODEL, messages: [user(SUM)], stream: true, max_tokens: 4000, ignore_eos: true,
  });
  for await (const _ of stream) break;
  const answer = await message("whole", { messages: [user(SUM)] });
  assert.match(answer.content, /42/);
});
