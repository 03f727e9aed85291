// What is said in a chat, as the API takes it, and an answer as it streams in.

import { partsOf } from "./images.js";

/** An assistant's answer, filled by the chunks of a stream. Times are in milliseconds. */
export class Answer {
  constructor(startedMs) {
    this.reasoning = "";
    this.content = "";
    this.toolCalls = [];
    this.tokens = [];
    this.finishReason = null;
    this.usage = null;
    this.error = null;
    this.isStopped = false;
    this.model = "";
    // heardS: seconds of the recording that is answered; null for a chat.
    this.heardS = null;
    this.startedMs = startedMs;
    this.firstMs = null;
    this.endedMs = null;
  }

  /** An answer as it was kept. */
  static from(kept) {
    return Object.assign(new Answer(kept.startedMs), kept);
  }

  /** Take in a chunk that came at a time. */
  add(chunk, nowMs) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    const tokens = choice.logprobs?.content ?? [];
    this.reasoning += reasoning;
    this.content += delta.content ?? "";
    for (const piece of delta.tool_calls ?? []) this.#addCall(piece);
    this.tokens.push(...tokens);
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    if (reasoning || delta.content || delta.tool_calls?.length || tokens.length) {
      this.firstMs ??= nowMs;
    }
  }

  #addCall(piece) {
    const call = (this.toolCalls[piece.index ?? 0] ??= { id: "", name: "", arguments: "" });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name = piece.function.name;
    call.arguments += piece.function?.arguments ?? "";
  }

  /** The message that goes back to the server with the next request. */
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.toolCalls.length > 0) {
      message.tool_calls = this.toolCalls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return message;
  }

  /**
   * Seconds to the first token and in all, tokens, and tokens a second of all the time: what comes
   * after the first token may come at once, if the network or this machine held it back.
   */
  stats() {
    const tokens = this.usage?.completion_tokens ?? null;
    const totalS = this.endedMs === null ? null : (this.endedMs - this.startedMs) / 1000;
    return {
      firstS: this.firstMs === null ? null : (this.firstMs - this.startedMs) / 1000,
      totalS,
      promptTokens: this.usage?.prompt_tokens ?? null,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      tokens,
      heardS: this.heardS,
      tokensPerS: tokens !== null && totalS > 0 ? tokens / totalS : null,
    };
  }
}

/** The messages of a chat, after the system prompt. */
export class Conversation {
  constructor() {
    this.turns = [];
  }

  /** Add a message `{role, content, …}` or an Answer. */
  add(turn) {
    this.turns.push(turn);
  }

  /** Forget a turn and all after it. */
  cutFrom(turn) {
    const place = this.turns.indexOf(turn);
    if (place >= 0) this.turns.length = place;
  }

  /** Whether a turn is still part of it. */
  has(turn) {
    return this.turns.includes(turn);
  }

  /** The turns as they are kept: messages have a role, answers have none. An answer that is
   * streaming ends here. */
  kept(nowMs) {
    return this.turns.map((turn) => {
      const isRunning = turn instanceof Answer && turn.endedMs === null;
      return isRunning ? { ...turn, endedMs: nowMs, isStopped: true } : { ...turn };
    });
  }

  get last() {
    return this.turns.at(-1) ?? null;
  }

  /** The text and the recording of the last message of the user. */
  get source() {
    const said = this.turns.filter((turn) => !(turn instanceof Answer) && turn.role === "user");
    const { content = "", clip = null } = said.at(-1) ?? {};
    return { text: partsOf(content).text, clip };
  }

  /** The messages of a request. Answers that failed before their first word are left out. */
  messages(system) {
    const said = this.turns.filter((turn) => !(turn instanceof Answer) || isAnswered(turn));
    const messages = said.map((turn) => (turn instanceof Answer ? turn.message() : named(turn)));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }
}

/** A message with the name of its recording: chats take no sound, but read what was said in it. */
function named({ clip, ...message }) {
  if (!clip) return message;
  return { ...message, content: `[${clip.name}] ${message.content}`.trim() };
}

function isAnswered(answer) {
  return answer.content !== "" || answer.toolCalls.length > 0;
}
