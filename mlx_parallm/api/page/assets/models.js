// The table of served models.

import { el } from "./dom.js";
import { amount, bytes, percent } from "./format.js";

const COLUMNS = [
  ["Model", (model) => el("code", {}, model.id)],
  ["Context", (model) => `${model.max_model_len?.toLocaleString() ?? "–"} tokens`],
  ["KV blocks", (_, pool) => (pool ? `${amount(Number(pool.num_gpu_blocks))} × ${pool.block_size}` : "–")],
  ["KV type", (_, pool) => pool?.cache_dtype ?? "–"],
  ["Attention", (_, pool) => pool?.attention_backend ?? "–"],
  ["Path", (_, pool) => pool?.path ?? "–"],
  ["Memory", (model) => memoryOf(model)],
  ["Loaded", (model) => new Date(model.created * 1000).toLocaleString()],
  ["From", (model) => model.root],
];

/** What a model takes in all, or where it is if that is not in memory. */
function memoryOf(model) {
  if (model.status && model.status !== "loaded") return model.status;
  const parts = Object.values(model.memory ?? {});
  return parts.length ? bytes(parts.reduce((sum, part) => sum + part, 0)) : "–";
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

/** Show models of /v1/models, with what a Reading of the metrics says of their KV pools. */
export function showModels(table, models, reading) {
  const pools = new Map(
    (reading?.samples("vllm:cache_config_info") ?? []).map(({ labels }) => [labels.model_name, labels]),
  );
  const head = el("tr", {}, ...COLUMNS.map(([name]) => el("th", { scope: "col" }, name)));
  const rows = models.map((model) => {
    // Aliases share the pool of the name the metrics are under.
    const same = models.filter((one) => one.root === model.root).map((one) => one.id);
    const pool = same.map((id) => pools.get(id)).find(Boolean);
    const cells = COLUMNS.map(([name, value]) => el("td", { "data-name": name }, value(model, pool)));
    return el("tr", {}, ...cells);
  });
  table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
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
