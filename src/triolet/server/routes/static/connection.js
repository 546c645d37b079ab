// One WebSocket for all lanes. It reconnects by itself; then the lanes resume their turns.

import { protocolsOf } from "./key.js";

const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const REFUSALS = [1003, 1007, 1008, 1009]; // the server takes no such message, and would not take it again

export class Connection extends EventTarget {
  #socket = null;
  #unsent = [];
  #retries = 0;
  #timer = 0;
  state = "connecting";

  constructor(url, key) {
    super();
    this.url = url;
    this.key = key;
  }

  open() {
    clearTimeout(this.#timer);
    const socket = (this.#socket = new WebSocket(this.url, protocolsOf(this.key)));
    socket.onopen = () => {
      this.#retries = 0;
      this.#setState("open");
      for (const message of this.#unsent.splice(0)) socket.send(message);
    };
    socket.onmessage = (message) => {
      this.dispatchEvent(new CustomEvent("event", { detail: JSON.parse(message.data) }));
    };
    socket.onclose = ({ code, reason }) => {
      if (REFUSALS.includes(code)) this.dispatchEvent(new CustomEvent("refused", { detail: reason || `close code ${code}` }));
      this.#reconnect();
    };
  }

  // What is said before the first connection waits for it. If that fails, or to a lost one, it is lost: lanes resume.
  send(event) {
    const message = JSON.stringify(event);
    if (this.state === "open") this.#socket.send(message);
    else if (this.state === "connecting") this.#unsent.push(message);
  }

  #reconnect() {
    this.#unsent = [];
    const wait = RETRY_MS[Math.min(this.#retries++, RETRY_MS.length - 1)];
    this.#setState("waiting");
    this.#timer = setTimeout(() => this.open(), wait * (0.75 + Math.random() / 2));
  }

  #setState(state) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
