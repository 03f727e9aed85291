// Server-sent events (WHATWG HTML, section 9.2) read from a fetch, which EventSource cannot POST.

/** The `data` of every event of a stream of bytes. */
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let held = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      held += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A CR at the end may be the first half of CR LF.
      const whole = done || !held.endsWith("\r") ? held : held.slice(0, -1);
      const lines = whole.split(/\r\n|\r|\n/);
      held = lines.pop() + held.slice(whole.length);
      for (const line of lines) {
        if (line === "") {
          if (data.length > 0) yield data.join("\n");
          data = [];
        } else if (line === "data" || line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
