// The server's API: requests with the key, and its errors.

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

  async *#chunks(path, body, signal) {
    const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await this.#post(path, streamed, signal);
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 200, chunk.error.param);
      yield chunk;
    }
    throw new ApiError("The stream ended too early.", 200);
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
