// The fields of a pane as the fields of a request.

import { hears, sees, translates } from "./models.js";

/** A field holds something that cannot be sent. */
export class SettingsError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const ALTERNATIVES = 5;
const SIDES = ["src_lang", "tgt_lang", "decoder_prompt"];
// FIELDS: what each kind of model has; SHOWN_IF: those of them that depend on other fields.
const FIELDS = {
  chat: [...NUMBERS, "system", "thinking", "format", "schema", "tools", "tool_choice", "logprobs"],
  source: [...NUMBERS, ...SIDES],
  audio: ["language", "translate", "times", "logprobs"],
};
const SHOWN_IF = {
  schema: ({ fields }) => fields.format.value === "json_schema",
  tool_choice: ({ fields }) => fields.tools.value.trim() !== "",
  logprobs: ({ isTimed }) => !isTimed,
};

export class Settings {
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    // What an example has set: names, values before and values tried.
    this.tried = [];
    this.models = [];
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => event.target.setCustomValidity?.(""));
    form.addEventListener("change", () => this.#showFields());
    this.#showFields();
  }

  get model() {
    return this.fields.model.value;
  }

  /** The model and what differs from the defaults, in few words. */
  get summary() {
    return [this.model, ...(this.takesAudio ? this.#audioParts() : this.#chatParts())].join(" · ");
  }

  #audioParts() {
    const { language, translate } = this.fields;
    const parts = [language.value.trim(), translate.checked && "to English", this.isTimed && "times"];
    return parts.filter(Boolean);
  }

  #chatParts() {
    const { temperature, top_p: topP, seed, thinking, format, tools } = this.fields;
    const parts = [];
    if (temperature.value !== "") parts.push(`temperature ${temperature.value}`);
    if (topP.value !== "") parts.push(`top p ${topP.value}`);
    if (seed.value !== "") parts.push(`seed ${seed.value}`);
    if (thinking.value) parts.push(`thinking ${thinking.value}`);
    if (format.value !== "text") parts.push(format.selectedOptions[0].textContent);
    if (tools.value.trim()) parts.push("tools");
    return parts;
  }

  /** Every field by its name. */
  get values() {
    const named = [...this.fields].filter((field) => field.name);
    return Object.fromEntries(
      named.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]),
    );
  }

  get system() {
    return this.fields.system.value.trim();
  }

  get wantsTokens() {
    return this.fields.logprobs.checked && !this.takesSource && !this.isTimed;
  }

  /** Whether the model reads a source instead of a chat. */
  get takesSource() {
    return this.takes(translates);
  }

  /** Whether the model hears recordings instead of a chat. */
  get takesAudio() {
    return this.takes(hears);
  }

  /** Whether the answer has the times of segments, all at the end, and no probabilities. */
  get isTimed() {
    return this.takesAudio && this.fields.times.checked;
  }

  /** Whether the model is of a kind: `sees`, `hears` or another function of models.js. */
  takes(kind) {
    return this.models.some((model) => model.id === this.model && kind(model));
  }

  /** Offer models of /v1/models, keeping the one that is chosen if it is still there. */
  offer(models, preferred) {
    const { model } = this.fields;
    this.models = models;
    const ids = models.map(({ id }) => id);
    const chosen = this.model || this.wantedModel || preferred;
    model.replaceChildren(...ids.map((id) => new Option(id, id)));
    model.value = ids.includes(chosen) ? chosen : (ids[0] ?? "");
    model.setCustomValidity(ids.length > 0 ? "" : "No model of this server generates text.");
    this.#showFields();
  }

  /** Throws SettingsError, and marks the field, unless the model takes what goes with a message. */
  checkTakes({ images, clip }) {
    let fault = null;
    if (this.takesAudio && !clip) fault = "needs an audio file or a recording";
    else if (clip && !this.takesAudio) fault = "does not take audio";
    else if (images.length > 0 && !this.takes(sees)) fault = "does not take images";
    if (fault) throw this.#bad(this.fields.model, `${this.model} ${fault}.`);
  }

  /**
   * The request but its messages. Empty fields are left out: the server's defaults hold.
   * Throws SettingsError, and marks the field.
   */
  body() {
    for (const field of this.fields) if (!field.checkValidity()) throw this.#bad(field);
    if (this.takesAudio) return this.#audio();
    const body = { model: this.model, n: 1 };
    for (const name of NUMBERS) {
      const { value } = this.fields[name];
      if (value !== "") body[name] = Number(value);
    }
    if (this.takesSource) return { ...body, ...this.#sides() };
    const thinking = this.fields.thinking.value;
    if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
    if (this.wantsTokens) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    return { ...body, ...this.#format(), ...this.#tools() };
  }

  /** Take over every setting of another. */
  copyFrom(other) {
    for (const field of other.fields) {
      const own = this.fields[field.name];
      if (!own) continue;
      if (field.type === "checkbox") own.checked = field.checked;
      else own.value = field.value;
    }
    this.tried = other.tried;
    this.#showFields();
  }

  /** Set fields by name; the rest stays. A model that is not offered yet is chosen once it is. */
  set(values) {
    if (values.model) this.wantedModel = values.model;
    for (const [name, value] of Object.entries(values)) {
      const field = this.fields[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
    }
    this.#showFields();
  }

  /** Set fields for an example; `undo` takes back those that still have its values. */
  try(values) {
    this.undo();
    const before = this.values;
    this.tried = Object.keys(values).map((name) => [name, before[name], values[name]]);
    this.set(values);
  }

  /** Set the fields of the last example to what they were before it. */
  undo() {
    const now = this.values;
    const unchanged = this.tried.filter(([name, , tried]) => now[name] === tried);
    this.tried = [];
    this.set(Object.fromEntries(unchanged));
  }

  /** What belongs to a source. */
  #sides() {
    const values = SIDES.map((name) => [name, this.fields[name].value]);
    return Object.fromEntries(values.filter(([, value]) => value !== ""));
  }

  /** What belongs to a recording. */
  #audio() {
    const { language, translate } = this.fields;
    const body = { model: this.model, translate: translate.checked };
    if (language.value.trim()) body.language = language.value.trim();
    if (this.isTimed) return { ...body, response_format: "verbose_json" };
    return { ...body, stream: true, ...(this.wantsTokens ? { "include[]": "logprobs" } : {}) };
  }

  #format() {
    const type = this.fields.format.value;
    if (type === "text") return {};
    if (type === "json_object") return { response_format: { type } };
    const schema = this.#json("schema", "a JSON schema, an object");
    if (Array.isArray(schema)) throw this.#bad(this.fields.schema, "A JSON schema is an object.");
    return { response_format: { type, json_schema: { name: "answer", schema, strict: true } } };
  }

  #tools() {
    if (!this.fields.tools.value.trim()) return {};
    const tools = this.#json("tools", "a list of tools in JSON");
    if (!Array.isArray(tools)) throw this.#bad(this.fields.tools, "Tools are a list: [ … ].");
    return { tools: tools.map(wrapped), tool_choice: this.fields.tool_choice.value };
  }

  #json(name, what) {
    const field = this.fields[name];
    try {
      const value = JSON.parse(field.value);
      if (typeof value === "object" && value !== null) return value;
    } catch (error) {
      throw this.#bad(field, `This is not ${what}: ${error.message}`);
    }
    throw this.#bad(field, `This is not ${what}.`);
  }

  #bad(field, message = field.validationMessage) {
    field.setCustomValidity(message);
    const label = field.labels[0]?.firstChild.textContent.trim() ?? field.name;
    return new SettingsError(field, `${label}: ${message}`);
  }

  #showFields() {
    const shown = FIELDS[this.takesAudio ? "audio" : this.takesSource ? "source" : "chat"];
    for (const name of Object.values(FIELDS).flat()) {
      const isShown = shown.includes(name) && (SHOWN_IF[name]?.(this) ?? true);
      this.fields[name].closest("label").hidden = !isShown;
    }
  }
}

/** A tool given as a function alone is put into its wrapper. */
function wrapped(tool) {
  return tool?.type === undefined && tool?.name ? { type: "function", function: tool } : tool;
}
