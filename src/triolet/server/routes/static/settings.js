// What an answer is asked with, lane by lane, and the panel where it is changed.

import { PARAMETERS } from "./parameters.js"; // made by the server from its table of sampling parameters
import { element, recall, remember } from "./view/dom.js";

const FIELDS = [{ name: "instructions", label: "Instructions", kind: "text" }, ...PARAMETERS];
const STORED = "triolet.options";

export class Options {
  constructor(values = {}) {
    this.values = values; // only what was changed: the rest is the model's own wish
    this.model = null;
  }

  static stored() {
    return new Options(recall(STORED) ?? {});
  }

  store() {
    remember(STORED, this.values);
  }

  copy() {
    const copy = new Options({ ...this.values });
    copy.model = this.model;
    return copy;
  }

  fields() {
    return { ...this.values };
  }
}

export class Settings {
  #lanes;
  #shown = 0;

  // `lanes` tells which lanes there are now.
  constructor(panel, lanes) {
    this.panel = panel;
    this.#lanes = lanes;
  }

  show() {
    const lanes = this.#lanes();
    this.#shown = Math.min(this.#shown, lanes.length - 1);
    const options = lanes[this.#shown].options;
    const title = element("h2", { textContent: "Parameters" });
    const reset = element("button", { type: "button", className: "quiet", textContent: "The model's own" });
    reset.onclick = () => {
      options.values = {};
      options.store();
      this.show();
    };
    this.panel.replaceChildren(title, ...this.#tabs(lanes), ...FIELDS.map((field) => this.#field(field, options)), reset);
  }

  #tabs(lanes) {
    if (lanes.length < 2) return [];
    const tabs = element("div", { className: "tabs" });
    lanes.forEach((lane, index) => {
      const tab = element("button", { type: "button", className: "quiet", textContent: `Lane ${lane.name.toUpperCase()}` });
      tab.setAttribute("aria-pressed", index === this.#shown);
      tab.onclick = () => {
        this.#shown = index;
        this.show();
      };
      tabs.append(tab);
    });
    return [tabs];
  }

  #field(field, options) {
    const value = options.values[field.name];
    const output = element("output", { textContent: shown(field, value) });
    const input = element(field.kind === "text" ? "textarea" : "input", { name: field.name });
    if (field.kind === "text" || field.kind === "line") input.dir = "auto";
    if (field.kind === "text") input.rows = 3;
    else input.type = { range: "range", number: "number", line: "text" }[field.kind];
    for (const name of ["min", "max", "step"]) if (name in field) input[name] = field[name];
    input.value = value ?? (field.kind === "range" ? "1" : "");
    input.oninput = () => {
      const isRight = input.validity.valid;
      input.classList.toggle("wrong", !isRight);
      if (!isRight) return;
      if (input.value === "") delete options.values[field.name];
      else options.values[field.name] = field.kind === "text" || field.kind === "line" ? input.value : Number(input.value);
      output.textContent = shown(field, options.values[field.name]);
      options.store();
    };
    const label = element("label", { className: field.kind === "text" ? "wide" : "" });
    const head = element("span", {}, element("span", { textContent: field.label }), output);
    label.append(head, input);
    return label;
  }
}

function shown(field, value) {
  if (field.kind !== "range") return "";
  return value === undefined ? "default" : value.toFixed(2);
}
