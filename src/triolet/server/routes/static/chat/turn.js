// A question and its growing answer.

export const STATES = ["active", "done", "stopped", "cut", "failed"];

export class Turn {
  key = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`; // its name in the chat; pages without TLS have no UUIDs
  text = "";
  thought = "";
  calls = []; // of tools: {call_id, name, arguments}
  tokens = []; // with their probabilities, if they were asked for
  isJson = false; // structured output was asked for
  model = null;
  state = "active";
  message = "";
  isFull = false; // the context has no room
  id = null; // of the response
  last = -1; // the latest sequence number
  began = performance.now();
  first = null;
  ended = null;
  usage = null;
  isUnwanted = false;
  waits = {}; // the latest vendor event of each type

  // `outputs` are results of tools, {call_id, output}, which stand in place of a question.
  constructor(asked, parent = null, outputs = []) {
    this.asked = asked;
    this.parent = parent; // the turn before this one
    this.outputs = outputs;
  }

  // What the answer waits for; empty once it streams.
  get waiting() {
    if (this.state !== "active") return "";
    if (this.waits["triolet:restart"]?.restarting.length) return "engine restarting";
    if (this.first !== null) return "";
    const { "triolet:queue": queue, "triolet:prefill": prefill } = this.waits;
    if (prefill) return `reading the prompt ${Math.floor((100 * prefill.num_computed_tokens) / prefill.num_prompt_tokens)}\u00a0%`;
    if (!queue) return "";
    return queue.position ? `waiting, ${ordinal(queue.position + 1)} in line` : "waiting, next in line";
  }

  // The question as items of Responses.
  get input() {
    if (!this.outputs.length) return [{ role: "user", content: this.asked }];
    return this.outputs.map((one) => ({ type: "function_call_output", ...one }));
  }

  // The answer as items of Responses.
  get output() {
    const text = this.text ? [{ role: "assistant", content: this.text }] : [];
    return [...text, ...this.calls.map((call) => ({ type: "function_call", ...call }))];
  }

  // What is kept of it; times count from the question.
  record() {
    const { key, asked, outputs, text, thought, calls, isJson, model, message, id, usage } = this;
    const since = (time) => time && time - this.began;
    const state = this.state === "active" ? "stopped" : this.state;
    return { key, parent: this.parent?.key ?? null, asked, outputs, text, thought, calls, isJson, model, state, message, id, usage, first: since(this.first), ended: since(this.ended) };
  }

  // `record` has been checked.
  static of(record, parent) {
    return Object.assign(new Turn(record.asked, parent), record, { parent, began: 0 });
  }
}

function ordinal(number) {
  const suffix = { one: "st", two: "nd", few: "rd", other: "th" };
  return number.toLocaleString("en") + suffix[new Intl.PluralRules("en", { type: "ordinal" }).select(number)];
}
