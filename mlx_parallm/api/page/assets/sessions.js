// The table of training sessions, with a curve of the loss of each one's latest steps.

import { Chart } from "./chart.js";
import { el, setText } from "./dom.js";
import { amount, percent } from "./format.js";

const TIMEOUT_MS = 10_000;
const CURVE_STEPS = 300;
// Over how many seconds steps are counted.
const RATE_SPAN_S = 10;
const NAMES = ["Session", "Model", "Status", "Steps", "Steps/s", "Loss", "Prefix hits", "Latest losses"];

/** The loss of a step, or the mean of its losses at both signs; null before the first step. */
export function lossOf(step) {
  if (!step) return null;
  return step.loss ?? (step.loss_plus + step.loss_minus) / 2;
}

/** What is drawn of a step after another one: its loss, and the latest loss of validation data. */
export function pointOf(step, before) {
  return { timeS: step.step, values: [lossOf(step), step.validation_loss ?? before?.values[1] ?? null] };
}

/** The share of texts that the prefix cache had; null if none was looked up. */
export function hitsOf(session) {
  const { hits, lookups } = session.totals;
  return lookups > 0 ? hits / lookups : null;
}

/** Steps per second between the first and the last of `{timeS, step}`; null if that is not known. */
export function stepRate(counts) {
  const [first, last] = [counts[0], counts.at(-1)];
  return first && last.timeS > first.timeS ? (last.step - first.step) / (last.timeS - first.timeS) : null;
}

/** The counts of the last seconds and a new one; the old ones end where a session stands still. */
export function withCount(counts, count, isRunning) {
  if (!isRunning) return [];
  return [...counts.filter(({ timeS }) => timeS >= count.timeS - RATE_SPAN_S), count];
}

/** The steps that were made, and how many a run makes that is not complete. */
export function stepsText({ step, until }) {
  return until > step ? `${step.toLocaleString()} of ${until.toLocaleString()}` : step.toLocaleString();
}

function loss(value) {
  return value === null ? "–" : value.toPrecision(3);
}

function steps(count) {
  return count === 1 ? "1 step" : `${count} steps`;
}

/** One session's cells, which stay in place while their texts change. */
class SessionRow {
  constructor(session) {
    this.id = session.id;
    this.points = [];
    this.counts = [];
    this.chart = new Chart({
      title: `Loss of ${session.id}`,
      hint: "Loss of a step (with MeZO the mean of both signs), and of validation data",
      // Sessions with checkpoints take gradients, and those alone have validation data.
      lines: session.checkpoints ? ["loss", "validation"] : ["loss"],
      format: loss,
      spanS: CURVE_STEPS,
      when: {
        span: () => (this.points.length ? `last ${steps(this.points.length)}` : "no steps"),
        ago: (count) => `${steps(Math.round(count))} ago`,
      },
    });
    this.chart.draw(this.points, 0);
    this.status = el("span");
    this.reason = el("span", { class: "reason" });
    this.outputs = NAMES.slice(3, 7).map(() => el("span"));
    const contents = [
      [el("code", {}, session.id)],
      [el("code", {}, session.model)],
      [this.status, this.reason],
      ...this.outputs.map((output) => [output]),
      [this.chart.root],
    ];
    const cells = contents.map((content, i) => el("td", { "data-name": NAMES[i] }, ...content));
    this.root = el("tr", {}, ...cells);
  }

  /** Write what is known of the session at a time. */
  show(session, timeS) {
    const isRunning = session.status === "running";
    this.counts = withCount(this.counts, { timeS, step: session.step }, isRunning);
    setText(this.status, session.status);
    setText(this.reason, session.reason ?? "");
    const texts = [
      stepsText(session),
      amount(stepRate(this.counts)),
      loss(lossOf(session.last)),
      percent(hitsOf(session)),
    ];
    this.outputs.forEach((output, i) => setText(output, texts[i]));
  }

  /** Read the steps that are new since the last time, and draw the latest. */
  async follow(api, session) {
    // A server whose machine has crashed may have lost the last steps.
    const points = this.points.filter(({ timeS }) => timeS <= session.step);
    const known = points.at(-1)?.timeS ?? 0;
    if (session.step === known) return;
    const after = Math.max(known, session.step - CURVE_STEPS);
    for await (const step of api.steps(this.id, after, session.step, AbortSignal.timeout(TIMEOUT_MS))) {
      points.push(pointOf(step, points.at(-1)));
    }
    this.points = points.filter(({ timeS }) => timeS > session.step - CURVE_STEPS);
    this.chart.spanS = Math.max(1, this.points.length - 1);
    this.chart.draw(this.points, this.points.at(-1)?.timeS ?? 0);
  }
}

export class SessionTable {
  /** Shows the sessions in `section` if there are some. */
  constructor({ api, section }) {
    this.api = api;
    this.section = section;
    this.rows = new Map();
    const head = el("tr", {}, ...NAMES.map((name) => el("th", { scope: "col" }, name)));
    this.body = el("tbody");
    section.querySelector("table").replaceChildren(el("thead", {}, head), this.body);
  }

  /** Show sessions, and read the new steps of each. */
  async show(sessions) {
    this.#draw(sessions);
    for (const session of sessions) {
      try {
        await this.rows.get(session.id).follow(this.api, session);
      } catch {
        // It was deleted, or the server has gone: the next answer says so.
      }
    }
  }

  #draw(sessions) {
    const timeS = performance.now() / 1000;
    const before = this.rows;
    this.rows = new Map(sessions.map((one) => [one.id, before.get(one.id) ?? new SessionRow(one)]));
    for (const session of sessions) this.rows.get(session.id).show(session, timeS);
    const roots = [...this.rows.values()].map((row) => row.root);
    // Rows that are in place stay untouched, so that a pointed chart is not left.
    const isSame = roots.length === this.body.children.length && roots.every((root, i) => root === this.body.children[i]);
    if (!isSame) this.body.replaceChildren(...roots);
    this.section.hidden = !sessions.length;
  }
}
