// Tool calls of an answer: their arguments as they stream, and a field for what the tool returns.

import { el, part, setText } from "./dom.js";

/** JSON with line breaks, or the text as it is if it is not JSON (yet). */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export class ToolCallsView {
  /** `onResults` gets the tool messages once the user sends them. */
  constructor(onResults) {
    this.cards = [];
    this.isOpen = false;
    this.onUnsent = () => {};
    this.list = el("div", { class: "calls" });
    this.send = el("button", { type: "submit", class: "primary" }, "Send results");
    this.actions = el("div", { class: "call-actions", hidden: true }, this.send);
    this.root = el("form", { class: "tool-calls", hidden: true }, this.list, this.actions);
    this.root.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#close();
      onResults(this.#messages());
    });
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.root.requestSubmit();
    });
  }

  /** Show calls `{id, name, arguments}`. */
  update(calls) {
    this.calls = calls;
    this.root.hidden = calls.length === 0;
    calls.forEach((call, i) => {
      if (!this.cards[i]) this.list.append((this.cards[i] = card()));
      setText(part(this.cards[i], "name"), call.name);
      setText(part(this.cards[i], "arguments"), call.arguments);
    });
  }

  /** The answer has ended: ask for the results. */
  finish() {
    this.calls?.forEach((call, i) => {
      setText(part(this.cards[i], "arguments"), pretty(call.arguments));
      part(this.cards[i], "result").hidden = false;
      part(this.cards[i], "input").setAttribute("aria-label", `Result of ${call.name}`);
    });
    this.actions.hidden = false;
    this.isOpen = true;
  }

  /** Somebody goes on without sending the results: they count as they are. */
  take() {
    if (!this.isOpen) return;
    this.#close();
    this.onUnsent(this.#messages());
  }

  /** A result that was sent before. */
  restore({ tool_call_id: id, content }) {
    const place = this.calls.findIndex((call) => call.id === id);
    if (place >= 0) part(this.cards[place], "input").value = content;
    this.#close();
  }

  #close() {
    this.isOpen = false;
    this.actions.hidden = true;
    for (const one of this.cards) part(one, "input").readOnly = true;
  }

  #messages() {
    return this.calls.map((call, i) => ({
      role: "tool",
      tool_call_id: call.id,
      content: part(this.cards[i], "input").value,
    }));
  }
}

function card() {
  const input = el("textarea", {
    "data-part": "input",
    rows: 2,
    placeholder: 'What the tool returns, such as {"result": 21}',
  });
  return el(
    "div",
    { class: "call" },
    el("div", { class: "call-head" }, el("span", {}, "Tool call"), el("code", { "data-part": "name" })),
    el("pre", { "data-part": "arguments", tabindex: 0, "aria-label": "Arguments" }),
    el("label", { "data-part": "result", class: "result", hidden: true }, "Result", input),
  );
}
