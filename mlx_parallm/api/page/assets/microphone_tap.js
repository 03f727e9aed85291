// An audio worklet that hands the samples of its input to the page, in parts.

// PART_SAMPLES: the samples of the last part, which may be incomplete, are lost: at most 32 ms.
const PART_SAMPLES = 512;

class MicrophoneTap extends AudioWorkletProcessor {
  constructor() {
    super();
    this.part = new Float32Array(PART_SAMPLES);
    this.numHeld = 0;
  }

  /** Called by the browser with the inputs' channels; there is one, or none before the first sound. */
  process([[samples]]) {
    for (const sample of samples ?? []) {
      this.part[this.numHeld++] = sample;
      if (this.numHeld < PART_SAMPLES) continue;
      this.port.postMessage(this.part.slice());
      this.numHeld = 0;
    }
    return true;
  }
}

registerProcessor("microphone-tap", MicrophoneTap);
