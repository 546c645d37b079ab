// Lane: a way through a chat, and what is asked at its end. Lanes have the same names on the server.

import { Turn } from "./turn.js";

export class Lane {
  constructor(name, connection, options, onChange, chat) {
    this.name = name;
    this.options = options;
    this.chat = chat;
    this.turns = chat.wayThrough();
    this.#connection = connection;
    this.#onChange = onChange;
  }
  #connection;
  #onChange;
  #isResuming = false;

  get active() {
    const last = this.turns.at(-1);
    return last?.state === "active" ? last : null;
  }

  // The same chat so far, in a lane of its own.
  fork(name, upTo, onChange) {
    const lane = new Lane(name, this.#connection, this.options.copy(), onChange, this.chat);
    lane.turns = this.turns.slice(0, upTo);
    return lane;
  }

  ask(text, outputs = []) {
    this.#begin(new Turn(text, this.turns.at(-1) ?? null, outputs));
  }

  // Ask the question of a turn again, beside it; or another one.
  askAgain(turn, text = turn.asked) {
    this.#begin(new Turn(text, turn.parent, text === turn.asked ? turn.outputs : []));
  }

  // Show another branch.
  choose(turn) {
    this.turns = this.chat.wayThrough(turn);
    this.#onChange(this);
  }

  #begin(turn) {
    if (this.active) return;
    turn.isJson = this.options.isJson;
    turn.model = this.options.model;
    this.chat.add(turn);
    this.turns = this.chat.wayTo(turn);
    this.#ask(turn);
    this.#onChange(this);
  }

  // After what the server remembers: the latest answer before this question.
  #ask(turn) {
    const before = this.turns.slice(0, -1).findLast((one) => one.id && one.state !== "failed");
    const isWhole = turn.isWhole || !before;
    const heard = isWhole ? this.turns.slice(0, -1).filter((one) => one.output.length) : this.turns.slice(this.turns.indexOf(before) + 1, -1).filter((one) => one.output.length);
    const input = [...heard.flatMap((one) => [...one.input, ...one.output]), ...turn.input];
    this.#create({ model: turn.model, input, previous_response_id: isWhole ? null : before.id });
  }

  stop() {
    const turn = this.active;
    if (!turn) return;
    turn.isUnwanted = true; // also if the connection is away, and has to be told later
    this.#send({ type: "response.cancel", ...(turn.id && { response_id: turn.id }) });
  }

  // The connection is back: read on where it broke off, or ask again what was never heard.
  resume() {
    const turn = this.active;
    if (!turn) return;
    turn.waits = {}; // the server tells what is so now
    if (turn.id) {
      this.#isResuming = true;
      this.#send({ type: "response.resume", response_id: turn.id, starting_after: turn.last });
    } else {
      this.#ask(turn);
    }
    if (turn.isUnwanted) this.stop();
  }

  // The server has ended the connection over what it was sent: what it has not begun to answer is not asked again.
  refuse(reason) {
    const turn = this.active;
    if (turn && !turn.id) this.#refused(turn, { message: `The server refused this: ${reason}.` });
  }

  hear(event) {
    const turn = this.active;
    if (!turn) return;
    if (event.type === "error") return this.#refused(turn, event.error);
    if (event.type.startsWith("triolet:")) return this.#waits(turn, event);
    if (event.sequence_number <= turn.last) return;
    turn.last = event.sequence_number;
    switch (event.type) {
      case "response.created":
        turn.id = event.response.id;
        if (turn.isUnwanted) this.stop(); // the first cancel may have come before the response had begun
        break;
      case "response.output_text.delta":
        turn.first ??= performance.now();
        turn.text += event.delta;
        turn.tokens.push(...(event.logprobs ?? []));
        break;
      case "response.reasoning_text.delta":
        turn.first ??= performance.now();
        turn.thought += event.delta;
        break;
      case "response.output_item.added":
      case "response.output_item.done":
        this.#hearCall(turn, event);
        break;
      case "response.function_call_arguments.delta":
        turn.first ??= performance.now();
        turn.calls.at(-1).arguments += event.delta;
        break;
      case "response.completed":
      case "response.incomplete":
      case "response.failed":
        this.#end(turn, event.response);
        break;
    }
    this.#isResuming = false;
    this.#onChange(this);
  }

  #hearCall(turn, { type, item }) {
    if (item.type !== "function_call") return;
    const { call_id, name, arguments: text } = item;
    if (type.endsWith("added")) turn.calls = [...turn.calls, { call_id, name, arguments: text ?? "" }];
    else turn.calls = [...turn.calls.slice(0, -1), { call_id, name, arguments: text }];
  }

  #waits(turn, event) {
    if (event.response_id !== turn.id) return;
    turn.waits[event.type] = event;
    this.#onChange(this);
  }

  #end(turn, response) {
    turn.ended = performance.now();
    turn.usage = response.usage;
    turn.metrics = response.metrics;
    if (response.status === "failed") {
      turn.state = "failed";
      turn.message = response.error?.message ?? "It failed.";
      turn.isFull = response.error?.code === "context_length_exceeded";
      return;
    }
    if (response.status === "completed") turn.state = "done";
    else turn.state = response.status === "cancelled" ? "stopped" : "cut";
    turn.message = { stopped: "stopped", cut: "cut at the limit" }[turn.state] ?? "";
    if (turn.state === "cut" && response.usage && response.usage.input_tokens + response.usage.output_tokens >= (this.options.longest ?? Infinity)) {
      turn.isFull = true;
      turn.message = "cut: the context is full";
    }
  }

  #refused(turn, error) {
    // A cancel that came too early or too late; the answer itself goes on, or has ended.
    if (error.code === "response_not_found" && !this.#isResuming) return;
    if (error.code === "previous_response_not_found" && !turn.isWhole) {
      turn.isWhole = true; // the server has forgotten: tell it the whole chat
      return this.#ask(turn);
    }
    turn.ended = performance.now();
    turn.state = "failed";
    turn.message = this.#isResuming ? "The connection was lost." : error.message;
    turn.isFull = error.code === "context_length_exceeded";
    this.#isResuming = false;
    this.#onChange(this);
  }

  #create(fields) {
    this.#send({ type: "response.create", resumable: true, triolet_events: true, truncation: "auto", ...this.options.fields(), ...fields });
  }

  #send(event) {
    this.#connection.send({ ...event, stream_id: this.name });
  }
}
