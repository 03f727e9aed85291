// The chat panes and the field below them that speaks to all of them.

import { el, part } from "./dom.js";
import { ChatList } from "./chat_list.js";
import { deleteChat, putChat } from "./chats.js";
import { keepChat, keptChat } from "./kept.js";
import { EXAMPLES } from "./examples.js";
import { sees, translates } from "./models.js";
import { Pane } from "./pane.js";
import { contentOf, drawing, Images } from "./images.js";
import { SettingsError } from "./settings.js";

// Of these numbers the lesser, and of the others the greater, is marked in a comparison.
// Less than this share apart is not told apart.
const LEAST_DIFFERENCE = 0.05;
const COMPOSING = 229;
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
    this.seeing = new Set();
    const onProblem = (text) => (this.problem.textContent = text);
    this.images = new Images({ root, onProblem, onAdd: () => this.#chooseSeeing() });
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
    this.#showSeeing();
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
    this.seeing = new Set(models.filter(sees).map((model) => model.id));
    this.#showSeeing();
    const sources = new Set(models.filter(translates).map((model) => model.id));
    this.all.forEach((pane, i) => {
      pane.settings.offer(ids, ids[Math.min(i, ids.length - 1)], sources);
      pane.showSettings();
    });
    this.#showField();
  }

  /** Call the field a source where a message would be one. */
  #showField() {
    const isSource = this.panes.every((pane) => pane.settings.takesSource);
    this.field.placeholder = isSource ? "A source to translate or to summarise" : "Say something to the model";
    this.field.setAttribute("aria-label", isSource ? "Source" : "Message");
  }

  /** Offer what needs a model that takes images only where there is one. */
  #showSeeing() {
    const isBlind = this.seeing.size === 0;
    const drawn = this.examples.querySelectorAll("[data-drawing]");
    for (const button of [this.imageButton, ...drawn]) button.hidden = isBlind;
  }

  /** Choose a model that takes images in every pane; false if there is none. */
  #chooseSeeing() {
    const [first] = this.seeing;
    if (first === undefined) {
      this.problem.textContent = "No model of this server takes images.";
      return false;
    }
    for (const pane of this.panes) {
      if (this.seeing.has(pane.settings.model)) continue;
      pane.settings.set({ model: first });
      pane.showSettings();
    }
    return true;
  }

  /** Write an example into the field; the model before a drawing's comes back for another one. */
  #take({ prompt, settings, isDrawn }) {
    const [seeing] = this.seeing;
    for (const pane of this.panes) {
      pane.settings.undo();
      const isBlind = isDrawn && !this.seeing.has(pane.settings.model);
      pane.settings.try({ ...settings, ...(isBlind ? { model: seeing } : {}) });
      pane.showSettings();
    }
    this.#write(prompt, isDrawn ? [drawing()] : []);
    this.taken = prompt;
    this.field.focus();
  }

  #write(text, images) {
    this.field.value = text;
    this.images.set(images);
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
    const text = this.field.value.trim();
    const { urls } = this.images;
    if ((!text && urls.length === 0) || this.#isBusy()) return;
    try {
      for (const pane of this.panes) {
        pane.settings.body();
        if (urls.length > 0) pane.settings.checkSees(this.seeing);
      }
      for (const pane of this.panes) pane.send(contentOf(text, urls));
      this.field.value = "";
      this.images.set([]);
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
    this.examples.hidden = this.panes.some((pane) => !pane.isEmpty);
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
