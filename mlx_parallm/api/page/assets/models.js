// The table of models: what is served, where it is, and buttons that load, unload and pin it.

import { el, part, setText } from "./dom.js";
import { amount, bytes, percent } from "./format.js";

// INTERVAL_MS: between two looks at the models while the table is seen.
const INTERVAL_MS = 2000;

// ACTIONS_AT: the column of the buttons, which must be seen without scrolling.
const ACTIONS_AT = 2;
const COLUMNS = [
  ["Model", (model) => el("code", {}, model.id)],
  ["State", (model) => stateOf(model)],
  ["Leaves memory", (model) => leavesText(model)],
  ["Context", (model) => `${model.max_model_len?.toLocaleString() ?? "–"} tokens`],
  ["KV blocks", (_, pool) => (pool ? `${amount(Number(pool.num_gpu_blocks))} × ${pool.block_size}` : "–")],
  ["KV type", (_, pool) => pool?.cache_dtype ?? "–"],
  ["Attention", (_, pool) => pool?.attention_backend ?? "–"],
  ["Path", (_, pool) => pool?.path ?? "–"],
  ["Memory", (model) => memoryOf(model)],
  ["Files", (model) => (model.size_bytes ? bytes(model.size_bytes) : "–")],
  ["Loaded", (model) => (model.created ? new Date(model.created * 1000).toLocaleString() : "–")],
  ["From", (model) => model.root],
];

/** What a model takes in memory in all. */
function memoryOf(model) {
  const parts = isLoaded(model) ? Object.values(model.memory ?? {}) : [];
  return parts.length ? bytes(parts.reduce((sum, part) => sum + part, 0)) : "–";
}

function isLoaded({ status = "loaded" }) {
  return status === "loaded";
}

/** Where a model is, and how far its load has come. */
export function stateOf({ status = "loaded", progress, pinned }) {
  const share = status === "loading" ? ` ${Math.floor((progress ?? 0) * 100)} %` : "";
  return `${status}${share}${pinned ? ", pinned" : ""}`;
}

/** When a model leaves memory by itself. */
export function leavesText(model) {
  if (!isLoaded(model) || model.pinned || model.ttl === undefined || model.ttl === null) return "–";
  const left = model.expires_in_s ?? model.ttl;
  const text = left < 90 ? `${Math.ceil(left)} s` : `${Math.round(left / 60)} min`;
  return model.expires_in_s == null ? `${text} after its last request` : `in ${text}`;
}

/** What can be done with a model: names of buttons. Adapters come and go with their models. */
export function actionsOf(model) {
  if (model.parent || model.status === "loading") return [];
  if (!isLoaded(model)) return ["Load", "Pin"];
  return model.pinned ? ["Unload"] : ["Unload", "Pin"];
}

/** Whether a model of /v1/models can answer in a chat. */
export function generates(model) {
  return model.tasks?.includes("generate") ?? false;
}

/** Whether a model of /v1/models takes images. */
export function sees(model) {
  return model.input_modalities?.includes("image") ?? false;
}

/** Whether a model of /v1/models is an encoder-decoder, which reads a source instead of a chat. */
export function translates(model) {
  return model.tasks?.includes("text2text-generation") ?? false;
}

/** Whether a model of /v1/models writes down what is said in a recording. */
export function hears(model) {
  return model.tasks?.includes("transcription") ?? false;
}

/** The table of models, which follows them for as long as it is seen. */
export class ModelTable {
  /**
   * `reading` returns the latest Reading of the metrics, or null; `onModels` gets the models of
   * /v1/models when they differ from those before.
   */
  constructor({ api, section, reading, isSeen, onModels }) {
    this.api = api;
    this.reading = reading;
    this.table = section.querySelector("table");
    this.problem = part(section, "problem");
    this.isSeen = isSeen;
    this.onModels = onModels;
    this.models = [];
    this.shown = "";
  }

  async run() {
    for (;;) {
      await new Promise((wake) => setTimeout(wake, INTERVAL_MS));
      if (this.isSeen()) await this.#read();
    }
  }

  /** Show models, with what the metrics say of their KV pools. */
  show(models) {
    this.models = models;
    this.#draw();
  }

  async #read() {
    let models;
    try {
      models = await this.api.models({ isPolled: true });
    } catch {
      // The line above the page tells it.
      return;
    }
    const isNew = JSON.stringify(models) !== JSON.stringify(this.models);
    this.show(models);
    if (isNew) this.onModels(models);
  }

  /** Draw what has changed; a button that has the focus keeps it. */
  #draw() {
    const samples = this.reading()?.samples("vllm:cache_config_info") ?? [];
    const pools = new Map(samples.map(({ labels }) => [labels.model_name, labels]));
    const shown = JSON.stringify([this.models, samples]);
    if (shown === this.shown) return;
    this.shown = shown;
    const label = document.activeElement?.ariaLabel;
    const hadFocus = this.table.contains(document.activeElement);
    const names = COLUMNS.map(([name]) => name);
    names.splice(ACTIONS_AT, 0, "Actions");
    const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));
    const rows = this.models.map((model) => this.#row(model, pools));
    this.table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
    if (hadFocus) [...this.table.querySelectorAll("button")].find((one) => one.ariaLabel === label)?.focus();
  }

  #row(model, pools) {
    // Aliases share the pool of the name the metrics are under.
    const same = this.models.filter((one) => one.root === model.root).map((one) => one.id);
    const pool = same.map((id) => pools.get(id)).find(Boolean);
    const cells = COLUMNS.map(([name, value]) => el("td", { "data-name": name }, value(model, pool)));
    const buttons = actionsOf(model).map((name) => this.#button(name, model.id));
    cells.splice(ACTIONS_AT, 0, el("td", { "data-name": "Actions", class: "actions" }, ...buttons));
    return el("tr", {}, ...cells);
  }

  #button(name, id) {
    const label = `${name} ${id}`;
    const onclick = () => this.#act(name, id);
    return el("button", { type: "button", class: "quiet", "aria-label": label, onclick }, name);
  }

  async #act(name, id) {
    if (name === "Unload" && !confirm(`Unload ${id}? Its running requests are answered first.`)) return;
    setText(this.problem, "");
    try {
      // The answer comes once the model is loaded; the state is seen before.
      const acting = name === "Unload" ? this.api.unload(id) : this.api.load(id, name === "Pin");
      await Promise.all([acting, this.#read()]);
    } catch (error) {
      setText(this.problem, error.message);
    }
    await this.#read();
  }
}

/** Offer the models that the metrics name; the choice is only shown if there are several. */
export function offerModels(select, reading) {
  // Every engine has a sample of each model.
  const samples = reading.samples("vllm:num_requests_running");
  const names = [...new Set(samples.map(({ labels }) => labels.model_name))];
  const offered = [...select.options].slice(1).map((option) => option.value);
  if (names.join("\n") !== offered.join("\n")) {
    select.replaceChildren(new Option("all models", ""), ...names.map((name) => new Option(name, name)));
  }
  select.closest("label").hidden = names.length < 2;
}

/** The load of each engine: `[number, running, waiting, share of the KV pool]`; none if there is one. */
export function engineLoads(reading) {
  const ranks = [...new Set(reading.samples("vllm:num_requests_running").map(({ labels }) => labels.engine))];
  if (ranks.length < 2) return [];
  return ranks.map((rank) => {
    const isOwn = (labels) => labels.engine === rank;
    const pools = reading.samples("vllm:kv_cache_usage_perc").filter(({ labels }) => isOwn(labels));
    return [
      rank,
      reading.sum("vllm:num_requests_running", isOwn),
      reading.sum("vllm:num_requests_waiting", isOwn),
      Math.max(0, ...pools.map(({ value }) => value)),
    ];
  });
}

/** Show a row for each engine that answers, if there are several. */
export function showEngines(section, reading) {
  const loads = engineLoads(reading);
  section.hidden = !loads.length;
  const names = ["Engine", "Running", "Waiting", "KV cache"];
  const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));
  const rows = loads.map(([rank, running, waiting, share]) => {
    const texts = [rank, amount(running), amount(waiting), percent(share)];
    return el("tr", {}, ...texts.map((text, index) => el("td", { "data-name": names[index] }, text)));
  });
  section.querySelector("table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}
