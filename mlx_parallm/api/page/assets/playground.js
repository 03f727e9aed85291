// The chat panes and the field below them that speaks to all of them.

import { el, part } from "./dom.js";
import { ChatList } from "./chat_list.js";
import { deleteChat, putChat } from "./chats.js";
import { keepChat, keptChat } from "./kept.js";
import { EXAMPLES } from "./examples.js";
import { Clips, isAudio } from "./clips.js";
import { takeFiles } from "./files.js";
import { hears, sees } from "./models.js";
import { Pane } from "./pane.js";
import { contentOf, drawing, Images } from "./images.js";
import { SettingsError } from "./settings.js";

// Of these numbers the lesser, and of the others the greater, is marked in a comparison.
// Less than this share apart is not told apart.
const LEAST_DIFFERENCE = 0.05;
const COMPOSING = 229;
// FIELDS: what the field is called, and its hint, by what the models read.
const FIELDS = {
  chat: ["Message", "Say something to the model"],
  source: ["Source", "A source to translate or to summarise"],
  audio: ["Prompt", "Names and words that are said (optional)"],
};
const LESS_IS_BETTER = { first: "firstS", total: "totalS" };
const MORE_IS_BETTER = { speed: "tokensPerS" };

export class Playground {
  constructor({ root, template, dialog, api, card, announce }) {
    this.root = root;
    // The id under which the open chat is kept; null before its first answer.
    this.chatId = null;
    this.isSwitching = false;
    this.field = part(root, "prompt");
    this.sendButton = part(root, "send");
    this.stopButton = part(root, "stop");
    this.problem = part(root, "problem");
    this.examples = part(root, "examples");
    this.compareButton = part(root, "compare");
    this.imageButton = part(root, "add-image");
    this.audioButtons = ["add-audio", "record"].map((name) => part(root, name));
    this.models = [];
    const onProblem = (text) => (this.problem.textContent = text);
    const choose = (kind, what) => () => this.#choose(kind, what);
    this.images = new Images({ root, onProblem, onAdd: choose(sees, "images") });
    this.clips = new Clips({ root, onProblem, onAdd: choose(hears, "audio"), onChange: () => this.#onClip() });
    const onChange = (error) => {
      this.#onChange(error);
      this.#remember();
    };
    const options = { template, api, card, announce, onChange };
    this.all = ["A", "B"].map((name) => new Pane({ ...options, name }));
    this.panes = this.all.slice(0, 1);
    part(root, "panes").append(...this.all.map((pane) => pane.root));
    this.chats = new ChatList({
      dialog,
      onOpen: ({ id, chat }) => this.#open(id, chat),
      onNew: () => this.#open(null, null),
      onDelete: (id) => {
        // An open chat stays in sight, and is kept anew with its next answer.
        if (id === this.chatId) this.chatId = null;
      },
    });
    this.#wire();
    this.#compare(false);
    this.all[0].openSettings(matchMedia("(min-width: 60rem)").matches);
    this.#restore();
    // Also where the page is left by a link, and come back to.
    addEventListener("pagehide", () => this.#keep());
  }

  #wire() {
    part(this.root, "composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    takeFiles({ root: this.root, composer: part(this.root, "composer"), field: this.field }, (files) => {
      const audio = files.filter(isAudio);
      if (audio.length > 0) this.clips.add(audio);
      else this.images.add(files);
    });
    this.field.addEventListener("keydown", (event) => {
      // Enter may also end a word that is being composed (Chinese, Japanese, Korean); Safari tells
      // that by the key code only.
      const isComposing = event.isComposing || event.keyCode === COMPOSING;
      if (event.key !== "Enter" || event.shiftKey || isComposing) return;
      event.preventDefault();
      this.#send();
    });
    this.stopButton.addEventListener("click", () => this.panes.forEach((pane) => pane.stop()));
    for (const pane of this.all) {
      pane.settings.form.addEventListener("change", () => this.#showField());
      part(pane.root, "clear").addEventListener("click", () => {
        // An example that was not sent goes with its settings.
        if (this.taken && this.field.value === this.taken) this.#write("", []);
      });
    }
    part(this.root, "chats").addEventListener("click", () => this.chats.show());
    this.compareButton.addEventListener("click", () => this.#compare(this.panes.length === 1));
    const buttons = EXAMPLES.map((example) => {
      const onclick = () => this.#take(example);
      const attributes = { type: "button", class: "chip", title: example.prompt, onclick };
      return el("button", { ...attributes, "data-drawing": example.isDrawn ?? null }, example.name);
    });
    this.examples.append(...buttons);
  }

  get hasFocus() {
    return document.activeElement === this.field;
  }

  /** Let the keyboard write a message. */
  focus() {
    this.field.focus();
    // Chromium gives the focus back to what had it before a dialog, and leaves the caret out.
    const end = this.field.value.length;
    this.field.setSelectionRange(end, end);
  }

  #keep() {
    const { urls } = this.images;
    const isUsed = this.field.value !== "" || urls.length > 0 || this.all.some((pane) => !pane.isEmpty);
    keepChat(isUsed ? { ...this.#chat(), text: this.field.value, images: urls, chatId: this.chatId } : null);
  }

  #chat() {
    return { isComparing: this.panes.length > 1, panes: this.all.map((pane) => pane.kept()) };
  }

  /** Keep the chat in the list once an answer has ended; one that was cleared leaves it. */
  #remember() {
    if (this.isSwitching || this.#isBusy()) return;
    if (this.all.some((pane) => !pane.isEmpty)) {
      this.#put();
    } else if (this.chatId !== null) {
      deleteChat(this.chatId);
      this.chatId = null;
    }
  }

  #put() {
    // Pages that are not secure have no crypto.randomUUID.
    this.chatId ??= `${Date.now()}-${Math.random().toString(36).slice(2)}`;
    putChat(this.chatId, this.#chat(), Date.now());
  }

  /** Show a chat of the list in place of the one that is open, which stays in the list; or none. */
  #open(id, chat) {
    // An answer that streams ends here.
    if (this.#isBusy()) this.#put();
    this.isSwitching = true;
    for (const pane of this.all) pane.clear();
    this.isSwitching = false;
    this.chatId = id;
    this.#write("", []);
    if (chat) this.#show(chat);
    this.focus();
  }

  #restore() {
    const chat = keptChat();
    if (!chat) return;
    this.chatId = chat.chatId ?? null;
    this.#show(chat);
  }

  #show(chat) {
    this.field.value = chat.text ?? "";
    this.images.set(chat.images ?? []);
    this.#compare(chat.isComparing);
    this.all.forEach((pane, i) => pane.restore(chat.panes[i]));
    this.#onChange();
  }

  /** Offer models; a second pane begins with the second model, if there is one. */
  offer(models) {
    const ids = models.map((model) => model.id);
    this.models = models;
    this.all.forEach((pane, i) => {
      pane.settings.offer(models, ids[Math.min(i, ids.length - 1)]);
      pane.showSettings();
    });
    this.#showField();
  }

  /** Call the field what it is to the models, and offer what some model takes. */
  #showField() {
    const every = (kind) => this.panes.every((pane) => pane.settings[kind]);
    const isAudio = every("takesAudio");
    const [label, hint] = FIELDS[isAudio ? "audio" : every("takesSource") ? "source" : "chat"];
    this.field.placeholder = hint;
    this.field.setAttribute("aria-label", label);
    const isBlind = isAudio || !this.models.some(sees);
    const drawn = this.examples.querySelectorAll("[data-drawing]");
    for (const button of [this.imageButton, ...drawn]) button.hidden = isBlind;
    for (const button of this.audioButtons) button.hidden = !this.models.some(hears);
    this.examples.hidden = isAudio || this.panes.some((pane) => !pane.isEmpty);
  }

  /** Choose a model of a kind in every pane; false if there is none. */
  #choose(kind, what) {
    const first = this.models.find(kind);
    if (!first) {
      this.problem.textContent = `No model of this server takes ${what}.`;
      return false;
    }
    for (const pane of this.panes) {
      if (pane.settings.takes(kind)) continue;
      pane.settings.set({ model: first.id });
      pane.showSettings();
    }
    if (!hears(first)) this.clips.set(null);
    this.#showField();
    return true;
  }

  #onClip() {
    // No model takes both.
    if (this.clips.clip) this.images.set([]);
    // The button that was pressed may be gone; a field would bring up the keyboard of a phone.
    if (document.activeElement?.offsetParent !== null) return;
    const { isRecording, clip, finishButton, recordButton } = this.clips;
    (isRecording ? finishButton : clip ? this.sendButton : recordButton).focus();
  }

  /** Write an example into the field; the model before a drawing's comes back for another one. */
  #take({ prompt, settings, isDrawn }) {
    const seeing = this.models.find(sees);
    for (const pane of this.panes) {
      pane.settings.undo();
      const isBlind = isDrawn && !pane.settings.takes(sees);
      pane.settings.try({ ...settings, ...(isBlind ? { model: seeing.id } : {}) });
      pane.showSettings();
    }
    this.#write(prompt, isDrawn ? [drawing()] : []);
    this.taken = prompt;
    this.field.focus();
  }

  #write(text, images) {
    this.field.value = text;
    this.images.set(images);
    this.clips.set(null);
  }

  #compare(isOn) {
    const [first, second] = this.all;
    this.panes = isOn ? this.all : [first];
    second.root.hidden = !isOn;
    if (isOn) {
      const { model } = second.settings;
      second.settings.copyFrom(first.settings);
      if (model) second.settings.set({ model });
      second.showSettings();
      for (const pane of this.all) pane.openSettings(false);
    } else {
      second.stop();
    }
    this.root.classList.toggle("comparing", isOn);
    this.compareButton.setAttribute("aria-pressed", String(isOn));
    this.#onChange();
  }

  #send() {
    if (this.#isBusy()) return;
    if (this.clips.isRecording) this.clips.finish();
    const text = this.field.value.trim();
    const { urls } = this.images;
    const { clip } = this.clips;
    if (!text && urls.length === 0 && !clip) return;
    try {
      for (const pane of this.panes) {
        pane.settings.body();
        pane.settings.checkTakes({ images: urls, clip });
      }
      const message = { content: contentOf(text, urls), ...(clip ? { clip } : {}) };
      for (const pane of this.panes) pane.send(message);
      this.#write("", []);
    } catch (error) {
      this.#onChange(error);
    }
  }

  #isBusy() {
    return this.panes.some((pane) => pane.isBusy);
  }

  #onChange(error = null) {
    if (error && !(error instanceof SettingsError)) throw error;
    this.problem.textContent = error?.message ?? "";
    if (error) {
      const pane = this.panes.find(({ settings }) => settings.form.contains(error.field));
      pane?.openSettings(true);
      error.field.focus();
    }
    const isBusy = this.#isBusy();
    const hadFocus = [this.sendButton, this.stopButton].includes(document.activeElement);
    this.sendButton.hidden = isBusy;
    this.stopButton.hidden = !isBusy;
    // A button that is hidden loses the focus to nothing.
    if (hadFocus) (isBusy ? this.stopButton : this.sendButton).focus();
    this.#showField();
    this.#markBest();
  }

  #markBest() {
    const isOver = this.panes.length > 1 && this.panes.every((pane) => pane.numbers && !pane.isBusy);
    const mark = (name, key, pick) => {
      const values = this.panes.map((pane) => pane.numbers?.[key] ?? null);
      const isTold = isOver && !values.includes(null) && differ(...values);
      this.panes.forEach((pane, i) => {
        const isBest = isTold && values[i] === pick(...values);
        part(pane.root, name).classList.toggle("best", isBest);
      });
    };
    for (const [name, key] of Object.entries(LESS_IS_BETTER)) mark(name, key, Math.min);
    for (const [name, key] of Object.entries(MORE_IS_BETTER)) mark(name, key, Math.max);
  }
}

function differ(a, b) {
  return Math.abs(a - b) > LEAST_DIFFERENCE * Math.max(a, b);
}
