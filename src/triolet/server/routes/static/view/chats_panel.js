// The panel of chats that the browser keeps: search, open, rename, delete, and the way out and in as a file.

import { download, element, find, quiet } from "./dom.js";

const LARGEST = 64 * 2 ** 20; // bytes of a file to import
const MOST = 200; // chats in the list; more are found by searching

export class ChatsPanel {
  #renamed = null; // key of the chat that is being renamed

  // `acts`: open(chat), deleted(chat), current().
  constructor(panel, store, acts) {
    this.panel = panel;
    this.store = store;
    this.acts = acts;
    this.search = find("search");
    this.list = find("chat-list");
    this.note = find("chats-note");
    this.file = find("import-file");
    this.search.oninput = () => this.show();
    find("export").onclick = () => download("triolet-chats.json", store.export());
    find("import").onclick = () => this.file.click();
    this.file.onchange = () => this.#import();
    store.addEventListener("change", () => this.show());
  }

  show() {
    if (this.panel.hidden || this.#renamed) return;
    const found = this.store.find(this.search.value);
    const wasAt = [...this.list.querySelectorAll("button")].indexOf(document.activeElement);
    this.list.replaceChildren(...found.slice(0, MOST).map((chat) => this.#row(chat)));
    if (wasAt >= 0) this.list.querySelectorAll("button")[wasAt]?.focus();
    const empty = this.search.value ? "No chat has these words." : "Chats are kept in this browser, and nowhere else.";
    this.#say(found.length ? (found.length > MOST ? `${MOST} of ${found.length} chats` : "") : empty);
    find("export").disabled = !this.store.find().length;
  }

  #row(chat) {
    const open = element("button", { type: "button", className: "chat", onclick: () => this.acts.open(chat) });
    open.append(element("bdi", { textContent: chat.title }), element("small", { textContent: new Date(chat.changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) }));
    if (chat === this.acts.current()) open.setAttribute("aria-current", "true");
    const row = element("li", {}, open);
    const rename = quiet("rename", () => this.#rename(chat, row), `Rename ${chat.title}`);
    const remove = quiet("delete", () => this.#delete(chat, remove), `Delete ${chat.title}`);
    remove.onblur = () => {
      remove.textContent = "delete";
      remove.setAttribute("aria-label", `Delete ${chat.title}`);
    };
    row.append(element("span", { className: "acts" }, rename, remove));
    return row;
  }

  // The first click asks.
  #delete(chat, button) {
    if (button.textContent === "delete") {
      button.textContent = "really delete";
      button.setAttribute("aria-label", `Really delete ${chat.title}`);
      return;
    }
    this.store.delete(chat);
    this.acts.deleted(chat);
  }

  #rename(chat, row) {
    const input = element("input", { value: chat.title, maxLength: 200, dir: "auto" });
    input.setAttribute("aria-label", "Name of the chat");
    this.#renamed = chat.key;
    const end = (isKept) => {
      if (this.#renamed !== chat.key) return;
      this.#renamed = null;
      const name = input.value.trim();
      if (isKept && name !== chat.title) {
        chat.name = name;
        this.store.put(chat);
      }
      this.show();
    };
    input.onblur = () => end(true);
    input.onkeydown = (event) => {
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
    };
    row.replaceChildren(input);
    input.select();
  }

  async #import() {
    const [file] = this.file.files;
    this.file.value = "";
    if (!file) return;
    try {
      if (file.size > LARGEST) throw new Error(`the file must have at most ${LARGEST} bytes; got ${file.size}`);
      const count = this.store.import(await file.text());
      this.#say(`${count} chat${count === 1 ? "" : "s"} imported.`);
    } catch (error) {
      this.#say(`Not imported: ${error.message}`);
    }
  }

  #say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }
}
