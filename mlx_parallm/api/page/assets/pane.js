// One chat with one model and its settings; two of them side by side make a comparison.

import { releaseClips } from "./clips.js";
import { Answer, Conversation } from "./conversation.js";
import { part, setText } from "./dom.js";
import { amount, seconds } from "./format.js";
import { AnswerView, isScrolledDown, userView } from "./message.js";
import { Settings } from "./settings.js";

export class Pane {
  /**
   * `template` holds its elements, `name` tells panes apart, `onChange` is called when it begins or
   * ends an answer, `announce` tells people who do not see the page.
   */
  constructor({ template, name, api, card, onChange, announce }) {
    this.api = api;
    this.card = card;
    this.name = name;
    this.onChange = onChange;
    this.announce = announce;
    this.root = template.content.cloneNode(true).firstElementChild;
    this.log = part(this.root, "log");
    this.settings = new Settings(part(this.root, "settings"));
    this.conversation = new Conversation();
    this.views = [];
    this.running = null;
    this.#wire();
  }

  #wire() {
    this.root.setAttribute("aria-label", `Chat ${this.name}`);
    setText(part(this.root, "letter"), this.name);
    part(this.root, "clear").addEventListener("click", () => this.clear());
    const toggle = part(this.root, "toggle");
    toggle.addEventListener("click", () => this.openSettings(!this.hasOpenSettings));
    const form = part(this.root, "settings");
    form.addEventListener("change", () => this.showSettings());
  }

  get hasOpenSettings() {
    return this.root.classList.contains("with-settings");
  }

  get isBusy() {
    return this.running !== null;
  }

  get isEmpty() {
    return this.views.length === 0;
  }

  openSettings(isOpen) {
    this.root.classList.toggle("with-settings", isOpen);
    part(this.root, "toggle").setAttribute("aria-expanded", String(isOpen));
  }

  /** Show what follows from the settings: whether tokens are coloured, and the line above. */
  showSettings() {
    setText(part(this.root, "summary"), this.settings.summary);
    this.root.classList.toggle("with-tokens", this.settings.wantsTokens);
  }

  /** Say something, or send a recording, and stream the answer. Throws SettingsError. */
  send(message) {
    this.settings.body();
    this.views.at(-1)?.tools?.take();
    this.#say({ role: "user", ...message });
    this.answer();
  }

  /** Stream an answer to what was said. */
  async answer() {
    const body = this.settings.body();
    const answer = new Answer(performance.now());
    answer.model = body.model;
    if (this.settings.takesAudio) answer.heardS = this.conversation.source.clip?.seconds ?? null;
    // What is said before the answer is shown, which is then part of it.
    const chunks = this.#chunks(body);
    const view = this.#show(answer);
    const stop = new AbortController();
    this.running = stop;
    this.onChange();
    try {
      for await (const chunk of chunks(stop.signal)) {
        answer.add(chunk, performance.now());
        this.#draw(view);
      }
    } catch (error) {
      if (!stop.signal.aborted) answer.error = error.message;
    }
    answer.endedMs = performance.now();
    answer.isStopped = stop.signal.aborted;
    this.running = null;
    if (this.conversation.has(answer)) this.#finish(view);
    this.onChange();
  }

  #finish(view) {
    const { answer } = view;
    this.#end(view);
    this.announce(`${this.name}: ${answer.error ?? (answer.content || "Tool call.")}`);
  }

  #end(view) {
    this.#scrollAfter(() => view.finish());
    this.#showNumbers(view.answer.stats());
  }

  /** What there is to keep of it. */
  kept() {
    const { values: settings, tried } = this.settings;
    return { settings, tried, turns: this.conversation.kept(performance.now()) };
  }

  /** Show what was kept of it. */
  restore({ settings, tried, turns }) {
    this.settings.set(settings);
    this.settings.tried = tried ?? [];
    this.showSettings();
    for (const turn of turns) {
      if (!turn.role) this.#end(this.#show(Answer.from(turn)));
      else if (turn.role === "tool") this.#restoreResult(turn);
      else this.#say(turn);
    }
  }

  #restoreResult(message) {
    this.conversation.add(message);
    this.views.at(-1)?.tools?.restore(message);
  }

  #say(message) {
    this.conversation.add(message);
    this.#append({ root: userView(message), turn: message });
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.#cutFrom(0);
    this.conversation = new Conversation();
    this.#showNumbers(null);
    this.settings.undo();
    this.showSettings();
    this.onChange();
  }

  /** What asks the server: with the conversation, or the last message as a source or a recording. */
  #chunks(body) {
    const { settings, conversation } = this;
    const { text, clip } = conversation.source;
    if (settings.takesAudio) return (signal) => this.#heard({ ...body, ...(text ? { prompt: text } : {}) }, clip, signal);
    if (settings.takesSource) return (signal) => this.api.complete({ ...body, prompt: text }, signal);
    const messages = conversation.messages(settings.system);
    return (signal) => this.api.chat({ ...body, messages }, signal);
  }

  #heard(body, clip, signal) {
    if (!clip?.file) throw new Error("The recording of this message is not kept: choose it again.");
    return this.api.transcribe(body, clip.file, signal);
  }

  #show(answer) {
    this.conversation.add(answer);
    const view = new AnswerView(answer, this.card, {
      onAgain: () => this.#again(answer),
      onToolResults: (messages) => {
        this.#addResults(messages);
        this.#tryAnswer();
      },
    });
    view.tools.onUnsent = (messages) => this.#addResults(messages);
    this.#append({ root: view.root, turn: answer, tools: view.tools });
    return view;
  }

  #addResults(messages) {
    for (const message of messages) this.conversation.add(message);
  }

  #again(answer) {
    if (this.isBusy) return;
    this.#cutFrom(this.views.findIndex((view) => view.turn === answer));
    this.conversation.cutFrom(answer);
    this.#tryAnswer();
  }

  #tryAnswer() {
    this.answer().catch((error) => this.onChange(error));
  }

  #cutFrom(place) {
    for (const { root } of this.views.splice(place)) {
      releaseClips(root);
      root.remove();
    }
  }

  #append(view) {
    this.views.push(view);
    this.log.append(view.root);
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Draw at most once a frame, however many chunks come. */
  #draw(view) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (this.isBusy) this.#scrollAfter(() => view.update());
    });
  }

  /** Follow the text, unless somebody has scrolled up to read. */
  #scrollAfter(change) {
    const isAtEnd = isScrolledDown(this.log);
    change();
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #showNumbers(stats) {
    this.numbers = stats;
    setText(part(this.root, "first"), seconds(stats?.firstS ?? null));
    setText(part(this.root, "speed"), amount(stats?.tokensPerS ?? null));
    setText(part(this.root, "total"), seconds(stats?.totalS ?? null));
    setText(part(this.root, "tokens"), amount(stats?.tokens ?? null));
  }
}
