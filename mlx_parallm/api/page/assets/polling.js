// Polls what a server may not have, or may not show to the page's key.

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 10_000;
// Answers of servers that show nothing: no such right, no such route, no data folder.
const NONE = [401, 403, 404, 409];

export class Polling {
  /**
   * `read(signal)` returns rows, `show(rows)` gets them, none at all from a server that has none;
   * `isSeen` says whether anybody looks.
   */
  constructor({ read, show, isSeen }) {
    this.read = read;
    this.show = show;
    this.isSeen = isSeen;
    this.hasNone = true;
  }

  /** Ask a server that had none once more: it is another one, or the key has changed. */
  askAgain() {
    this.hasNone = false;
  }

  /** Read for as long as somebody looks and the server has any. */
  async run() {
    for (;;) {
      if (!this.hasNone && this.isSeen()) await this.#ask();
      await new Promise((wake) => setTimeout(wake, INTERVAL_MS));
    }
  }

  async #ask() {
    let rows;
    try {
      rows = await this.read(AbortSignal.timeout(TIMEOUT_MS));
    } catch (error) {
      // The line at the top says if the server has gone.
      if (!NONE.includes(error.status)) return;
      this.hasNone = true;
      rows = [];
    }
    await this.show(rows);
  }
}
