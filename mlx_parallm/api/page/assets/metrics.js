// Prometheus' text format (exposition format 0.0.4), and what can be said of two readings of it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** The samples of a text by their name: `Map(name, [{labels, value}])`. */
export function parseMetrics(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const [, name, labelText = "", value] = found;
    const labels = {};
    for (const [, key, quoted] of labelText.matchAll(LABEL)) labels[key] = unescape(quoted);
    if (!families.has(name)) families.set(name, []);
    families.get(name).push({ labels, value: number(value) });
  }
  return families;
}

function unescape(text) {
  return text.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
}

function number(text) {
  if (text === "+Inf") return Infinity;
  return text === "-Inf" ? -Infinity : Number(text);
}

/** One reading of the metrics, of one model or, with model null, of all. */
export class Reading {
  constructor(families, timeS, model = null) {
    this.families = families;
    this.timeS = timeS;
    this.model = model;
  }

  /** The same reading, of one model or all. */
  of(model) {
    return new Reading(this.families, this.timeS, model);
  }

  /** Values and labels of a name. */
  samples(name) {
    const all = this.families.get(name) ?? [];
    return this.model === null ? all : all.filter((one) => one.labels.model_name === this.model);
  }

  /** The sum of the samples whose labels the filter takes. */
  sum(name, filter = () => true) {
    return this.samples(name).reduce((sum, one) => sum + (filter(one.labels) ? one.value : 0), 0);
  }

  max(name) {
    return Math.max(0, ...this.samples(name).map((one) => one.value));
  }

  /** Cumulative counts of a histogram: `[[upper bound, count]]`, bounds ascending. */
  buckets(name) {
    const counts = new Map();
    for (const { labels, value } of this.samples(`${name}_bucket`)) {
      const bound = number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([a], [b]) => a - b);
  }
}

/** How much a counter grew per second; null over a restart or no time. */
export function rate(before, now, name, filter) {
  const grown = now.sum(name, filter) - before.sum(name, filter);
  const seconds = now.timeS - before.timeS;
  return grown >= 0 && seconds > 0 ? grown / seconds : null;
}

/** The ratio of what two counters grew by; null where the lower one did not grow. */
export function ratio(before, now, upper, lower) {
  const whole = now.sum(lower) - before.sum(lower);
  return whole > 0 ? (now.sum(upper) - before.sum(upper)) / whole : null;
}

/**
 * A quantile of what a histogram took in between two readings, or null if that is nothing.
 * It is linear within a bucket; above the last finite bound it is that bound.
 */
export function quantile(before, now, name, q) {
  const old = new Map(before.buckets(name));
  const grown = now.buckets(name).map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const total = grown.at(-1)?.[1] ?? 0;
  if (!(total > 0) || grown.some(([, count]) => count < 0)) return null;
  let [lowBound, lowCount] = [0, 0];
  for (const [bound, count] of grown) {
    if (count >= q * total && count > lowCount) {
      if (bound === Infinity) return lowBound;
      return lowBound + ((bound - lowBound) * (q * total - lowCount)) / (count - lowCount);
    }
    [lowBound, lowCount] = [bound, count];
  }
  return lowBound;
}
