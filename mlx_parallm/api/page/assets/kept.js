// The open chat, kept for the time of its tab: it is there again when somebody comes back to the page.

const CHAT = "mlx-parallm-chat";

/** Keep a chat; null forgets it. */
export function keepChat(chat) {
  // Tokens with their alternatives are large, and a browser keeps a few megabytes.
  const isKept = store(chat) || store(chat && withoutTokens(chat));
  if (!isKept) store(null);
}

/** The chat that was kept, or null. */
export function keptChat() {
  try {
    return JSON.parse(sessionStorage.getItem(CHAT));
  } catch {
    // Storage is turned off.
    return null;
  }
}

function store(chat) {
  try {
    if (chat === null) sessionStorage.removeItem(CHAT);
    else sessionStorage.setItem(CHAT, JSON.stringify(chat));
    return true;
  } catch {
    return false;
  }
}

/** A chat whose answers have no tokens. */
export function withoutTokens(chat) {
  const panes = chat.panes.map((pane) => {
    const turns = pane.turns.map((turn) => (turn.tokens ? { ...turn, tokens: [] } : turn));
    return { ...pane, turns };
  });
  return { ...chat, panes };
}
