// The server's API: requests with the key, and its errors.

import { clock } from "./format.js";
import { readEvents } from "./sse.js";

const KEY = "mlx-parallm-api-key";

/** An answer that is an error, or an error event of a stream. */
export class ApiError extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export class Api {
  #key = storedKey();

  /** `base` is the URL the page lies in; every route is relative to it. */
  constructor(base) {
    this.base = base;
    this.onUnauthorized = () => {};
  }

  /** The key, kept for this tab only. */
  get key() {
    return this.#key;
  }

  set key(value) {
    this.#key = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      // Storage is turned off: the key lasts until the page is loaded again.
    }
  }

  async models({ isPolled = false } = {}) {
    return (await (await this.#fetch("v1/models", { isPolled })).json()).data;
  }

  /** Bring a model into memory; it stays there if it is pinned. */
  async load(model, pin) {
    await this.#post("v1/models/load", { model, pin });
  }

  async unload(model) {
    await this.#post("v1/models/unload", { model });
  }

  async version() {
    return (await (await this.#fetch("version")).json()).version;
  }

  /** The metrics in Prometheus' text format; asked for so often that a missing key is not. */
  async metrics(signal) {
    return (await this.#fetch("metrics", { signal, isPolled: true })).text();
  }

  /** The training sessions; polled like the metrics. */
  async sessions(signal) {
    return (await (await this.#fetch("v1/mezo/sessions", { signal, isPolled: true })).json()).data;
  }

  /** The servers that change together with this one; polled likewise. */
  async peers(signal) {
    return (await (await this.#fetch("v1/peers", { signal, isPolled: true })).json()).data;
  }

  /** The steps of a session after `after`, up to `last`, which it has made already. */
  async *steps(sessionId, after, last, signal) {
    const path = `v1/mezo/sessions/${encodeURIComponent(sessionId)}/events?after=${after}`;
    const response = await this.#fetch(path, { signal, isPolled: true });
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const step = JSON.parse(data);
      yield step;
      // The stream of a session that runs would go on; leaving it frees the connection.
      if (step.step >= last) return;
    }
  }

  /** The chunks of a streamed chat completion. */
  chat(body, signal) {
    return this.#chunks("v1/chat/completions", body, signal);
  }

  /** The chunks of a streamed completion of a source, in the form of a chat's. */
  async *complete(body, signal) {
    for await (const { usage, choices } of this.#chunks("v1/completions", body, signal)) {
      const inChat = ({ text, finish_reason }) => ({ delta: { content: text }, finish_reason });
      yield { usage, choices: choices.map(inChat) };
    }
  }

  /**
   * The chunks of what is said in a recording, in the form of a chat's. `translate` asks for
   * English; every other field goes to the server as it is.
   */
  async *transcribe({ translate, ...fields }, file, signal) {
    const body = new FormData();
    for (const [name, value] of Object.entries(fields)) body.append(name, value);
    body.append("file", file);
    const path = `v1/audio/${translate ? "translations" : "transcriptions"}`;
    const response = await this.#fetch(path, { method: "POST", body, signal });
    const isStreamed = response.headers.get("content-type").startsWith("text/event-stream");
    if (!isStreamed) return yield spokenChunk(await response.json());
    for await (const event of eventsOf(response)) {
      yield spokenChunk(event);
      if (event.type === "transcript.text.done") return;
    }
  }

  async *#chunks(path, body, signal) {
    const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
    yield* eventsOf(await this.#post(path, streamed, signal));
  }

  #post(path, body, signal) {
    const headers = { "content-type": "application/json" };
    return this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  async #fetch(path, { isPolled = false, ...options } = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const url = new URL(path, this.base);
    const response = await fetch(url, { ...options, headers, credentials: "same-origin" });
    if (response.ok) return response;
    if (response.status === 401 && !isPolled) this.onUnauthorized();
    throw await errorOf(response);
  }
}

/** The events of a stream, which has to come to its end. */
async function* eventsOf(response) {
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 200, event.error.param);
    yield event;
  }
  throw new ApiError("The stream ended too early.", 200);
}

/** An event of a transcription, or a whole one, as a chunk of a chat. */
function spokenChunk({ type, delta, text, segments, logprobs, usage }) {
  const content = logprobs && { content: logprobs };
  if (type === "transcript.text.delta") return { choices: [{ delta: { content: delta }, logprobs: content }] };
  const finish_reason = text.trim() ? "stop" : "silence";
  // The text of a stream has come in its deltas.
  const said = type ? "" : (segments?.map(timedText).join("\n") ?? text);
  // A server may count seconds alone.
  const isCounted = usage?.input_tokens !== undefined;
  return {
    choices: [{ delta: { content: said }, finish_reason }],
    usage: isCounted ? { prompt_tokens: usage.input_tokens, completion_tokens: usage.output_tokens } : null,
  };
}

function timedText({ start, end, text }) {
  return `${tenth(start)} – ${tenth(end)}  ${text.trim()}`;
}

function tenth(value) {
  const tenths = Math.round(value * 10);
  return `${clock(tenths / 10)}.${tenths % 10}`;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, error.param);
  } catch {
    return new ApiError(`The server answered ${response.status}.`, response.status);
  }
}
