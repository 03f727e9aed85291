// How the turns of a chat look.

import { clipView } from "./clips.js";
import { copyText, el, setText } from "./dom.js";
import { statsLine } from "./format.js";
import { TokensView } from "./logprobs.js";
import { MarkdownView } from "./markdown.js";
import { partsOf, imageView } from "./images.js";
import { ToolCallsView } from "./tools.js";

const ENDS = {
  length: "Cut off: the limit of tokens is reached.",
  content_filter: "Cut off by a filter.",
  abort: "Aborted by the server.",
  silence: "No speech was heard.",
};

/** A message of the user. */
export function userView({ content, clip }) {
  const { text, urls } = partsOf(content);
  const images = urls.length > 0 ? el("div", { class: "images" }, ...urls.map(imageView)) : null;
  const words = text ? el("p", {}, text) : null;
  return el("article", { class: "turn user" }, el("h3", {}, "You"), clip ? clipView(clip) : null, images, words);
}

/** An answer, shown while it streams. */
export class AnswerView {
  /** `actions` are `onToolResults(messages)` and `onAgain()`; `card` shows a token. */
  constructor(answer, card, actions) {
    this.answer = answer;
    this.content = el("div", { class: "content" });
    this.markdown = new MarkdownView(this.content);
    this.thoughts = el("div", { class: "thoughts", tabindex: 0 });
    this.reasoning = el(
      "details",
      { class: "reasoning", open: true, hidden: true },
      el("summary", {}, "Reasoning"),
      this.thoughts,
    );
    this.tokens = new TokensView(card);
    this.tools = new ToolCallsView(actions.onToolResults);
    this.note = el("p", { class: "note", hidden: true });
    this.stats = el("span", { class: "stats" }, "waiting for the first token …");
    this.buttons = el("span", { class: "turn-actions", hidden: true }, ...this.#buttons(actions));
    this.root = el(
      "article",
      { class: "turn answer", "aria-busy": "true" },
      el("h3", {}, answer.model),
      this.reasoning,
      this.content,
      this.tokens.root,
      this.tools.root,
      this.note,
      el("footer", {}, this.stats, this.buttons),
    );
  }

  #buttons({ onAgain }) {
    const copy = el("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", () => copyText(copy, this.answer.content));
    const again = el("button", { type: "button", class: "quiet", onclick: onAgain }, "Again");
    again.title = "Answer again from here";
    return [copy, again];
  }

  /** Show what the answer has become. */
  update() {
    const { reasoning, content, tokens, toolCalls } = this.answer;
    if (reasoning) {
      const isAtEnd = isScrolledDown(this.thoughts);
      this.reasoning.hidden = false;
      setText(this.thoughts, reasoning);
      if (isAtEnd) this.thoughts.scrollTop = this.thoughts.scrollHeight;
    }
    this.markdown.update(content);
    if (tokens.length > 0) this.tokens.update(tokens);
    this.root.classList.toggle("has-tokens", tokens.length > 0);
    this.tools.update(toolCalls);
    if (this.answer.firstMs !== null) setText(this.stats, "answering …");
  }

  /** The answer has ended, by itself, by an error or because it was stopped. */
  finish() {
    this.update();
    const { error, finishReason, isStopped, toolCalls } = this.answer;
    this.root.setAttribute("aria-busy", "false");
    this.root.classList.toggle("failed", error !== null);
    const note = error ?? (isStopped ? "Stopped." : (ENDS[finishReason] ?? ""));
    this.note.hidden = !note;
    setText(this.note, note);
    setText(this.stats, statsLine(this.answer.stats()));
    this.buttons.hidden = false;
    if (toolCalls.length > 0 && !error && !isStopped) this.tools.finish();
  }
}

/** Whether the end of what an element scrolls is seen. */
export function isScrolledDown(element) {
  return element.scrollHeight - element.scrollTop - element.clientHeight < 40;
}
