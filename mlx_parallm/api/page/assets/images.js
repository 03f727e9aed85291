// Images that go with the next message.

import { el, part } from "./dom.js";

// TYPES: what the server reads.
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** A message's content: its text alone, or its images and its text as parts. */
export function contentOf(text, urls) {
  if (urls.length === 0) return text;
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...images, { type: "text", text }] : images;
}

/** The text and the images of a message's content. */
export function partsOf(content) {
  if (typeof content === "string") return { text: content, urls: [] };
  const texts = content.filter(({ type }) => type === "text").map(({ text }) => text);
  const images = content.filter(({ type }) => type === "image_url");
  return { text: texts.join("\n"), urls: images.map(({ image_url }) => image_url.url) };
}

/** Whether the server reads files of this type. */
export function isImage({ type }) {
  return TYPES.includes(type);
}

/** The URL of a drawing of two circles and a square. */
export function drawing() {
  const canvas = el("canvas", { width: 256, height: 256 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#f5f5f5";
  pen.fillRect(0, 0, 256, 256);
  for (const [colour, x, y] of [["red", 42, 42], ["blue", 212, 128]]) {
    pen.fillStyle = colour;
    pen.beginPath();
    pen.arc(x, y, 34, 0, 2 * Math.PI);
    pen.fill();
  }
  pen.fillStyle = "green";
  pen.fillRect(98, 178, 60, 60);
  return canvas.toDataURL("image/png");
}

/**
 * The images that wait beside the field. `onProblem` is told of files that are no images, and
 * `onAdd` says whether images are taken.
 */
export class Images {
  constructor({ root, onProblem, onAdd }) {
    this.urls = [];
    this.onProblem = onProblem;
    this.onAdd = onAdd;
    this.list = part(root, "images");
    this.input = el("input", { type: "file", accept: TYPES.join(","), multiple: true, hidden: true });
    this.input.ariaLabel = "Image files";
    this.input.dataset.part = "image-files";
    this.input.addEventListener("change", () => {
      this.add([...this.input.files]);
      this.input.value = "";
    });
    part(root, "composer").append(this.input);
    part(root, "add-image").addEventListener("click", () => this.input.click());
  }

  /** Add the files that are images, in order. */
  async add(files) {
    const other = files.find((file) => !isImage(file));
    this.onProblem(other ? `${other.name} is not a PNG, JPEG, WebP, GIF or BMP image.` : "");
    const images = files.filter(isImage);
    if (images.length === 0 || !this.onAdd()) return;
    const urls = await Promise.all(images.map(readUrl));
    this.set([...this.urls, ...urls]);
  }

  /** Show these images instead. */
  set(urls) {
    this.urls = urls;
    this.list.hidden = urls.length === 0;
    this.list.replaceChildren(...urls.map((url, i) => this.#thumbnail(url, i)));
  }

  #thumbnail(url, i) {
    const label = `Remove image ${i + 1}`;
    const onclick = () => this.set(this.urls.filter((_, other) => other !== i));
    const remove = el("button", { type: "button", class: "remove", "aria-label": label, title: label, onclick }, "×");
    return el("span", { class: "thumbnail" }, imageView(url, i), remove);
  }
}

/** An image of a message. */
export function imageView(url, i) {
  return el("img", { src: url, alt: `Image ${i + 1}` });
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
