// Samples as a WAV file: browsers record WebM or MP4, which the server does not read.

const HEADER_BYTES = 44;
const MOST = 32767;

/** Float samples of -1 to 1 as 16-bit integers. */
export function pcmOf(samples) {
  return Int16Array.from(samples, (sample) => Math.round(Math.max(-1, Math.min(1, sample)) * MOST));
}

/** A WAV file of one channel of 16 bits; its samples come in parts, at `rate` a second. */
export function wavOf(parts, rate) {
  const numSamples = parts.reduce((sum, part) => sum + part.length, 0);
  const bytes = new DataView(new ArrayBuffer(HEADER_BYTES + 2 * numSamples));
  const name = (at, text) => [...text].forEach((letter, i) => bytes.setUint8(at + i, letter.charCodeAt(0)));
  name(0, "RIFF");
  bytes.setUint32(4, bytes.byteLength - 8, true);
  name(8, "WAVEfmt ");
  bytes.setUint32(16, 16, true);
  bytes.setUint16(20, 1, true);
  bytes.setUint16(22, 1, true);
  bytes.setUint32(24, rate, true);
  bytes.setUint32(28, 2 * rate, true);
  bytes.setUint16(32, 2, true);
  bytes.setUint16(34, 16, true);
  name(36, "data");
  bytes.setUint32(40, 2 * numSamples, true);
  let at = HEADER_BYTES;
  for (const part of parts) {
    for (const sample of part) {
      bytes.setInt16(at, sample, true);
      at += 2;
    }
  }
  return bytes.buffer;
}

/** The mean of channels of the same length. */
export function monoOf(channels) {
  if (channels.length === 1) return channels[0];
  return channels[0].map((_, i) => channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length);
}
