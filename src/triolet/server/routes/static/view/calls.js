// Calls of tools: what the model wants to have done, and a place for what came of it.

import { codeBlock } from "../text/code.js";
import { element } from "./dom.js";

export class CallsView {
  #shown = "";
  #inputs = [];

  // `answer` takes the outputs.
  constructor(answer) {
    this.list = element("div");
    this.send = element("button", { type: "submit", className: "quiet", textContent: "Send results" });
    this.root = element("form", { className: "calls", hidden: true }, this.list, this.send);
    this.root.onsubmit = (event) => {
      event.preventDefault();
      const outputs = this.#calls.map((call, at) => ({ call_id: call.call_id, output: this.#inputs[at].value }));
      answer(outputs);
    };
  }
  #calls = [];

  // `isOpen`: results can be given.
  show(calls, isOpen) {
    this.root.hidden = !calls.length;
    const now = `${isOpen}${JSON.stringify(calls)}`;
    if (now === this.#shown) return;
    this.#shown = now;
    this.#calls = calls;
    this.#inputs = calls.map(({ name }) => {
      const input = element("textarea", { rows: 1, dir: "auto", placeholder: "Result" });
      input.setAttribute("aria-label", `Result of ${name}`);
      return input;
    });
    this.list.replaceChildren(...calls.flatMap(({ name, arguments: text }, at) => {
      const call = element("p", { className: "call" }, "calls ", element("code", { textContent: name }));
      return [call, codeBlock(pretty(text), "json", false), ...(isOpen ? [this.#inputs[at]] : [])];
    }));
    this.send.hidden = !isOpen;
  }
}

export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it still grows
  }
}
