// The panel where it is changed what a lane asks with.

import { wrongJson } from "./options.js";
import { PARAMETERS } from "./parameters.js"; // made by the server from its table of sampling parameters
import { element, quiet } from "./view/dom.js";

const FORMATS = [["", "text"], ["json_object", "JSON"], ["json_schema", "JSON of a schema"]];
const FIELDS = [
  { name: "instructions", label: "System prompt", kind: "text" },
  ...PARAMETERS,
  { name: "format", label: "Form of the answer", kind: "choice", choices: FORMATS },
  { name: "schema", label: "JSON schema", kind: "json", of: "object", isShown: (values) => values.format === "json_schema" },
  { name: "tools", label: "Tools, as JSON", kind: "json", of: "list" },
  { name: "probabilities", label: "Token probabilities", kind: "switch" },
];
const TYPES = { range: "range", number: "number", line: "text", switch: "checkbox" };

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
    const { options } = lanes[this.#shown];
    const title = element("h2", { textContent: "Parameters" });
    const reset = quiet("The model's own", () => {
      options.values = {};
      options.store();
      this.show();
    });
    const fields = FIELDS.map((field) => new Field(field, options, () => this.#showOrHide(fields)));
    this.#showOrHide(fields);
    this.panel.replaceChildren(title, ...this.#tabs(lanes), ...fields.map(({ root }) => root), reset);
  }

  #showOrHide(fields) {
    for (const { root, field, options } of fields) root.hidden = field.isShown ? !field.isShown(options.values) : false;
  }

  #tabs(lanes) {
    if (lanes.length < 2) return [];
    const tabs = element("div", { className: "tabs" });
    lanes.forEach((lane, index) => {
      const tab = quiet(`Lane ${lane.name.toUpperCase()}`, () => {
        this.#shown = index;
        this.show();
      });
      tab.setAttribute("aria-pressed", index === this.#shown);
      tabs.append(tab);
    });
    return [tabs];
  }
}

class Field {
  constructor(field, options, onChange) {
    Object.assign(this, { field, options, onChange });
    this.output = element("output");
    this.input = this.#input();
    this.wrong = element("small", { className: "why" });
    this.wrong.setAttribute("role", "status");
    const isWide = ["text", "json"].includes(field.kind);
    const head = element("span", {}, element("span", { textContent: field.label }), this.output);
    this.root = element("label", { className: `${isWide ? "wide " : ""}of-${field.kind}`, title: field.help ?? "" }, head, this.input, this.wrong);
    this.#showValue();
  }

  #input() {
    const { field } = this;
    const value = this.options.values[field.name];
    const isText = ["text", "json"].includes(field.kind);
    const input = element(isText ? "textarea" : field.kind === "choice" ? "select" : "input", { name: field.name });
    if (["text", "line"].includes(field.kind)) input.dir = "auto";
    if (isText) Object.assign(input, { rows: 3, spellcheck: field.kind === "text" });
    if (TYPES[field.kind]) input.type = TYPES[field.kind];
    for (const [name, text] of field.choices ?? []) input.append(element("option", { value: name, textContent: text }));
    for (const name of ["min", "max", "step"]) if (name in field) input[name] = field[name];
    if (field.kind === "switch") input.checked = value === true;
    else input.value = value ?? (field.kind === "range" ? field.default : "");
    input.oninput = () => this.#change();
    return input;
  }

  #change() {
    const { field, input, options } = this;
    const why = field.kind === "json" ? wrongJson(input.value, field.of) : "";
    const isRight = input.validity.valid && !why;
    input.classList.toggle("wrong", !isRight);
    input.setAttribute("aria-invalid", !isRight);
    this.wrong.textContent = why;
    if (!isRight) return;
    const value = this.#value();
    if (value === undefined) delete options.values[field.name];
    else options.values[field.name] = value;
    options.store();
    this.#showValue();
    this.onChange();
  }

  #value() {
    const { kind } = this.field;
    if (kind === "switch") return this.input.checked || undefined;
    if (!this.input.value.trim()) return undefined;
    return kind === "range" || kind === "number" ? Number(this.input.value) : this.input.value;
  }

  #showValue() {
    if (this.field.kind !== "range") return;
    this.output.textContent = this.options.values[this.field.name]?.toFixed(2) ?? "default";
  }
}
