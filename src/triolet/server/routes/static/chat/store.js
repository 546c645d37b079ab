// Chats that the browser keeps, in IndexedDB. Where it keeps nothing they last as long as the page.

import { recall, remember } from "../view/dom.js";
import { Chat } from "./chat.js";

const NAME = "triolet";
const LEFT = "triolet.left";
const FORMAT = "triolet-chats";

export class Store extends EventTarget {
  #chats = new Map();
  #deleted = new Set(); // keys: an answer that still ends must not bring its chat back
  #database = null;
  #unwritten = new Set(); // chats on their way into the database

  async open() {
    try {
      this.#database = await openDatabase();
      await this.load();
      this.#takeLeft();
    } catch {
      this.#database = null; // a private window, perhaps
    }
  }

  // Other tabs write, too. A chat that is known here stays the one that it is, and gets what they have added.
  async load() {
    if (!this.#database) return;
    const records = await done(this.#database.transaction("chats").objectStore("chats").getAll());
    const kept = new Set(records.map(({ key }) => key));
    for (const key of this.#chats.keys()) if (!kept.has(key)) this.#chats.delete(key);
    for (const record of records) {
      const known = this.#chats.get(record.key);
      try {
        if (known) known.merge(record);
        else this.#chats.set(record.key, Chat.of(record));
      } catch {
        // of another version
      }
    }
    this.#tell();
  }

  // The latest first; those that hold every word of `text`.
  find(text = "") {
    const words = text.toLocaleLowerCase().split(/\s+/).filter(Boolean);
    return [...this.#chats.values()].filter((chat) => chat.holds(words)).sort((one, other) => other.changed - one.changed);
  }

  get(key) {
    return this.#chats.get(key);
  }

  put(chat) {
    if (!chat.turns.length || this.#deleted.has(chat.key)) return;
    this.#chats.set(chat.key, chat);
    // Read and written in one transaction: another tab may have written this chat since it was read.
    this.#write((chats) => {
      this.#unwritten.add(chat);
      const end = () => this.#unwritten.delete(chat);
      Object.assign(chats.transaction, { oncomplete: end, onabort: end });
      const before = chats.get(chat.key);
      before.onsuccess = () => {
        try {
          if (before.result) chat.merge(before.result);
        } catch {
          // of another version
        }
        chats.put(chat.record());
        chat.keptName = chat.name;
      };
    });
    this.#tell();
  }

  // The page is being left: a database would be too slow.
  leave(chats) {
    const left = [...new Set([...chats, ...this.#unwritten])].filter((chat) => chat.turns.length && !this.#deleted.has(chat.key));
    // Beside what other tabs have left.
    if (left.length) remember(LEFT, [...(recall(LEFT) ?? []), ...left.map((chat) => chat.record())]);
  }

  #takeLeft() {
    for (const record of recall(LEFT) ?? []) {
      try {
        this.put(Chat.of(record));
      } catch {
        // of another version
      }
    }
    remember(LEFT, []);
  }

  delete(chat) {
    this.#chats.delete(chat.key);
    this.#deleted.add(chat.key);
    this.#write((chats) => chats.delete(chat.key));
    this.#tell();
  }

  // All chats, or these, as the text of a file.
  export(chats = this.find()) {
    return JSON.stringify({ format: FORMAT, version: 1, chats: chats.map((chat) => chat.record()) }, null, 1);
  }

  // Take the chats of such a file, all or none; return how many. One that is here already comes in beside it.
  import(text) {
    let file;
    try {
      file = JSON.parse(text);
    } catch {
      throw new Error("the file must be JSON");
    }
    if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.chats)) throw new Error(`the file must have format "${FORMAT}", version 1 and chats`);
    const chats = file.chats.map(Chat.of);
    for (const chat of chats) {
      if (this.#chats.has(chat.key) || this.#deleted.has(chat.key)) chat.key = new Chat().key;
      this.put(chat);
    }
    return chats.length;
  }

  #write(act) {
    if (!this.#database) return;
    try {
      act(this.#database.transaction("chats", "readwrite").objectStore("chats"));
    } catch {
      this.#database = null; // it was closed, or is full
    }
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}

function openDatabase() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "key" });
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
