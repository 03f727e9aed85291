// The chats that this browser keeps: a bounded list in its storage, the latest first.

import { partsOf } from "./images.js";
import { withoutTokens } from "./kept.js";

const CHATS = "mlx-parallm-chats";
const MAX_CHATS = 100;
// MAX_CHARS: of all chats as JSON. Browsers keep some five million characters of a server's pages.
const MAX_CHARS = 4_000_000;
const NAME_CHARS = 60;

/** The chats `{id, name, savedMs, chat}`, the latest first. */
export function listChats() {
  try {
    return JSON.parse(localStorage.getItem(CHATS)) ?? [];
  } catch {
    // Storage is turned off, or holds what no version of this page wrote.
    return [];
  }
}

/** Keep a chat under an id as the latest one; its name stays if it has one. */
export function putChat(id, chat, nowMs) {
  const chats = listChats();
  const name = chats.find((one) => one.id === id)?.name ?? nameOf(chat);
  // Tokens with their alternatives are large.
  const kept = { id, name, savedMs: nowMs, chat: withoutTokens(chat) };
  write([kept, ...without(chats, id)]);
}

/** Give a chat another name; an empty one leaves it as it was. */
export function renameChat(id, name) {
  const text = name.trim().slice(0, NAME_CHARS);
  if (text) write(listChats().map((one) => (one.id === id ? { ...one, name: text } : one)));
}

export function deleteChat(id) {
  write(without(listChats(), id));
}

/** The first words that were said in a chat, or the name of its first recording. */
export function nameOf(chat) {
  const said = chat.panes.flatMap(({ turns }) => turns).filter((turn) => turn.role === "user");
  const texts = said.map(({ content }) => partsOf(content).text.trim().replace(/\s+/g, " "));
  const clips = said.map(({ clip }) => clip?.name);
  return [...texts, ...clips].find(Boolean)?.slice(0, NAME_CHARS) ?? "Images";
}

function without(chats, id) {
  return chats.filter((one) => one.id !== id);
}

/** Write the chats; the oldest go where there is no room. */
function write(chats) {
  let kept = chats.slice(0, MAX_CHATS);
  while (!store(kept) && kept.length > 0) kept = kept.slice(0, -1);
}

function store(chats) {
  const text = JSON.stringify(chats);
  if (text.length > MAX_CHARS) return false;
  try {
    if (chats.length > 0) localStorage.setItem(CHATS, text);
    else localStorage.removeItem(CHATS);
    return true;
  } catch {
    return false;
  }
}
