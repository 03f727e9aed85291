// The dialog with the chats that this browser keeps: open, rename, delete.

import { deleteChat, listChats, renameChat } from "./chats.js";
import { el, part } from "./dom.js";

const TIME = { dateStyle: "short", timeStyle: "short" };

export class ChatList {
  /** `onOpen` gets the chat that is chosen, `onNew` begins one, `onDelete` gets an id. */
  constructor({ dialog, onOpen, onNew, onDelete }) {
    this.dialog = dialog;
    this.onOpen = onOpen;
    this.onDelete = onDelete;
    this.list = part(dialog, "list");
    part(dialog, "close").addEventListener("click", () => dialog.close());
    part(dialog, "new").addEventListener("click", () => {
      dialog.close();
      onNew();
    });
  }

  show() {
    this.#draw();
    this.dialog.showModal();
  }

  #draw() {
    const chats = listChats();
    part(this.dialog, "none").hidden = chats.length > 0;
    this.list.replaceChildren(...chats.map((chat) => this.#row(chat)));
  }

  #row(chat) {
    const onclick = () => {
      this.dialog.close();
      this.onOpen(chat);
    };
    const name = el("button", { type: "button", class: "chat-name", onclick }, chat.name);
    const time = el("time", {}, new Date(chat.savedMs).toLocaleString([], TIME));
    const row = el("li", {}, name, time);
    const button = (text, act) =>
      el("button", { type: "button", class: "quiet", "aria-label": `${text} ${chat.name}`, onclick: act }, text);
    row.append(
      button("Rename", () => this.#rename(chat, name)),
      button("Delete", () => {
        deleteChat(chat.id);
        this.onDelete(chat.id);
        this.#draw();
      }),
    );
    return row;
  }

  /** Let the name be typed in its place: Enter and leaving it keep it, Escape does not. */
  #rename(chat, name) {
    const field = el("input", { value: chat.name, "aria-label": `Name of ${chat.name}` });
    let isOver = false;
    const end = (isKept) => {
      if (isOver) return;
      isOver = true;
      if (isKept) renameChat(chat.id, field.value);
      this.#draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      // Escape would close the dialog.
      event.preventDefault();
      end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
    name.replaceWith(field);
    field.select();
  }
}
