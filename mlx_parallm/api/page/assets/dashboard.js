// The charts of the server's metrics, from /metrics read once a second.

import { Chart } from "./chart.js";
import { amount, percent, seconds } from "./format.js";
import { parseMetrics, quantile, rate, ratio, Reading } from "./metrics.js";

const SPAN_S = 180;
const INTERVAL_MS = 1000;
// Over how many readings rates, and over how many quantiles and ratios are taken.
const RATE_READINGS = 2;
const WINDOW_READINGS = 10;

// Prompt tokens that memory had, and those that a disk or host memory had.
const HITS = ["vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"];

const isFailure = ({ finished_reason: reason }) => reason === "error";
const isAbort = ({ finished_reason: reason }) => reason === "abort";
const isDone = (labels) => !isFailure(labels) && !isAbort(labels);
const perSecond = (value) => (value === null ? "–" : `${amount(value)}/s`);

/** What each chart shows: `values(now, recent, window)` of the newest and two older readings. */
const CHARTS = [
  {
    title: "Generated tokens",
    hint: "vllm:generation_tokens_total",
    lines: ["tokens"],
    format: perSecond,
    values: (now, recent) => [rate(recent, now, "vllm:generation_tokens_total")],
  },
  {
    title: "Prompt tokens",
    hint: `vllm:prompt_tokens_total, ${HITS.join(", ")}`,
    lines: ["all", "from cache"],
    format: perSecond,
    values: (now, recent) => [
      rate(recent, now, "vllm:prompt_tokens_total"),
      HITS.map((name) => rate(recent, now, name)).reduce(sum),
    ],
  },
  {
    title: "Sequences",
    hint: "vllm:num_requests_running, vllm:num_requests_waiting",
    lines: ["running", "waiting"],
    format: amount,
    values: (now) => [
      now.sum("vllm:num_requests_running"),
      now.sum("vllm:num_requests_waiting"),
    ],
  },
  {
    title: "Finished",
    hint: "vllm:request_success_total, vllm:admission_rejections_total",
    lines: ["done", "aborted", "failed"],
    format: perSecond,
    values: (now, recent) => [
      rate(recent, now, "vllm:request_success_total", isDone),
      rate(recent, now, "vllm:request_success_total", isAbort),
      sum(
        rate(recent, now, "vllm:request_success_total", isFailure),
        rate(recent, now, "vllm:admission_rejections_total"),
      ),
    ],
  },
  latency("Time to first token", "vllm:time_to_first_token_seconds"),
  latency("Time between tokens", "vllm:inter_token_latency_seconds"),
  {
    title: "KV cache in use",
    hint: "vllm:kv_cache_usage_perc",
    lines: ["blocks"],
    format: percent,
    max: 1,
    values: (now) => [now.max("vllm:kv_cache_usage_perc")],
  },
  {
    title: "Prefix cache hits",
    hint: `${HITS.join(", ")} over vllm:prefix_cache_queries_total, 10 s`,
    lines: ["of prompt tokens"],
    format: percent,
    max: 1,
    values: (now, _, window) => [
      HITS.map((name) => ratio(window, now, name, "vllm:prefix_cache_queries_total")).reduce(sum),
    ],
  },
];

function latency(title, name) {
  return {
    title,
    hint: `${name}: estimated from its buckets over 10 s`,
    lines: ["median", "p95"],
    format: seconds,
    values: (now, _, window) => [0.5, 0.95].map((q) => quantile(window, now, name, q)),
  };
}

function sum(a, b) {
  return a === null || b === null ? null : a + b;
}

export class Dashboard {
  /** Draws into `root`; `onReading` is told the newest Reading and an older one, or an error. */
  constructor({ api, root, modelSelect, onReading }) {
    this.api = api;
    this.onReading = onReading;
    this.modelSelect = modelSelect;
    this.readings = [];
    // By model, "" for all of them: what every line of every chart was at a time.
    this.history = new Map();
    this.charts = CHARTS.map((spec) => new Chart({ ...spec, spanS: SPAN_S }));
    root.replaceChildren(...this.charts.map((chart) => chart.root));
    modelSelect.addEventListener("change", () => this.#draw());
  }

  /** Read the metrics for as long as the page is seen. */
  async run() {
    for (;;) {
      if (!document.hidden) await this.#read();
      await new Promise((wake) => setTimeout(wake, INTERVAL_MS));
    }
  }

  async #read() {
    try {
      const text = await this.api.metrics(AbortSignal.timeout(10 * INTERVAL_MS));
      const reading = new Reading(parseMetrics(text), performance.now() / 1000);
      this.readings = [...this.readings, reading].slice(-1 - WINDOW_READINGS);
      this.#note(reading);
      this.onReading(reading, this.#before(RATE_READINGS));
      this.#draw();
    } catch (error) {
      this.onReading(null, null, error);
    }
  }

  #before(count) {
    return this.readings.at(-1 - count) ?? this.readings[0];
  }

  #note(reading) {
    const samples = reading.samples("vllm:num_requests_running");
    const models = new Set(["", ...samples.map((one) => one.labels.model_name)]);
    const older = [reading, this.#before(RATE_READINGS), this.#before(WINDOW_READINGS)];
    for (const model of models) {
      const own = older.map((one) => one.of(model || null));
      const point = { timeS: reading.timeS, values: CHARTS.map((spec) => spec.values(...own)) };
      const kept = this.history.get(model) ?? [];
      const oldestS = reading.timeS - SPAN_S;
      this.history.set(model, [...kept.filter((one) => one.timeS >= oldestS), point]);
    }
  }

  #draw() {
    const points = this.history.get(this.modelSelect.value) ?? [];
    const nowS = this.readings.at(-1)?.timeS ?? 0;
    this.charts.forEach((chart, i) => {
      chart.draw(points.map(({ timeS, values }) => ({ timeS, values: values[i] })), nowS);
    });
  }
}
