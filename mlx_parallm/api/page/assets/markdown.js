// The little of Markdown that chat models write most: code, bold, headings and list marks. What it
// does not know stays as it was written. It makes elements and text, never markup.

import { copyText, el } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)[ \t]*([\w+#.-]*)[^`\n]*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*/g;
const HEADING = /^#{1,6} +(.*)$/;

/** The text as `[{kind: "code" | "text", language, text}]`; an open fence is code to the end. */
export function blocksOf(text) {
  const blocks = [];
  let fence = null;
  let lines = [];
  const close = (kind, language) => {
    if (kind === "code" || lines.some((line) => line.trim())) {
      blocks.push({ kind, language, text: lines.join("\n") });
    }
    lines = [];
  };
  for (const line of text.split("\n")) {
    const found = FENCE.exec(line);
    if (fence && found && found[1].startsWith(fence.mark) && !found[2]) {
      close("code", fence.language);
      fence = null;
    } else if (!fence && found) {
      close("text", "");
      fence = { mark: found[1], language: found[2] };
    } else {
      lines.push(line);
    }
  }
  close(fence ? "code" : "text", fence?.language ?? "");
  return blocks;
}

/** Show a text in an element that shows an earlier part of it, or nothing. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  /** Blocks that did not change stay as they are, so that a selection in them stays too. */
  update(text) {
    const blocks = blocksOf(text);
    const same = blocks.findIndex((block, i) => !isSame(block, this.shown[i]));
    const first = same < 0 ? blocks.length : same;
    while (this.root.childNodes.length > first) this.root.lastChild.remove();
    for (const block of blocks.slice(first)) this.root.append(elementOf(block));
    this.shown = blocks;
  }
}

function isSame(block, shown) {
  return block.kind === shown?.kind && block.text === shown.text;
}

function elementOf({ kind, language, text }) {
  if (kind === "text") return el("div", { class: "prose" }, ...proseOf(text));
  const button = el("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", () => copyText(button, text));
  return el(
    "div",
    { class: "code" },
    el("div", { class: "code-head" }, el("span", {}, language || "code"), button),
    el("pre", { tabindex: 0 }, el("code", {}, text)),
  );
}

function proseOf(text) {
  const lines = text.replace(/^\n+|\s+$/g, "").split("\n");
  return lines.flatMap((line, i) => {
    const heading = HEADING.exec(line);
    const nodes = heading ? [el("strong", {}, ...inlineOf(heading[1]))] : inlineOf(line);
    return i < lines.length - 1 ? [...nodes, "\n"] : nodes;
  });
}

function inlineOf(line) {
  const nodes = [];
  let place = 0;
  for (const found of line.matchAll(INLINE)) {
    nodes.push(line.slice(place, found.index));
    const [whole, , code, bold] = found;
    nodes.push(code === undefined ? el("strong", {}, bold) : el("code", {}, code));
    place = found.index + whole.length;
  }
  return [...nodes, line.slice(place)];
}
