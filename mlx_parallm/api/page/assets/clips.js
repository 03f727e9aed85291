// The recording that goes with the next message: a file that is chosen, dropped or pasted, or the
// microphone.

import { el, part, setText } from "./dom.js";
import { clock } from "./format.js";
import { RATE, Recorder } from "./recorder.js";
import { monoOf, pcmOf, wavOf } from "./wav.js";

// READ: types that the server reads; the page makes WAV files of others that the browser can play.
const READ = ["audio/wav", "audio/x-wav", "audio/vnd.wave", "audio/mpeg", "audio/flac", "audio/x-flac"];
// VIDEO: containers in which there may be sound alone.
const VIDEO = ["video/mp4", "video/webm", "video/ogg"];

/** Whether a file can be a recording. */
export function isAudio({ type }) {
  return type.startsWith("audio/") || VIDEO.includes(type);
}

/** A recording of a message. Only its name and length are kept: storage has a few megabytes. */
export class Clip {
  constructor({ name, file, seconds = null }) {
    this.name = name;
    this.file = file;
    this.seconds = seconds;
  }

  toJSON() {
    return { name: this.name, seconds: this.seconds };
  }
}

/** How a recording looks: a player, or the name of one that was not kept. */
export function clipView(clip) {
  const { name, seconds, file } = clip;
  if (!file) return el("p", { class: "clip-name" }, `${name}${seconds === null ? "" : `, ${clock(seconds)}`}`);
  const player = el("audio", { controls: true, preload: "metadata", src: URL.createObjectURL(file) });
  player.ariaLabel = name;
  player.addEventListener("loadedmetadata", () => {
    if (Number.isFinite(player.duration)) clip.seconds = player.duration;
  });
  return el("figure", { class: "clip" }, player, el("figcaption", {}, name));
}

/** Free what the players below an element hold. */
export function releaseClips(root) {
  for (const player of root.querySelectorAll("audio")) {
    const { src } = player;
    // A player that still loads would miss the file.
    player.removeAttribute("src");
    player.load();
    URL.revokeObjectURL(src);
  }
}

/**
 * The recording that waits beside the field. `onProblem` is told what went wrong, `onAdd` says
 * whether recordings are taken, and `onChange` is called when there is one, or none any more.
 */
export class Clips {
  constructor({ root, onProblem, onAdd, onChange }) {
    this.clip = null;
    this.recorder = null;
    this.onProblem = onProblem;
    this.onAdd = onAdd;
    this.onChange = onChange;
    this.place = part(root, "clip");
    this.line = part(root, "recording");
    this.recordButton = part(root, "record");
    this.input = el("input", { type: "file", accept: ["audio/*", ...VIDEO].join(","), hidden: true });
    this.input.ariaLabel = "Audio file";
    this.input.dataset.part = "audio-file";
    this.input.addEventListener("change", () => {
      this.add([...this.input.files]);
      this.input.value = "";
    });
    part(root, "composer").append(this.input);
    part(root, "add-audio").addEventListener("click", () => this.input.click());
    this.recordButton.addEventListener("click", () => this.#record());
    this.finishButton = part(root, "finish");
    this.finishButton.addEventListener("click", () => this.finish());
    part(root, "discard").addEventListener("click", () => this.set(null));
  }

  get isRecording() {
    return this.recorder !== null;
  }

  /** Take the first of some files. */
  async add([file]) {
    if (!isAudio(file)) return this.onProblem(`${file.name} is not an audio file.`);
    this.onProblem("");
    if (!this.onAdd()) return undefined;
    try {
      this.set(new Clip({ name: file.name, file: READ.includes(file.type) ? file : await converted(file) }));
    } catch {
      this.onProblem(`This browser cannot play ${file.name}; convert it to WAV, FLAC or MP3.`);
    }
    return undefined;
  }

  /** Let a recording wait, or none; what is being recorded is forgotten. */
  set(clip) {
    this.#endRecording();
    releaseClips(this.place);
    this.clip = clip;
    this.place.hidden = clip === null;
    this.place.replaceChildren(...(clip ? [clipView(clip), this.#removeButton()] : []));
    this.onChange();
  }

  /** End what is being recorded, and let it wait to be sent. */
  finish() {
    const { recorder } = this;
    const file = recorder.finish();
    this.set(file && new Clip({ name: file.name, file, seconds: recorder.seconds }));
    if (!file) this.onProblem("The microphone gave no sound.");
  }

  #removeButton() {
    const onclick = () => this.set(null);
    const label = "Remove audio";
    return el("button", { type: "button", class: "remove", "aria-label": label, title: label, onclick }, "×");
  }

  async #record() {
    if (!this.onAdd()) return;
    this.set(null);
    this.onProblem("");
    // Somebody is asked for the microphone, which can take any time.
    this.recordButton.disabled = true;
    try {
      this.recorder = await Recorder.start({
        onPart: (seconds, level) => this.#showPart(seconds, level),
        onLost: () => this.isRecording && this.finish(),
      });
      this.#showPart(0, 0);
      this.line.hidden = false;
    } catch (error) {
      this.recordButton.disabled = false;
      this.onProblem(error.message);
    }
    this.onChange();
  }

  #showPart(seconds, level) {
    setText(part(this.line, "time"), clock(seconds));
    part(this.line, "level").value = level;
  }

  #endRecording() {
    this.recorder?.discard();
    this.line.hidden = true;
    if (this.isRecording) this.recordButton.disabled = false;
    this.recorder = null;
  }
}

/** A file of any format that the browser can play as a WAV file. */
async function converted(file) {
  // What is decoded has the rate of the context, whose own length is of no use.
  const context = new OfflineAudioContext(1, 1, RATE);
  const sound = await context.decodeAudioData(await file.arrayBuffer());
  const channels = Array.from({ length: sound.numberOfChannels }, (_, i) => sound.getChannelData(i));
  const name = `${file.name.replace(/\.\w+$/, "")}.wav`;
  return new File([wavOf([pcmOf(monoOf(channels))], RATE)], name, { type: "audio/wav" });
}
