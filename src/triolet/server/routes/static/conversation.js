// Lane: a list of turns, each a question and a growing answer. Lanes have the same names on the server.

export class Turn {
  constructor(asked) {
    this.asked = asked;
    this.text = "";
    this.thought = "";
    this.state = "active"; // or "done", "stopped", "cut", "failed"
    this.message = "";
    this.id = null; // of the response
    this.last = -1; // the latest sequence number
    this.began = performance.now();
    this.first = null;
    this.ended = null;
    this.usage = null;
    this.isUnwanted = false;
    this.waits = {}; // the latest vendor event of each type
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
}

function ordinal(number) {
  const suffix = { one: "st", two: "nd", few: "rd", other: "th" };
  return number.toLocaleString("en") + suffix[new Intl.PluralRules("en", { type: "ordinal" }).select(number)];
}

export class Lane {
  constructor(name, connection, options, onChange) {
    this.name = name;
    this.options = options;
    this.turns = [];
    this.parent = null; // the response that the next turn continues
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
    const lane = new Lane(name, this.#connection, this.options.copy(), onChange);
    lane.turns = this.turns.slice(0, upTo).map((turn) => Object.assign(new Turn(turn.asked), turn));
    lane.parent = lane.turns.findLast((turn) => turn.id && turn.state !== "failed")?.id ?? null;
    return lane;
  }

  ask(text) {
    this.turns.push(new Turn(text));
    this.#create({ input: text, previous_response_id: this.parent });
    this.#onChange(this);
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
      this.#create({ input: turn.asked, previous_response_id: this.parent });
    }
    if (turn.isUnwanted) this.stop();
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
        break;
      case "response.reasoning_text.delta":
        turn.first ??= performance.now();
        turn.thought += event.delta;
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
      return;
    }
    this.parent = response.id;
    if (response.status === "completed") turn.state = "done";
    else turn.state = response.status === "cancelled" ? "stopped" : "cut";
    turn.message = { stopped: "stopped", cut: "cut at the limit" }[turn.state] ?? "";
  }

  #refused(turn, error) {
    // A cancel that came too early or too late; the answer itself goes on, or has ended.
    if (error.code === "response_not_found" && !this.#isResuming) return;
    if (error.code === "previous_response_not_found" && this.parent) {
      this.parent = null; // the server has forgotten: tell it the whole chat
      return this.#create({ input: this.#history() });
    }
    turn.ended = performance.now();
    turn.state = "failed";
    turn.message = this.#isResuming ? "The connection was lost." : error.message;
    this.#isResuming = false;
    this.#onChange(this);
  }

  #history() {
    const heard = this.turns.slice(0, -1).filter((turn) => turn.text);
    const messages = heard.flatMap((turn) => [
      { role: "user", content: turn.asked },
      { role: "assistant", content: turn.text },
    ]);
    return [...messages, { role: "user", content: this.turns.at(-1).asked }];
  }

  #create(fields) {
    this.#send({ type: "response.create", model: this.options.model, resumable: true, triolet_events: true, truncation: "auto", ...this.options.fields(), ...fields });
  }

  #send(event) {
    this.#connection.send({ ...event, stream_id: this.name });
  }
}
