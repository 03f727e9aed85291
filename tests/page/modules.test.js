// The page's modules that need no page.

import assert from "node:assert/strict";
import { test } from "node:test";

const at = (name) => new URL(`../../mlx_parallm/api/page/assets/${name}`, import.meta.url);
const { readEvents } = await import(at("sse.js"));
const { parseMetrics, quantile, rate, ratio, Reading } = await import(at("metrics.js"));
const { engineLoads } = await import(at("models.js"));
const { tiersOf, waitsText } = await import(at("tiers.js"));
const { Answer, Conversation } = await import(at("conversation.js"));
const { blocksOf } = await import(at("markdown.js"));
const { niceMax, runsOf } = await import(at("chart.js"));
const { isSpecial, levelOf, tokenText } = await import(at("logprobs.js"));
const { amount, clock, percent, seconds, statsLine } = await import(at("format.js"));
const { actionsOf, generates, hears, leavesText, sees, stateOf, translates } = await import(at("models.js"));
const { hitsOf, lossOf, pointOf, stepRate, stepsText, withCount } = await import(at("sessions.js"));
const { versionsText } = await import(at("peers.js"));
const { Api } = await import(at("api.js"));
const { keepChat, keptChat } = await import(at("kept.js"));
const { deleteChat, listChats, putChat, renameChat } = await import(at("chats.js"));
const { pretty } = await import(at("tools.js"));
const { contentOf, isImage, partsOf } = await import(at("images.js"));
const { Clip, isAudio } = await import(at("clips.js"));
const { levelOf: loudnessOf, microphoneProblem } = await import(at("recorder.js"));
const { monoOf, pcmOf, wavOf } = await import(at("wav.js"));

async function events(...pieces) {
  const stream = new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(piece);
      controller.close();
    },
  });
  const found = [];
  for await (const data of readEvents(stream)) found.push(data);
  return found;
}

test("events are the same wherever the bytes are cut", async () => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const lines = ['data: {"a": "ü€😀"}', "", ": keep-alive", "", "event: x", "data:one", "data: two", "", "data", ""];
    const bytes = new TextEncoder().encode(lines.map((line) => line + end).join(""));
    const whole = ['{"a": "ü€😀"}', "one\ntwo", ""];
    assert.deepEqual(await events(bytes), whole);
    for (let cut = 1; cut < bytes.length; cut++) {
      assert.deepEqual(await events(bytes.slice(0, cut), bytes.slice(cut)), whole, `${cut}`);
    }
    assert.deepEqual(await events(...[...bytes].map((byte) => Uint8Array.of(byte))), whole);
  }
});

test("an event that is cut off is not told", async () => {
  assert.deepEqual(await events(new TextEncoder().encode("data: a\n\ndata: b\n")), ["a"]);
});

test("whoever stops reading cancels the stream", async () => {
  let isCancelled = false;
  const stream = new ReadableStream({
    pull: (controller) => controller.enqueue(new TextEncoder().encode("data: a\n\n")),
    cancel: () => (isCancelled = true),
  });
  for await (const _ of readEvents(stream)) break;
  assert.ok(isCancelled);
});

const TEXT = (a, b, count) => `# HELP x A counter.
# TYPE x counter
x_total{model_name="a",path="c:\\\\d \\"e\\" }\\n"} ${a}
x_total{model_name="b"} ${b}
whole_total 8
h_bucket{le="0.1",model_name="a"} ${count}
h_bucket{le="0.2",model_name="a"} ${2 * count}
h_bucket{le="0.4",model_name="a"} ${2 * count}
h_bucket{le="+Inf",model_name="a"} ${4 * count}
`;
const reading = (timeS, ...values) => new Reading(parseMetrics(TEXT(...values)), timeS);

test("metrics are read with their labels", () => {
  const [first, second] = parseMetrics(TEXT(1.5e3, 2, 0)).get("x_total");
  assert.deepEqual(first, { labels: { model_name: "a", path: 'c:\\d "e" }\n' }, value: 1500 });
  assert.deepEqual(second, { labels: { model_name: "b" }, value: 2 });
  assert.equal(reading(0, 1, 2, 0).sum("x_total"), 3);
  assert.equal(reading(0, 1, 2, 0).of("b").sum("x_total"), 2);
  assert.equal(reading(0, 1, 2, 0).sum("none"), 0);
});

test("rates are differences over time", () => {
  const [before, now] = [reading(10, 1, 2, 0), reading(12, 5, 8, 0)];
  assert.equal(rate(before, now, "x_total"), 5);
  assert.equal(rate(before.of("a"), now.of("a"), "x_total"), 2);
  assert.equal(rate(now, before, "x_total"), null, "a restart");
  assert.equal(rate(now, now, "x_total"), null, "no time");
  assert.equal(ratio(before, now, "x_total", "whole_total"), null);
});

test("quantiles are of what the buckets grew by", () => {
  const [before, now] = [reading(0, 0, 0, 3), reading(1, 0, 0, 13)];
  const close = (q, value) => assert.ok(Math.abs(quantile(before, now, "h", q) - value) < 1e-9);
  close(0.125, 0.05);
  close(0.25, 0.1);
  close(0.5, 0.2);
  assert.equal(quantile(before, now, "h", 0.95), 0.4, "the last finite bound");
  assert.equal(quantile(now, now, "h", 0.5), null);
  assert.equal(quantile(now, before, "h", 0.5), null);
  assert.equal(quantile(before, now, "none", 0.5), null);
});

const chunk = (delta, more = {}) => ({ choices: [{ index: 0, delta, ...more }] });
const call = (index, fields) => ({ tool_calls: [{ index, ...fields }] });

test("an answer is put together from its chunks", () => {
  const answer = new Answer(1000);
  const chunks = [
    [chunk({ role: "assistant", content: "" }), 1100],
    [chunk({ reasoning: "think", reasoning_content: "think" }), 1200],
    [chunk({ content: "Hi" }, { logprobs: { content: [{ token: "Hi", logprob: -1 }] } }), 1300],
    [chunk(call(0, { id: "c0", type: "function", function: { name: "add", arguments: "" } })), 1400],
    [chunk(call(0, { function: { arguments: '{"a":' } })), 1500],
    [chunk(call(1, { id: "c1", function: { name: "sub", arguments: "{}" } })), 1600],
    [chunk(call(0, { function: { arguments: "1}" } })), 1700],
    [chunk({}, { finish_reason: "tool_calls" }), 1800],
    [{ choices: [], usage: { prompt_tokens: 5, completion_tokens: 6 } }, 1900],
  ];
  for (const [one, nowMs] of chunks) answer.add(one, nowMs);
  answer.endedMs = 2000;
  assert.equal(answer.finishReason, "tool_calls");
  assert.equal(answer.tokens.length, 1);
  const named = (id, name, text) => ({ id, type: "function", function: { name, arguments: text } });
  assert.deepEqual(answer.message(), {
    role: "assistant",
    content: "Hi",
    reasoning_content: "think",
    tool_calls: [named("c0", "add", '{"a":1}'), named("c1", "sub", "{}")],
  });
  const stats = answer.stats();
  assert.deepEqual([stats.firstS, stats.totalS, stats.tokensPerS], [0.2, 1, 6]);
});

test("a conversation leaves out answers that said nothing", () => {
  const chat = new Conversation();
  const [failed, good] = [new Answer(0), new Answer(0)];
  good.add(chunk({ content: "yes" }), 1);
  for (const turn of [{ role: "user", content: "q" }, failed, good]) chat.add(turn);
  assert.deepEqual(chat.messages("be kind").map((one) => one.role), ["system", "user", "assistant"]);
  chat.cutFrom(failed);
  assert.deepEqual(chat.messages(""), [{ role: "user", content: "q" }]);
});

test("a text is split into prose and code, at every length of it", () => {
  const text = "one\n\n```js\nlet a = `b`;\n\n```\ntwo `x`\n~~~\nopen";
  const kinds = blocksOf(text).map(({ kind, language, text: inner }) => [kind, language, inner]);
  assert.deepEqual(kinds, [
    ["text", "", "one\n"],
    ["code", "js", "let a = `b`;\n"],
    ["text", "", "two `x`"],
    ["code", "", "open"],
  ]);
  for (let length = 0; length <= text.length; length++) blocksOf(text.slice(0, length));
  assert.deepEqual(blocksOf("a ``` b"), [{ kind: "text", language: "", text: "a ``` b" }]);
});

test("charts have round tops and gaps where nothing is known", () => {
  const tops = [0, 0.03, 1, 1.01, 3, 7, 10, 4200].map(niceMax);
  assert.deepEqual(tops, [1, 0.03, 1, 1.5, 3, 8, 10, 6000]);
  const points = [1, null, 3, 4].map((value, i) => ({ timeS: i, values: [value] }));
  assert.deepEqual(runsOf(points, 0, 0, 3, 4), [
    [["0.0", "75.0"]],
    [["200.0", "25.0"], ["300.0", "0.0"]],
  ]);
});

test("tokens are text, or bytes where they are half a character", () => {
  assert.equal(tokenText({ token: "é", bytes: [0xc3, 0xa9] }), "é");
  assert.equal(tokenText({ token: "�", bytes: [0xc3] }), "\\xc3");
  assert.equal(tokenText({ token: "<|end|>", bytes: [] }), "<|end|>");
  assert.equal(tokenText({ token: "a", bytes: null }), "a");
  assert.deepEqual([0, 0.05, 0.2, 0.5, 0.8, 0.95, 1].map(levelOf), [0, 1, 2, 3, 4, 5, 5]);
});

test("tokens are special if the server says so", () => {
  const entry = { token: "<|im_end|>", bytes: [60] };
  assert.deepEqual([{ ...entry, special: true }, entry].map(isSpecial), [true, false]);
});

test("only models that generate can chat", () => {
  const tasks = [["generate"], ["embed", "token_embed"], null, undefined, []];
  assert.deepEqual(tasks.map((each) => generates({ id: "m", tasks: each })), [true, false, false, false, false]);
});

test("a chat is kept as it was, and an answer that streams is stopped", () => {
  const chat = new Conversation();
  const [done, running] = [new Answer(100), new Answer(300)];
  done.add(chunk({ content: "yes" }, { finish_reason: "stop" }), 150);
  done.add(chunk(call(0, { id: "c0", function: { name: "add", arguments: "{}" } })), 160);
  done.endedMs = 200;
  running.add(chunk({ content: "half" }), 350);
  for (const turn of [{ role: "user", content: "q" }, done, running]) chat.add(turn);
  const [user, first, last] = JSON.parse(JSON.stringify(chat.kept(400)));
  assert.deepEqual(user, { role: "user", content: "q" });
  assert.deepEqual(Answer.from(first), done);
  assert.deepEqual(Answer.from(first).message(), done.message());
  assert.deepEqual([last.content, last.endedMs, last.isStopped], ["half", 400, true]);
  assert.equal(running.endedMs, null);
});

test("a chat too large to be kept loses its tokens first", () => {
  const values = new Map();
  const storage = (room) => ({
    getItem: (name) => values.get(name) ?? null,
    removeItem: (name) => values.delete(name),
    setItem(name, value) {
      if (value.length > room) throw new Error("quota");
      values.set(name, value);
    },
  });
  const turns = [{ role: "user", content: "q" }, { content: "a", tokens: Array(100).fill({ token: "a" }) }];
  const chat = { text: "", panes: [{ settings: {}, turns }] };
  const keep = (room, what) => {
    globalThis.sessionStorage = storage(room);
    keepChat(what);
    return keptChat();
  };
  try {
    assert.deepEqual(keep(10_000, chat), chat);
    assert.deepEqual(keep(500, chat).panes[0].turns[1], { content: "a", tokens: [] });
    assert.equal(keep(10, chat), null);
    assert.deepEqual(keep(10_000, chat), chat);
    assert.equal(keep(10_000, null), null);
  } finally {
    delete globalThis.sessionStorage;
  }
  keepChat(chat);
  assert.equal(keptChat(), null, "no storage");
});

const chatOf = (...contents) => ({
  panes: [{ settings: {}, turns: contents.map((content) => ({ role: "user", content })) }],
});

/** Run with a local storage of some characters. */
function withStorage(room, run) {
  const values = new Map();
  globalThis.localStorage = {
    getItem: (name) => values.get(name) ?? null,
    removeItem: (name) => values.delete(name),
    setItem(name, value) {
      if (value.length > room) throw new Error("quota");
      values.set(name, value);
    },
  };
  try {
    run(values);
  } finally {
    delete globalThis.localStorage;
  }
}

test("chats are listed, the latest first, renamed and deleted", () => {
  withStorage(100_000, (values) => {
    putChat("a", chatOf("  What  is\n2? "), 1);
    putChat("b", chatOf([{ type: "image_url", image_url: { url: "data:," } }]), 2);
    assert.deepEqual(listChats().map(({ id, name }) => [id, name]), [["b", "Images"], ["a", "What is 2?"]]);
    renameChat("a", "  sums ");
    renameChat("b", "   ");
    const turns = [{ role: "user", content: "x" }, { content: "y", tokens: [1] }];
    putChat("a", { panes: [{ settings: {}, turns }] }, 3);
    const [first] = listChats();
    assert.deepEqual([first.id, first.name, first.savedMs], ["a", "sums", 3]);
    assert.deepEqual(first.chat.panes[0].turns[1].tokens, []);
    deleteChat("a");
    deleteChat("none");
    assert.deepEqual(listChats().map(({ name }) => name), ["Images"]);
    deleteChat("b");
    assert.equal(values.size, 0);
  });
});

test("the oldest chats go where there is no room", () => {
  withStorage(2000, () => {
    for (let i = 0; i < 300; i++) putChat(String(i), chatOf("x".repeat(100)), i);
    const ids = listChats().map(({ id }) => id);
    assert.ok(ids.length > 3 && ids.length < 20, `${ids.length}`);
    assert.equal(ids[0], "299");
    putChat("huge", chatOf("x".repeat(5000)), 1);
    assert.deepEqual(listChats(), [], "one that alone has no room");
  });
  withStorage(Infinity, () => {
    for (let i = 0; i < 102; i++) putChat(String(i), chatOf("x"), i);
    assert.equal(listChats().length, 100);
    putChat("large", chatOf("x".repeat(3_990_000)), 1);
    assert.equal(listChats()[0].id, "large");
    assert.ok(JSON.stringify(listChats()).length <= 4_000_000);
  });
});

test("without storage there are no chats", () => {
  putChat("a", chatOf("x"), 1);
  assert.deepEqual(listChats(), []);
  withStorage(100, (values) => {
    values.set("mlx-parallm-chats", "not JSON");
    assert.deepEqual(listChats(), []);
  });
});

test("a model's state, time and buttons follow from where it is", () => {
  const loading = { id: "m", status: "loading", progress: 0.425, pinned: true };
  assert.deepEqual([stateOf(loading), actionsOf(loading)], ["loading 42 %, pinned", []]);
  const away = { id: "m", status: "available", pinned: false, ttl: 60 };
  assert.deepEqual([stateOf(away), leavesText(away), actionsOf(away)], ["available", "–", ["Load", "Pin"]]);
  const here = { id: "m", status: "loaded", pinned: false };
  assert.deepEqual([stateOf(here), leavesText(here), actionsOf(here)], ["loaded", "–", ["Unload", "Pin"]]);
  assert.equal(leavesText({ ...here, ttl: 300, expires_in_s: 61.2 }), "in 62 s");
  assert.equal(leavesText({ ...here, ttl: 600, expires_in_s: 400 }), "in 7 min");
  assert.equal(leavesText({ ...here, ttl: 600, expires_in_s: null }), "10 min after its last request");
  assert.equal(leavesText({ ...here, ttl: 600, pinned: true }), "–");
  assert.deepEqual(actionsOf({ ...here, pinned: true }), ["Unload"]);
  assert.deepEqual(actionsOf({ ...here, parent: "base" }), []);
});

test("numbers are written short", () => {
  const write = (format, values) => values.map(format);
  assert.deepEqual(write(seconds, [null, 0.0012, 0.04, 0.9994, 1.234, 75]), ["–", "1.2 ms", "40 ms", "999 ms", "1.23 s", "75 s"]);
  assert.deepEqual(write(amount, [null, 0, 3.14, 99.4, 314.1, 12_345, 123_456, 1.2e6, 2e7]), ["–", "0", "3.1", "99.4", "314", "12.3k", "123k", "1.2M", "20M"]);
  assert.deepEqual(write(percent, [null, 0, 0.0001, 0.034, 0.5, 1]), ["–", "0 %", "<0.1 %", "3.4 %", "50 %", "100 %"]);
  assert.equal(pretty('{"a":1}'), '{\n  "a": 1\n}');
  assert.equal(pretty('{"a":'), '{"a":');
});

test("several engines have a row each, and one engine has none", () => {
  const text = [
    'vllm:num_requests_running{engine="0",model_name="m"} 3',
    'vllm:num_requests_running{engine="1",model_name="m"} 2',
    'vllm:num_requests_waiting{engine="1",model_name="m"} 7',
    'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5',
  ].join("\n");
  assert.deepEqual(engineLoads(new Reading(parseMetrics(text), 1)), [["0", 3, 0, 0.5], ["1", 2, 7, 0]]);
  const alone = 'vllm:num_requests_running{model_name="m"} 3';
  assert.deepEqual(engineLoads(new Reading(parseMetrics(alone), 1)), []);
});

test("versions of a server are named, and a server that is not reachable has none", () => {
  assert.equal(versionsText({ a: "3", b: "default" }), "a: 3, b: default");
  assert.equal(versionsText({}), "–");
  assert.equal(versionsText(), "–");
});

const tierSample = (name, engine, tier, value) =>
  `mlx_parallm:kv_tier_${name}{engine="${engine}",model_name="m",tier="${tier}"} ${value}`;
const tierText = (read) =>
  [
    'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 400',
    'mlx_parallm:kv_reads_total{engine="0",model_name="m"} 4',
    'mlx_parallm:kv_read_wait_seconds_total{engine="0",model_name="m"} 0.2',
    ...["0", "1"].flatMap((engine) => [
      tierSample("hit_tokens_total", engine, "disk", 50),
      tierSample("used_bytes", engine, "disk", 1000),
      tierSample("limit_bytes", engine, "disk", 5000),
      tierSample("used_bytes", engine, "host", 10),
      tierSample("limit_bytes", engine, "host", 20),
      tierSample("read_bytes_total", engine, "disk", read),
      tierSample("off", engine, "disk", engine),
      `mlx_parallm:kv_tier_discarded_blocks_total{engine="${engine}",model_name="m",tier="disk",reason="slow"} 3`,
    ]),
  ].join("\n");

test("engines share a disk, and each has host memory of its own", () => {
  const [before, now] = [0, 100].map((read, index) => new Reading(parseMetrics(tierText(read)), 2 * index));
  const [disk, host] = tiersOf(now, before);
  assert.deepEqual([disk.name, disk.used, disk.limit, disk.isOff], ["disk", 1000, 5000, true]);
  assert.deepEqual([host.name, host.used, host.limit, host.isOff], ["host", 20, 40, false]);
  assert.deepEqual([disk.hits, disk.share, host.hits, host.share], [100, 0.25, 0, 0]);
  assert.deepEqual([disk.read, disk.readRate, disk.discarded], [200, 100, 6]);
  assert.equal(waitsText(now), "4 prompts waited for KV, 50 ms on average.");
});

test("without such places nothing is shown of them", () => {
  const none = new Reading(parseMetrics("vllm:num_requests_running 1"), 1);
  assert.deepEqual(tiersOf(none, none), []);
  assert.equal(waitsText(none), "No prompt has waited for KV.");
});

test("a session's loss, hits and steps are of what is known", () => {
  assert.equal(lossOf(null), null);
  assert.equal(lossOf({ loss_plus: 0.5, loss_minus: 0.25 }), 0.375);
  assert.equal(lossOf({ loss: -0.5, norm: 1 }), -0.5);
  const points = [pointOf({ step: 3, loss: 2, validation_loss: null })];
  points.push(pointOf({ step: 4, loss: 2, validation_loss: 3 }, points.at(-1)));
  points.push(pointOf({ step: 5, loss: 1, validation_loss: null }, points.at(-1)));
  assert.deepEqual(points.map(({ values }) => values), [[2, null], [2, 3], [1, 3]]);
  assert.deepEqual(points.map(({ timeS }) => timeS), [3, 4, 5]);
  assert.equal(hitsOf({ totals: { hits: 0, lookups: 0 } }), null);
  assert.equal(hitsOf({ totals: { hits: 3, lookups: 4 } }), 0.75);
  assert.equal(stepsText({ step: 12, until: 40 }), "12 of 40");
  assert.equal(stepsText({ step: 40, until: 40 }), "40");
});

test("steps per second are of the last seconds in which a session ran", () => {
  let counts = withCount([], { timeS: 1, step: 10 }, true);
  assert.equal(stepRate(counts), null);
  counts = withCount(counts, { timeS: 3, step: 50 }, true);
  assert.equal(stepRate(counts), 20);
  counts = withCount(counts, { timeS: 12, step: 68 }, true);
  assert.equal(stepRate(counts), 2, "the count of 11 seconds ago has gone");
  counts = withCount(counts, { timeS: 14, step: 68 }, false);
  assert.equal(stepRate(counts), null);
});

test("the steps of a stream that goes on are read up to the last one that was made", async () => {
  const asked = [];
  let isCancelled = false;
  let step = 4;
  const browserFetch = globalThis.fetch;
  globalThis.fetch = async (url) => {
    asked.push(String(url));
    const body = new ReadableStream({
      pull: (controller) => controller.enqueue(new TextEncoder().encode(`data: {"step": ${++step}}\n\n`)),
      cancel: () => (isCancelled = true),
    });
    return new Response(body);
  };
  try {
    const read = [];
    for await (const one of new Api("http://here/x/").steps("a/b", 4, 7)) read.push(one.step);
    assert.deepEqual(read, [5, 6, 7]);
  } finally {
    globalThis.fetch = browserFetch;
  }
  assert.deepEqual(asked, ["http://here/x/v1/mezo/sessions/a%2Fb/events?after=4"]);
  assert.ok(isCancelled);
});

test("a message with images has parts, and one without is its text", () => {
  assert.equal(contentOf("Hi", []), "Hi");
  const content = contentOf("What is it?", ["data:a", "data:b"]);
  assert.deepEqual(content, [
    { type: "image_url", image_url: { url: "data:a" } },
    { type: "image_url", image_url: { url: "data:b" } },
    { type: "text", text: "What is it?" },
  ]);
  assert.deepEqual(partsOf(content), { text: "What is it?", urls: ["data:a", "data:b"] });
  assert.deepEqual(partsOf(contentOf("", ["data:a"])), { text: "", urls: ["data:a"] });
  assert.deepEqual(partsOf("Hi"), { text: "Hi", urls: [] });
});

test("a model says whether it takes images", () => {
  assert.ok(sees({ input_modalities: ["text", "image"] }));
  for (const model of [{ input_modalities: ["text"] }, { input_modalities: null }]) assert.ok(!sees(model));
});

test("a model says whether it reads sources", () => {
  assert.ok(translates({ tasks: ["generate", "text2text-generation"] }));
  for (const model of [{ tasks: ["generate"] }, { tasks: null }]) assert.ok(!translates(model));
});

test("the last message of the user is the source", () => {
  const conversation = new Conversation();
  assert.deepEqual(conversation.source, { text: "", clip: null });
  conversation.add({ role: "user", content: "one" });
  conversation.add(new Answer(0));
  conversation.add({ role: "user", content: contentOf("two", ["data:a"]) });
  conversation.add(new Answer(0));
  assert.deepEqual(conversation.source, { text: "two", clip: null });
});

test("a completion of a source streams as a chat does", async () => {
  const browserFetch = globalThis.fetch;
  const asked = [];
  globalThis.fetch = async (url, { body }) => {
    asked.push([String(url), JSON.parse(body)]);
    const chunks = [
      { choices: [{ text: "Ja", finish_reason: null }], usage: null },
      { choices: [{ text: "!", finish_reason: "stop" }], usage: null },
      { choices: [], usage: { prompt_tokens: 3, completion_tokens: 2 } },
    ];
    return new Response([...chunks.map((chunk) => JSON.stringify(chunk)), "[DONE]"].map((data) => `data: ${data}\n\n`).join(""));
  };
  const answer = new Answer(0);
  try {
    const body = { model: "t5", prompt: "Yes!", tgt_lang: "de" };
    for await (const chunk of new Api("http://here/x/").complete(body)) answer.add(chunk, 1);
  } finally {
    globalThis.fetch = browserFetch;
  }
  assert.deepEqual([answer.content, answer.finishReason, answer.usage.prompt_tokens], ["Ja!", "stop", 3]);
  const stream = { stream: true, stream_options: { include_usage: true } };
  assert.deepEqual(asked, [["http://here/x/v1/completions", { model: "t5", prompt: "Yes!", tgt_lang: "de", ...stream }]]);
});

test("only files that the server reads are images", () => {
  assert.ok(isImage({ type: "image/png" }));
  for (const type of ["image/svg+xml", "text/html", ""]) assert.ok(!isImage({ type }));
});

test("a model says whether it hears", () => {
  assert.ok(hears({ tasks: ["transcription"] }));
  for (const model of [{ tasks: ["generate"] }, { tasks: null }]) assert.ok(!hears(model));
});

test("samples are written as a WAV file of one channel of 16 bits", () => {
  const parts = [pcmOf(Float32Array.of(0, 1, -1)), pcmOf(Float32Array.of(2, -2, 0.5, -0.25))];
  const bytes = new DataView(wavOf(parts, 16_000));
  const text = (start, end) => String.fromCharCode(...new Uint8Array(bytes.buffer.slice(start, end)));
  assert.deepEqual([text(0, 4), text(8, 16), text(36, 40)], ["RIFF", "WAVEfmt ", "data"]);
  assert.deepEqual([4, 16, 24, 28, 40].map((at) => bytes.getUint32(at, true)), [50, 16, 16_000, 32_000, 14]);
  assert.deepEqual([20, 22, 32, 34].map((at) => bytes.getUint16(at, true)), [1, 1, 2, 16]);
  const samples = [...new Int16Array(bytes.buffer.slice(44))];
  assert.deepEqual(samples, [0, 32767, -32767, 32767, -32767, 16384, -8192]);
  assert.equal(wavOf([], 8000).byteLength, 44);
});

test("channels become one, and its level is that of its peak", () => {
  const [left, right] = [Float32Array.of(1, 0.5), Float32Array.of(0, -0.5)];
  assert.deepEqual([...monoOf([left, right])], [0.5, 0]);
  assert.equal(monoOf([left]), left);
  assert.equal(loudnessOf(Float32Array.of(0, -1)), 1);
  assert.ok(Math.abs(loudnessOf(Float32Array.of(0.1, -0.0001)) - 2 / 3) < 1e-6);
  assert.deepEqual([Float32Array.of(0), Float32Array.of(1e-4), []].map(loudnessOf), [0, 0, 0]);
});

test("why there is no microphone is told", () => {
  const problem = (name) => microphoneProblem(new DOMException("no reason", name));
  assert.match(problem("NotAllowedError"), /denied/);
  assert.match(problem("NotFoundError"), /There is no microphone/);
  assert.match(problem("NotReadableError"), /another program/);
  assert.match(problem("AbortError"), /no reason/);
});

test("only files that may have sound are recordings", () => {
  for (const type of ["audio/wav", "audio/webm", "video/mp4"]) assert.ok(isAudio({ type }));
  for (const type of ["image/png", "video/x-msvideo", ""]) assert.ok(!isAudio({ type }));
});

test("of a recording its name and length are kept, and a chat is called after it", () => {
  const clip = new Clip({ name: "a.wav", file: new Blob(["x".repeat(1000)]), seconds: 2.5 });
  const message = { role: "user", content: "", clip };
  withStorage(300, () => {
    putChat("a", { panes: [{ settings: {}, turns: [message] }] }, 1);
    const [kept] = listChats();
    assert.equal(kept.name, "a.wav");
    assert.deepEqual(kept.chat.panes[0].turns, [{ role: "user", content: "", clip: { name: "a.wav", seconds: 2.5 } }]);
  });
});

test("a chat reads what was heard, and of the recording its name", () => {
  const conversation = new Conversation();
  const clip = new Clip({ name: "a.wav", file: null });
  const answer = new Answer(0);
  answer.content = "Hello there.";
  for (const turn of [{ role: "user", content: "Oslo", clip }, answer, { role: "user", content: "Shorter?" }]) {
    conversation.add(turn);
  }
  const contents = conversation.messages("").map(({ role, content }) => [role, content]);
  assert.deepEqual(contents, [["user", "[a.wav] Oslo"], ["assistant", "Hello there."], ["user", "Shorter?"]]);
  assert.ok(conversation.messages("").every((message) => !("clip" in message)));
});

/** An answer of a server to a recording, and what it was sent: `[url, fields]`. */
async function heard(body, fields, type) {
  const browserFetch = globalThis.fetch;
  const sent = [];
  globalThis.fetch = async (url, options) => {
    sent.push(String(url), Object.fromEntries(options.body), options.headers);
    return new Response(body, { headers: { "content-type": type } });
  };
  const answer = new Answer(0);
  try {
    const chunks = new Api("http://here/x/").transcribe(fields, new File(["abc"], "a.wav"));
    for await (const chunk of chunks) answer.add(chunk, 1);
  } finally {
    globalThis.fetch = browserFetch;
  }
  return { answer, sent };
}

const streamOf = (...events) => events.map((event) => `data: ${JSON.stringify(event)}\n\n`).join("");
const EVENTS = "text/event-stream; charset=utf-8";

test("what is said streams as a chat does", async () => {
  const body = streamOf(
    { type: "transcript.text.delta", delta: "Hello", logprobs: [{ token: "Hello", logprob: -1, bytes: [72] }] },
    { type: "transcript.text.delta", delta: " there.", logprobs: [{ token: " there.", logprob: -2 }] },
    {
      type: "transcript.text.done",
      text: "Hello there.",
      logprobs: [{}, {}],
      usage: { type: "tokens", input_tokens: 1500, output_tokens: 3, total_tokens: 1503 },
    },
  );
  const { answer, sent } = await heard(body, { model: "ear", translate: false, stream: true }, EVENTS);
  assert.deepEqual([answer.content, answer.finishReason, answer.firstMs], ["Hello there.", "stop", 1]);
  assert.deepEqual(answer.usage, { prompt_tokens: 1500, completion_tokens: 3 });
  assert.deepEqual(answer.tokens.map(({ token }) => token), ["Hello", " there."]);
  const [url, { file, ...fields }, headers] = sent;
  assert.equal(url, "http://here/x/v1/audio/transcriptions");
  assert.deepEqual([fields, file.name, await file.text()], [{ model: "ear", stream: "true" }, "a.wav", "abc"]);
  // The browser writes the type, which has the form's boundary.
  assert.deepEqual(headers, {});
});

test("segments with times are lines, and silence is told", async () => {
  const segments = [{ start: 0, end: 4.96, text: " Hello" }, { start: 65, end: 3670, text: " there." }];
  const timed = { text: "Hello there.", segments, usage: { type: "duration", seconds: 12 } };
  const { answer, sent } = await heard(JSON.stringify(timed), { model: "ear", translate: true }, "application/json");
  assert.equal(answer.content, "0:00.0 – 0:05.0  Hello\n1:05.0 – 1:01:10.0  there.");
  assert.equal(sent[0], "http://here/x/v1/audio/translations");
  const silence = await heard(streamOf({ type: "transcript.text.done", text: " " }), {}, EVENTS);
  assert.deepEqual([silence.answer.content, silence.answer.finishReason], ["", "silence"]);
});

test("a stream of a recording that breaks off, or has an error, fails", async () => {
  const delta = { type: "transcript.text.delta", delta: "a" };
  await assert.rejects(heard(streamOf(delta), {}, EVENTS), /ended too early/);
  await assert.rejects(heard(streamOf(delta, { error: { message: "no slot" } }), {}, EVENTS), /no slot/);
});

test("how fast a recording was heard is part of its numbers", () => {
  const answer = new Answer(0);
  Object.assign(answer, { heardS: 30, endedMs: 1500 });
  assert.equal(statsLine(answer.stats()), "1.50 s total · 30.00 s heard, 20 × real time");
  assert.deepEqual([0, 59.9, 61, 3723.4].map(clock), ["0:00", "0:59", "1:01", "1:02:03"]);
});
