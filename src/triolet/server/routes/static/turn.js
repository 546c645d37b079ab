// A question and its answer on the screen.

import { element } from "./settings.js";
import { Flow, write } from "./text/flow.js";

export class TurnView {
  constructor(onFork) {
    // Text of a model may be of either direction, or hold characters that turn it round: `dir` keeps that to the element.
    this.asked = element("div", { className: "asked", dir: "auto" });
    this.thought = element("div", { className: "thought", dir: "auto", hidden: true });
    this.answer = element("div", { className: "answer", dir: "auto" });
    this.flow = new Flow(this.answer);
    this.facts = element("span");
    this.state = element("span", { className: "state", dir: "auto" });
    this.fork = element("button", { type: "button", className: "quiet", textContent: "fork from here", hidden: true });
    this.fork.onclick = onFork;
    this.waits = element("div", { className: "waits", hidden: true });
    const foot = element("div", { className: "facts" }, this.state, this.facts, this.fork);
    this.root = element("article", { className: "turn" }, this.asked, this.thought, this.answer, this.waits, foot);
  }

  show(turn, isAlone) {
    this.root.dataset.state = turn.state;
    say(this.asked, turn.asked);
    say(this.thought, turn.thought);
    this.thought.hidden = !turn.thought;
    this.flow.show(turn.text, turn.state === "active");
    say(this.waits, turn.waiting);
    this.waits.hidden = !turn.waiting;
    say(this.state, turn.message);
    say(this.facts, factsOf(turn));
    this.fork.hidden = turn.state === "active" || turn.state === "failed" || !isAlone;
  }
}

// Text that has only grown is appended: the rest of it stays as it was selected.
export function say(node, text) {
  if (node.firstChild) write(node.firstChild, text);
  else if (text) node.textContent = text;
}

function factsOf(turn) {
  if (!turn.usage || !turn.ended) return "";
  const tokens = turn.usage.output_tokens;
  const facts = [];
  if (turn.first) facts.push(`TTFT ${Math.round(turn.first - turn.began)} ms`);
  facts.push(`${tokens} tokens`);
  if (turn.first && tokens > 1 && turn.ended > turn.first) facts.push(`${((1000 * (tokens - 1)) / (turn.ended - turn.first)).toFixed(0)} tokens/s`);
  const cached = turn.usage.input_tokens_details?.cached_tokens ?? 0;
  facts.push(`prompt ${turn.usage.input_tokens}${cached ? ` (${cached} cached)` : ""}`);
  return facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
}
