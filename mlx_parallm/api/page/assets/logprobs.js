// Tokens coloured by how likely the model found them, and the alternatives it saw.

import { el } from "./dom.js";
import { percent } from "./format.js";

// Upper bounds of the colours 0 to 4; what is likelier has none.
const STEPS = [0.02, 0.1, 0.3, 0.6, 0.9];
const decoder = new TextDecoder("utf-8", { fatal: true });

/** The colour of a probability: 0 for the least likely, STEPS.length for none. */
export function levelOf(probability) {
  const level = STEPS.findIndex((bound) => probability < bound);
  return level < 0 ? STEPS.length : level;
}

/** A token as text; bytes that are no whole character as hexadecimal digits. */
export function tokenText({ token, bytes }) {
  if (!bytes) return token;
  const data = Uint8Array.from(bytes);
  try {
    return data.length > 0 ? decoder.decode(data) : token;
  } catch {
    return [...data].map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

/** Whether a token is a sign for the model, such as the end of a turn, and no text. */
export function isSpecial({ special }) {
  return special === true;
}

/** White space as signs, for where a token stands alone. */
function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

/** The tokens of an answer; one of them can be focused, arrow keys go on from there. */
export class TokensView {
  constructor(card) {
    this.card = card;
    this.tokens = [];
    this.root = el("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.root.addEventListener("pointerover", (event) => this.#show(event.target));
    this.root.addEventListener("pointerleave", () => this.card.hide());
    this.root.addEventListener("focusin", (event) => this.#show(event.target));
    this.root.addEventListener("focusout", () => this.card.hide());
    this.root.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Show tokens, of which the first may be shown already. */
  update(tokens) {
    for (const token of tokens.slice(this.tokens.length)) {
      const text = tokenText(token);
      const shown = text === "" ? "∅" : text.replaceAll("\n", "⏎\n");
      const level = levelOf(Math.exp(token.logprob));
      const index = this.root.childElementCount;
      const kind = isSpecial(token) ? "token special" : "token";
      const attributes = { class: `${kind} p${level}`, tabindex: index ? -1 : 0, "data-i": index };
      this.root.append(el("span", attributes, shown));
      this.tokens.push(token);
    }
  }

  #show(target) {
    const token = this.tokens[target.dataset?.i];
    if (token) this.card.show(target, token);
    else this.card.hide();
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.card.hide();
    const next = step && this.root.children[Number(event.target.dataset.i) + step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** The card beside a token, with its alternatives; one for the whole page. */
export class TokenCard {
  constructor() {
    this.root = el("div", { class: "token-card", role: "tooltip", id: "token-card", hidden: true });
    document.body.append(this.root);
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  show(target, token) {
    const others = token.top_logprobs ?? [];
    const isListed = others.some((one) => one.token === token.token);
    const rows = (isListed ? others : [token, ...others]).map((one) => row(one, token));
    const logprob = Math.min(token.logprob, -0).toFixed(3).replace("-", "−");
    const head = el(
      "div",
      { class: "token-head" },
      el("code", {}, visible(tokenText(token))),
      el("span", {}, `${percent(Math.exp(token.logprob))} · log ${logprob}`),
    );
    const note = isSpecial(token) ? el("p", { class: "token-note" }, "Special token, no text") : "";
    this.root.replaceChildren(head, note, el("div", { class: "token-rows" }, ...rows));
    this.target?.removeAttribute("aria-describedby");
    target.setAttribute("aria-describedby", "token-card");
    this.target = target;
    this.root.hidden = false;
    this.#place(target.getClientRects()[0] ?? target.getBoundingClientRect());
  }

  hide() {
    this.root.hidden = true;
  }

  #place(rect) {
    const { offsetWidth: width, offsetHeight: height } = this.root;
    const left = Math.min(Math.max(8, rect.left), innerWidth - width - 8);
    const isAbove = rect.bottom + height + 14 > innerHeight;
    this.root.style.left = `${left}px`;
    this.root.style.top = `${isAbove ? rect.top - height - 6 : rect.bottom + 6}px`;
  }
}

function row(one, chosen) {
  const share = Math.exp(one.logprob);
  const bar = el("span", { class: "share-bar" });
  bar.style.width = `${(share * 100).toFixed(1)}%`;
  return el(
    "div",
    { class: one.token === chosen.token ? "token-row chosen" : "token-row" },
    el("code", {}, visible(tokenText(one))),
    el("span", { class: "track" }, bar),
    el("span", { class: "share" }, percent(share)),
  );
}
