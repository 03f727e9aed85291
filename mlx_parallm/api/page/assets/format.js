// Numbers as people read them.

export function seconds(value) {
  if (value === null) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

/** A place in a recording: minutes and seconds, and hours if there are any. */
export function clock(value) {
  const [hours, minutes, rest] = [value / 3600, (value / 60) % 60, value % 60].map(Math.floor);
  const two = (number) => String(number).padStart(2, "0");
  return hours > 0 ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function amount(value) {
  if (value === null) return "–";
  if (value >= 9_999_500) return `${(value / 1e6).toFixed(0)}M`;
  if (value >= 999_500) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 99_950) return `${(value / 1e3).toFixed(0)}k`;
  if (value >= 9_995) return `${(value / 1e3).toFixed(1)}k`;
  if (value >= 99.5 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(1);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const size = value / 1024 ** power;
  return `${size.toFixed(size < 10 && power ? 1 : 0)} ${units[power]}`;
}

export function percent(value) {
  if (value === null) return "–";
  const share = value * 100;
  if (share > 0 && share < 0.05) return "<0.1 %";
  return `${share > 0 && share < 9.95 ? share.toFixed(1) : share.toFixed(0)} %`;
}

/** The tokens and times of an answer in one line. */
export function statsLine(stats) {
  const parts = [];
  if (stats.firstS !== null) parts.push(`first token ${seconds(stats.firstS)}`);
  if (stats.tokensPerS !== null) parts.push(`${amount(stats.tokensPerS)} tokens/s`);
  if (stats.totalS !== null) parts.push(`${seconds(stats.totalS)} total`);
  if (stats.tokens !== null) parts.push(`${stats.tokens} tokens`);
  if (stats.promptTokens !== null) {
    const cached = stats.cachedTokens ? `, ${stats.cachedTokens} cached` : "";
    parts.push(`prompt ${stats.promptTokens}${cached}`);
  }
  if (stats.heardS !== null) parts.push(heardText(stats));
  return parts.join(" · ");
}

/** How long a recording is, and how many seconds of it were heard in one. */
function heardText({ heardS, totalS }) {
  const speed = totalS > 0 ? `, ${amount(heardS / totalS)} × real time` : "";
  return `${seconds(heardS)} heard${speed}`;
}
