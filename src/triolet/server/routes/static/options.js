// What an answer is asked with.

import { recall, remember } from "./view/dom.js";

const STORED = "triolet.options";
export const SCHEMA_LABEL = "JSON schema";
const NUM_TOP = 5; // tokens that are shown beside the one that was drawn
// Values that are the page's own, and what they become in a request of Responses.
const OWN = {
  format: (kind, { schema }) => {
    if (kind === "json_object") return { text: { format: { type: "json_object" } } };
    return schema ? { text: { format: { type: "json_schema", name: "answer", schema: JSON.parse(schema) } } } : {};
  },
  schema: () => ({}),
  tools: (text) => ({ tools: JSON.parse(text) }),
  probabilities: () => ({ top_logprobs: NUM_TOP, include: ["message.output_text.logprobs"] }),
};

export class Options {
  constructor(values = {}) {
    this.values = values; // only what was changed: the rest is the model's own wish
    this.model = null;
    this.longest = null; // tokens of the model's context
    this.drafts = new Map(); // texts of the panel that are no values, by the field's name
    this.wrong = []; // labels of their fields
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
    copy.longest = this.longest;
    copy.drafts = new Map(this.drafts);
    copy.wrong = this.wrong;
    return copy;
  }

  // Labels of the fields that have to be corrected before something is asked.
  get faults() {
    const lacksSchema = this.values.format === "json_schema" && !this.values.schema;
    return [...new Set(lacksSchema ? [...this.wrong, SCHEMA_LABEL] : this.wrong)];
  }

  get isJson() {
    return this.values.format === "json_object" || (this.values.format === "json_schema" && Boolean(this.values.schema));
  }

  fields() {
    const fields = {};
    for (const [name, value] of Object.entries(this.values)) Object.assign(fields, OWN[name]?.(value, this.values) ?? { [name]: value });
    return fields;
  }

  // For the head of a lane: names and short values.
  get summary() {
    const shown = Object.entries(this.values).filter(([name]) => !["instructions", "schema", "tools"].includes(name));
    return shown.map(([name, value]) => [name.replaceAll("_", " "), value === true ? "on" : value]);
  }
}

// What is wrong with a text that shall be JSON, or nothing.
export function wrongJson(text, kind) {
  if (!text.trim()) return "";
  try {
    const value = JSON.parse(text);
    if (kind === "list" && !(Array.isArray(value) && value.every((one) => one?.type === "function" && typeof one.name === "string"))) return 'It must be a list of {"type": "function", "name": …}.';
    if (kind === "object" && (value === null || typeof value !== "object" || Array.isArray(value))) return "It must be an object.";
    return "";
  } catch (error) {
    return `It must be JSON: ${error.message}.`;
  }
}
