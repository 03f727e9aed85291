// A line chart over the last minutes, or over the last of anything that is counted, in SVG. Its
// size is fixed by the style sheet, so that new values move nothing else.

import { el, setText, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 100;

const MINUTES = {
  span: (spanS) => `last ${Math.round(spanS / 60)} min`,
  ago: (agoS) => `${Math.round(agoS)} s ago`,
};

const TOPS = [1, 1.5, 2, 3, 4, 6, 8, 10];

/** A round number at or over a value, for the top of an axis. */
export function niceMax(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return TOPS.map((step) => step * power).find((top) => top >= value * 0.9999);
}

/** The runs of a line's points that have a value, as lists of `[x, y]` in the drawing. */
export function runsOf(points, index, fromS, toS, max, min = 0) {
  const runs = [[]];
  for (const { timeS, values } of points) {
    const value = values[index];
    if (value === null) {
      runs.push([]);
      continue;
    }
    const x = ((timeS - fromS) / (toS - fromS)) * WIDTH;
    const y = ((max - Math.min(value, max)) / (max - min)) * HEIGHT;
    runs.at(-1).push([x.toFixed(1), y.toFixed(1)]);
  }
  return runs.filter((run) => run.length > 0);
}

function lineOf(run) {
  // The short step makes a single point visible.
  return `M${run.map(([x, y]) => `${x} ${y}`).join("L")}h0.01`;
}

function areaOf(run) {
  return `${lineOf(run)}V${HEIGHT}H${run[0][0]}Z`;
}

export class Chart {
  /**
   * `lines` are the names of its lines, `format` writes a value, `max` is the top of the axis or
   * null for one that follows the values, `spanS` how many seconds are shown, `when` writes which
   * part that is, and how long ago the pointed values were.
   */
  constructor({ title, hint, lines, format, max = null, spanS, when = MINUTES }) {
    this.title = title;
    this.format = format;
    this.writeWhen = when;
    this.max = max;
    this.spanS = spanS;
    this.points = [];
    this.pointed = null;
    this.#build(hint, lines);
  }

  #build(hint, lines) {
    this.paths = lines.map((_, i) => svg("path", { class: `line line-${i}` }));
    this.area = svg("path", { class: "area" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0, 0.5, 1].map((share) =>
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share }),
    );
    this.plot = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...grid,
      this.area,
      ...this.paths,
      this.cursor,
    );
    this.top = el("span", { class: "axis axis-top" });
    this.when = el("span", { class: "axis axis-when" });
    this.outputs = lines.map(() => el("span", { class: "value" }, "–"));
    const legend = lines.map((name, i) =>
      el("span", { class: `key key-${i}` }, el("span", { class: "name" }, name), this.outputs[i]),
    );
    this.root = el(
      "figure",
      { class: "chart" },
      el("figcaption", { title: hint }, this.title),
      el("div", { class: "legend" }, ...legend),
      el("div", { class: "plot" }, this.plot, this.top, this.when),
    );
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#point(null));
  }

  /**
   * Show points `{timeS, values}`, oldest first, up to now. Where something else than seconds is
   * counted, `timeS`, `spanS` and `nowS` are in its unit.
   */
  draw(points, nowS) {
    this.points = points;
    this.nowS = nowS;
    const values = points.flatMap((point) => point.values).filter((value) => value !== null);
    const max = this.max ?? niceMax(Math.max(0, ...values));
    const least = Math.min(0, ...values);
    const min = least < 0 ? -niceMax(-least) : 0;
    const fromS = nowS - this.spanS;
    const lines = this.paths.map((_, i) => runsOf(points, i, fromS, nowS, max, min));
    this.paths.forEach((path, i) => path.setAttribute("d", lines[i].map(lineOf).join("")));
    this.area.setAttribute("d", lines[0].map(areaOf).join(""));
    setText(this.top, this.format(max));
    this.#legend();
  }

  #point(event) {
    const { left, width } = this.plot.getBoundingClientRect();
    this.pointed = event ? (event.clientX - left) / width : null;
    this.#legend();
  }

  /** The values now, or where the pointer is. */
  #legend() {
    const shown = this.pointed === null ? this.points.at(-1) : this.#nearest();
    this.outputs.forEach((output, i) => setText(output, this.format(shown?.values[i] ?? null)));
    const texts = this.outputs.map((output) => output.parentElement.firstChild.textContent);
    const now = texts.map((name, i) => `${name} ${this.outputs[i].textContent}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: ${now}`);
    const isPointed = this.pointed !== null && shown !== undefined;
    this.cursor.setAttribute("visibility", isPointed ? "visible" : "hidden");
    const ago = isPointed ? this.nowS - shown.timeS : this.spanS;
    if (isPointed) {
      const x = WIDTH * (1 - ago / this.spanS);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
    }
    setText(this.when, isPointed ? this.writeWhen.ago(ago) : this.writeWhen.span(ago));
  }

  #nearest() {
    const timeS = this.nowS - (1 - this.pointed) * this.spanS;
    const distance = (point) => Math.abs(point.timeS - timeS);
    return this.points.reduce(
      (best, point) => (!best || distance(point) < distance(best) ? point : best),
      undefined,
    );
  }
}
