// A chat is a tree of turns: a question that is asked again, or differently, begins a branch. A lane shows one way through it.

import { STATES, Turn } from "./turn.js";

const LONGEST_TITLE = 60;

export class Chat {
  key = new Turn("").key;
  turns = []; // in the order of the questions
  name = ""; // given by the user
  changed = Date.now();
  keptName = ""; // the name in the store, as far as this tab knows

  get title() {
    if (this.name) return this.name;
    const asked = (this.turns[0]?.asked || "New chat").replace(/\s+/g, " ");
    return asked.length > LONGEST_TITLE ? `${asked.slice(0, LONGEST_TITLE - 1)}…` : asked;
  }

  add(turn) {
    this.turns.push(turn);
    this.changed = Date.now();
    return turn;
  }

  // Turns that continue the same one, itself among them.
  beside(turn) {
    return this.turns.filter((other) => other.parent === turn.parent);
  }

  // From the first turn to this one.
  wayTo(turn) {
    const way = [];
    for (let one = turn; one; one = one.parent) way.unshift(one);
    return way;
  }

  // The way through this turn to the latest one after it; without a turn, to the latest of all.
  wayThrough(turn) {
    return this.wayTo(this.turns.findLast((one) => !turn || this.wayTo(one).includes(turn)));
  }

  holds(words) {
    const text = [this.title, ...this.turns.flatMap((turn) => [turn.asked, turn.text])].join("\n").toLocaleLowerCase();
    return words.every((word) => text.includes(word));
  }

  record() {
    return { key: this.key, name: this.name, changed: this.changed, turns: this.turns.map((turn) => turn.record()) };
  }

  // Take what another tab has written into the same chat. Nothing of either is lost; what was asked here stays the latest.
  merge(record) {
    const other = Chat.of(record);
    const own = new Map(this.turns.map((turn) => [turn.key, turn]));
    const turns = other.turns.map((turn) => {
      const known = own.get(turn.key);
      if (known && known.state !== "active" && isFurther(turn, known)) Object.assign(known, turn);
      return known ?? turn;
    });
    for (const turn of turns) turn.parent = own.get(turn.parent?.key) ?? turn.parent;
    const there = new Set(turns);
    this.turns = [...turns, ...this.turns.filter((turn) => !there.has(turn))];
    if (this.name === this.keptName) this.name = other.name; // it was not renamed here
    this.keptName = other.name;
    this.changed = Math.max(this.changed, other.changed);
  }

  // Return the chat of a record, which may come from a file: what is wrong with it is thrown.
  static of(record) {
    check(record, "a chat", { key: "string", name: "string", changed: "number", turns: "array" });
    const chat = Object.assign(new Chat(), { key: record.key, name: record.name, keptName: record.name, changed: record.changed });
    const known = new Map([[null, null]]);
    for (const one of record.turns) {
      const turn = turnOf(one, known);
      known.set(turn.key, turn);
      chat.turns.push(turn);
    }
    return chat;
  }
}

// An answer that streams in one tab is "stopped" in the records that others read.
function isFurther(turn, known) {
  const length = ({ text, thought, calls }) => text.length + thought.length + calls.length;
  if (turn.state === "stopped" || known.state === "stopped") {
    if (turn.state !== known.state) return known.state === "stopped";
  }
  return length(turn) > length(known);
}

function turnOf(record, known) {
  check(record, "a turn", { key: "string", asked: "string", text: "string", thought: "string", message: "string", calls: "array", outputs: "array" });
  if (!known.has(record.parent)) throw new Error(`parent of a turn must be an earlier turn; got ${JSON.stringify(record.parent)}`);
  if (known.has(record.key)) throw new Error(`key of a turn must be its own; got ${JSON.stringify(record.key)} twice`);
  if (!STATES.includes(record.state)) throw new Error(`state of a turn must be one of ${STATES.join(", ")}; got ${JSON.stringify(record.state)}`);
  const { key, asked, text, thought, message } = record;
  const number = (value) => (Number.isFinite(value) ? value : null);
  const calls = record.calls.map((call) => only(call, "a call", ["call_id", "name", "arguments"]));
  const outputs = record.outputs.map((output) => only(output, "an output", ["call_id", "output"]));
  const id = typeof record.id === "string" ? record.id : null;
  const usage = Number.isFinite(record.usage?.output_tokens) && Number.isFinite(record.usage.input_tokens) ? record.usage : null;
  const state = record.state === "active" ? "stopped" : record.state;
  const isJson = record.isJson === true;
  const model = typeof record.model === "string" ? record.model : null;
  return Turn.of({ key, isJson, model, asked, text, thought, message, calls, outputs, id, usage, state, first: number(record.first), ended: number(record.ended) }, known.get(record.parent));
}

function only(record, what, names) {
  check(record, what, Object.fromEntries(names.map((name) => [name, "string"])));
  return Object.fromEntries(names.map((name) => [name, record[name]]));
}

function check(record, what, types) {
  if (record === null || typeof record !== "object") throw new Error(`${what} must be an object; got ${JSON.stringify(record)}`);
  for (const [name, type] of Object.entries(types)) {
    const found = Array.isArray(record[name]) ? "array" : typeof record[name];
    if (found !== type) throw new Error(`${name} of ${what} must be of type ${type}; got ${found}`);
  }
}
