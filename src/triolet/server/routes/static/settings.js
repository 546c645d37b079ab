// The panel where it is changed what a lane asks with.

import { SCHEMA_LABEL, wrongJson } from "./options.js";
import { PARAMETERS } from "./parameters.js"; // made by the server from its table of sampling parameters
import { element, quiet } from "./view/dom.js";

const FORMATS = [["", "text"], ["json_object", "JSON"], ["json_schema", "JSON of a schema"]];
const FIELDS = [
  { name: "instructions", label: "System prompt", kind: "text" },
  ...PARAMETERS,
  { name: "format", label: "Form of the answer", kind: "choice", choices: FORMATS },
  { name: "schema", label: SCHEMA_LABEL, kind: "json", of: "object", isNeeded: true, isShown: (values) => values.format === "json_schema" },
  { name: "tools", label: "Tools, as JSON", kind: "json", of: "list" },
  { name: "probabilities", label: "Token probabilities", kind: "switch" },
];
const TYPES = { range: "range", number: "number", line: "text", switch: "checkbox" };

export class Settings {
  #lanes;
  #shown = 0;

  // `lanes` tells which lanes there are now; `changed` is called when one asks with something else.
  constructor(panel, lanes, changed) {
    this.panel = panel;
    this.changed = changed;
    this.#lanes = lanes;
  }

  show() {
    const lanes = this.#lanes();
    this.#shown = Math.min(this.#shown, lanes.length - 1);
    const { options } = lanes[this.#shown];
    const title = element("h2", { textContent: "Parameters" });
    const reset = quiet("The model's own", () => {
      options.values = {};
      options.drafts.clear();
      options.store();
      this.show();
    });
    const fields = FIELDS.map((field) => new Field(field, options, () => this.#review(fields, options)));
    this.#review(fields, options);
    this.panel.replaceChildren(title, ...this.#tabs(lanes), ...fields.map(({ root }) => root), reset);
  }

  // What one field says can hide another, and make it needed.
  #review(fields, options) {
    for (const field of fields) field.review();
    options.wrong = fields.filter(({ isWrong }) => isWrong).map(({ field }) => field.label);
    this.changed();
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
    const value = this.options.drafts.get(field.name) ?? this.options.values[field.name];
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

  review() {
    const { field, input } = this;
    this.root.hidden = field.isShown ? !field.isShown(this.options.values) : false;
    const isMissing = field.isNeeded && !input.value.trim();
    this.isWrong = !this.root.hidden && (isMissing || !this.#isValue());
    input.classList.toggle("wrong", this.isWrong);
    input.setAttribute("aria-invalid", this.isWrong);
    this.wrong.textContent = isMissing ? "It must be given." : this.#why();
  }

  #change() {
    const { field: { name }, input, options } = this;
    if (this.#isValue()) {
      const value = this.#value();
      if (value === undefined) delete options.values[name];
      else options.values[name] = value;
      options.drafts.delete(name);
      options.store();
      this.#showValue();
    } else if (input.value) options.drafts.set(name, input.value);
    this.onChange();
  }

  #isValue() {
    return this.input.validity.valid && !this.#why();
  }

  #why() {
    return this.field.kind === "json" ? wrongJson(this.input.value, this.field.of) : "";
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
