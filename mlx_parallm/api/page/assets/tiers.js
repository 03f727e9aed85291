// The table of the places below the KV pool: a disk, and host memory.

import { el } from "./dom.js";
import { amount, bytes, percent, seconds } from "./format.js";
import { rate } from "./metrics.js";

const PREFIX = "mlx_parallm:kv_tier_";
const TITLES = { disk: "Disk", host: "Host memory" };
const COLUMNS = [
  ["Place", (tier) => TITLES[tier.name] ?? tier.name],
  ["Prompt tokens found", (tier) => `${amount(tier.hits)} (${percent(tier.share)})`],
  ["Used", (tier) => `${bytes(tier.used)} of ${bytes(tier.limit)}`],
  ["Read", (tier) => flow(tier.read, tier.readRate)],
  ["Written", (tier) => flow(tier.written, tier.writtenRate)],
  ["Blocks discarded", (tier) => amount(tier.discarded)],
  ["State", (tier) => (tier.isOff ? "off" : "on")],
];

function flow(total, perSecond) {
  return perSecond ? `${bytes(total)}, ${bytes(perSecond)}/s` : bytes(total);
}

/** Each place that the metrics name, of all engines and models together, and an older reading's rates. */
export function tiersOf(now, before) {
  const names = new Set(now.samples(`${PREFIX}limit_bytes`).map(({ labels }) => labels.tier));
  const queries = now.sum("vllm:prefix_cache_queries_total");
  return [...names].map((name) => {
    const isOwn = ({ tier }) => tier === name;
    const sum = (metric) => now.sum(PREFIX + metric, isOwn);
    // All engines and models report the one folder that they share; each has host memory of its own.
    const size = (metric) => (name === "disk" ? max(now, PREFIX + metric, isOwn) : sum(metric));
    const hits = sum("hit_tokens_total");
    return {
      name,
      hits,
      share: queries ? hits / queries : null,
      used: size("used_bytes"),
      limit: size("limit_bytes"),
      read: sum("read_bytes_total"),
      readRate: rate(before, now, `${PREFIX}read_bytes_total`, isOwn),
      written: sum("written_bytes_total"),
      writtenRate: rate(before, now, `${PREFIX}written_bytes_total`, isOwn),
      discarded: sum("discarded_blocks_total"),
      isOff: max(now, `${PREFIX}off`, isOwn) > 0,
    };
  });
}

function max(reading, name, filter) {
  return Math.max(0, ...reading.samples(name).filter(({ labels }) => filter(labels)).map(({ value }) => value));
}

/** How long prompts waited for KV, in a sentence. */
export function waitsText(now) {
  const reads = now.sum("mlx_parallm:kv_reads_total");
  if (!reads) return "No prompt has waited for KV.";
  const mean = now.sum("mlx_parallm:kv_read_wait_seconds_total") / reads;
  const late = now.sum("mlx_parallm:kv_late_reads_total");
  const givenUp = late ? ` ${amount(late)} took too long and were computed.` : "";
  const prompts = reads === 1 ? "1 prompt" : `${amount(reads)} prompts`;
  return `${prompts} waited for KV, ${seconds(mean)} on average.${givenUp}`;
}

/** Show a row for each place; the section is hidden without any. */
export function showTiers(section, now, before) {
  const tiers = tiersOf(now, before);
  section.hidden = !tiers.length;
  if (!tiers.length) return;
  const head = el("tr", {}, ...COLUMNS.map(([name]) => el("th", { scope: "col" }, name)));
  const rows = tiers.map((tier) =>
    el("tr", {}, ...COLUMNS.map(([name, value]) => el("td", { "data-name": name }, value(tier)))),
  );
  section.querySelector("table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
  section.querySelector("p").textContent = waitsText(now);
}
