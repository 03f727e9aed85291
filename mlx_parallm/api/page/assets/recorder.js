// The microphone, recorded as samples.

import { pcmOf, wavOf } from "./wav.js";

// RATE: samples a second that speech models hear; a browser that cannot resample keeps its own.
export const RATE = 16_000;
// QUIETEST_DB: the level that is shown as nothing.
const QUIETEST_DB = -60;

const PROBLEMS = {
  NotAllowedError: "The browser or somebody who uses it denied the microphone.",
  NotFoundError: "There is no microphone.",
  NotReadableError: "The microphone is used by another program, or broken.",
};

/** What to say of an error of `getUserMedia`. */
export function microphoneProblem(error) {
  return PROBLEMS[error.name] ?? `The microphone does not record: ${error.message}`;
}

/** How loud samples are, by their peak: 0 for silence to 1 for the loudest. */
export function levelOf(samples) {
  const peak = samples.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);
  return Math.max(0, 1 - (20 * Math.log10(peak)) / QUIETEST_DB);
}

/** A recording that runs. */
export class Recorder {
  #parts = [];
  #numSamples = 0;
  #stream;
  #context;

  /**
   * Ask for the microphone and record. `onPart(seconds, level)` is called for each part, `onLost`
   * if the device goes. Throws an Error whose message can be shown.
   */
  static async start({ onPart, onLost }) {
    // Browsers have the microphone only on secure pages.
    if (!navigator.mediaDevices) {
      throw new Error("Browsers give the microphone only to pages of https or of localhost.");
    }
    const recorder = new Recorder();
    try {
      recorder.#stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      await recorder.#record(onPart, onLost);
      return recorder;
    } catch (error) {
      recorder.discard();
      throw new Error(microphoneProblem(error), { cause: error });
    }
  }

  async #record(onPart, onLost) {
    const source = this.#open();
    await this.#context.audioWorklet.addModule(new URL("microphone_tap.js", import.meta.url));
    const options = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
    const tap = new AudioWorkletNode(this.#context, "microphone-tap", options);
    tap.port.onmessage = ({ data }) => {
      if (this.#stream === null) return;
      this.#parts.push(pcmOf(data));
      this.#numSamples += data.length;
      onPart(this.seconds, levelOf(data));
    };
    source.connect(tap);
    this.#stream.getAudioTracks()[0].addEventListener("ended", onLost);
    await this.#context.resume();
  }

  /** Open a context for the stream, at RATE where the browser can. */
  #open() {
    this.#context = new AudioContext({ sampleRate: RATE });
    try {
      return this.#context.createMediaStreamSource(this.#stream);
    } catch {
      // Firefox connects devices only at their own rate.
      this.#context.close();
      this.#context = new AudioContext();
      return this.#context.createMediaStreamSource(this.#stream);
    }
  }

  get seconds() {
    return this.#numSamples / this.#context.sampleRate;
  }

  /** End the recording; return it as a WAV file, or null if there is no sample. */
  finish() {
    this.discard();
    if (this.#numSamples === 0) return null;
    const wav = wavOf(this.#parts, this.#context.sampleRate);
    return new File([wav], "recording.wav", { type: "audio/wav" });
  }

  /** End the recording; the device is free again. */
  discard() {
    this.#stream?.getTracks().forEach((track) => track.stop());
    this.#stream = null;
    if (this.#context && this.#context.state !== "closed") this.#context.close();
  }
}
