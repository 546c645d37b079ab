// A question and its answer on the screen.

import { copyText } from "../text/code.js";
import { Flow, write } from "../text/flow.js";
import { CallsView, pretty } from "./calls.js";
import { element, quiet } from "./dom.js";
import { TokensView } from "./tokens.js";

export class TurnView {
  #editor = null;

  // `acts` has what its buttons do: fork(turn), askAgain(turn, text), choose(turn), answer(outputs), leave().
  // askAgain returns whether it asked.
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    // Text of a model may be of either direction, or hold characters that turn it round: `dir` keeps that to the element.
    this.asked = element("div", { className: "asked", dir: "auto" });
    this.thought = element("div", { className: "thought", dir: "auto" });
    this.thinks = element("summary");
    this.folded = element("details", { hidden: true }, this.thinks, this.thought);
    this.answer = element("div", { className: "answer", dir: "auto" });
    this.flow = new Flow(this.answer);
    this.tokens = new TokensView();
    this.calls = new CallsView(acts.answer);
    this.facts = element("span");
    this.state = element("span", { className: "state", dir: "auto" });
    this.waits = element("div", { className: "waits", hidden: true });
    this.branches = element("span", { className: "branches", hidden: true });
    this.leave = quiet("New chat with this question", acts.leave);
    this.probabilities = quiet("tokens", () => this.#turnTokens(), "Probabilities of tokens");
    this.copy = quiet("copy", () => this.#copy(), "Copy the answer");
    this.edit = quiet("edit", () => this.#edit(), "Edit the question");
    this.again = quiet("regenerate", () => acts.askAgain(turn), "Regenerate the answer");
    this.fork = quiet("fork from here", () => acts.fork(turn));
    this.buttons = element("span", { className: "buttons", hidden: true }, this.probabilities, this.copy, this.edit, this.again, this.fork);
    const foot = element("div", { className: "facts" }, this.branches, this.state, this.leave, this.facts, this.buttons);
    this.root = element("article", { className: "turn" }, this.asked, this.folded, this.answer, this.tokens.root, this.calls.root, this.waits, foot);
  }

  // `beside` are the turns of the other branches and this one; `isIdle`: nothing streams in the lane; `isAlone`: there is
  // one lane; `isLast`: nothing follows.
  show({ beside, isIdle, isAlone, isLast }) {
    const turn = this.turn;
    this.root.dataset.state = turn.state;
    const isActive = turn.state === "active";
    say(this.asked, turn.outputs.length ? turn.outputs.map(({ output }) => output).join("\n") : turn.asked);
    this.asked.classList.toggle("of-tool", turn.outputs.length > 0);
    say(this.thought, turn.thought);
    this.folded.hidden = !turn.thought;
    say(this.thinks, isActive && !turn.text && !turn.calls.length ? "Thinking…" : "Thoughts");
    this.flow.show(turn.isJson && turn.text ? fenced(turn.text, isActive) : turn.text, isActive);
    this.calls.show(turn.calls, isLast && isIdle);
    this.probabilities.hidden = !turn.tokens.length;
    this.leave.hidden = isActive || !turn.isFull;
    say(this.waits, turn.waiting);
    this.waits.hidden = !turn.waiting;
    say(this.state, turn.message);
    say(this.facts, factsOf(turn));
    this.buttons.hidden = turn.state === "active" || !isIdle;
    this.copy.hidden = !turn.text;
    this.edit.hidden = turn.outputs.length > 0;
    this.fork.hidden = turn.state === "failed" || !isAlone;
    this.#showBranches(beside, isIdle);
  }

  #showBranches(beside, isIdle) {
    this.branches.hidden = beside.length < 2;
    const shown = `${beside.indexOf(this.turn) + 1}/${beside.length} ${isIdle}`;
    if (this.branches.hidden || shown === this.branches.dataset.shown) return;
    this.branches.dataset.shown = shown;
    const at = beside.indexOf(this.turn);
    const step = (by, text, label) => {
      const button = quiet(text, () => this.acts.choose(beside[at + by]), label);
      button.disabled = !isIdle || !beside[at + by];
      return button;
    };
    this.branches.replaceChildren(step(-1, "‹", "Previous branch"), `${at + 1}/${beside.length}`, step(1, "›", "Next branch"));
  }

  #turnTokens() {
    const isShown = this.tokens.root.hidden;
    if (isShown) this.tokens.show(this.turn.tokens);
    this.tokens.root.hidden = !isShown;
    this.answer.hidden = isShown;
    this.probabilities.setAttribute("aria-pressed", isShown);
  }

  async #copy() {
    await copyText(this.turn.text);
    this.copy.textContent = "copied";
    setTimeout(() => (this.copy.textContent = "copy"), 1500);
  }

  #edit() {
    if (this.#editor) return;
    const area = element("textarea", { value: this.turn.asked, rows: Math.min(8, 1 + this.turn.asked.split("\n").length), dir: "auto" });
    area.setAttribute("aria-label", "Question");
    const close = () => {
      this.#editor?.remove();
      this.#editor = null;
      this.asked.hidden = false;
    };
    const send = () => {
      const text = area.value.trim();
      if (!text || this.acts.askAgain(this.turn, text)) close();
    };
    area.onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // elsewhere it stops answers
        close();
        this.edit.focus();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    };
    this.#editor = element("div", { className: "editor" }, area, quiet("Send", send), quiet("Cancel", close));
    this.asked.hidden = true;
    this.asked.before(this.#editor);
    area.focus();
  }
}

// JSON as code, in lines once it is complete. Its own marks cannot end the block: inside of JSON they stand in strings, in
// one line with a quotation mark before them.
function fenced(text, isGrowing) {
  return `~~~json\n${isGrowing ? text : pretty(text)}\n~~~`;
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
