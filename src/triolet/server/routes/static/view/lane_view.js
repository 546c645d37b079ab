// A lane on the screen.

import { element, quiet } from "./dom.js";
import { TurnView } from "./turn_view.js";

export class LaneView {
  #rows = new Map();
  #isDue = false;

  // `acts` has what its buttons do: fork(lane, turn), close(lane), mayAsk(), isAlone(), shown().
  constructor(lane, acts) {
    this.lane = lane;
    this.acts = acts;
    this.turns = element("div", { className: "turns", tabIndex: 0 });
    this.turns.setAttribute("role", "log");
    this.turns.setAttribute("aria-label", `Lane ${lane.name.toUpperCase()}`);
    this.head = element("h2");
    this.root = element("section", { className: "lane" }, this.head, this.turns);
    this.root.dataset.lane = lane.name;
  }

  // At most once a frame, however fast the tokens come.
  change() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.show();
    });
  }

  show() {
    const box = this.turns;
    const { lane } = this;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
    const rows = lane.turns.map((turn) => this.#row(turn));
    rows.forEach(({ root }, index) => {
      if (box.children[index] !== root) box.insertBefore(root, box.children[index] ?? null);
    });
    while (box.children.length > rows.length) box.lastChild.remove();
    for (const row of rows) row.show({ beside: lane.chat.beside(row.turn), isIdle: !lane.active, isAlone: this.acts.isAlone(), isLast: row.turn === lane.turns.at(-1) });
    this.#showHead();
    box.setAttribute("aria-busy", lane.active !== null);
    if (isAtEnd || lane.active?.last === -1) box.scrollTop = box.scrollHeight;
    this.acts.shown();
  }

  #row(turn) {
    const { lane } = this;
    if (!this.#rows.has(turn)) {
      const acts = {
        fork: () => this.acts.fork(lane, lane.turns.indexOf(turn) + 1),
        askAgain: (one, text) => this.#ask(() => lane.askAgain(one, text)),
        answer: (outputs) => this.#ask(() => lane.ask("", outputs)),
        leave: () => this.acts.leave(turn),
        choose: (one) => lane.choose(one),
      };
      this.#rows.set(turn, new TurnView(turn, acts));
    }
    return this.#rows.get(turn);
  }

  // Return whether something was asked.
  #ask(ask) {
    const may = this.acts.mayAsk();
    if (may) ask();
    return may;
  }

  #showHead() {
    // The only lane needs no name, but what is read out keeps its order of headings.
    const isAlone = this.acts.isAlone();
    this.head.classList.toggle("unseen", isAlone);
    if (isAlone) return this.head.replaceChildren("Chat");
    const { name, options } = this.lane;
    const close = quiet("close", () => this.acts.close(this.lane), `Close lane ${name.toUpperCase()}`);
    const facts = element("span", {}, ...options.summary.flatMap(([one, value], at) => [at ? " · " : "", `${one} `, element("bdi", { textContent: value })]));
    this.head.replaceChildren(element("b", { textContent: name.toUpperCase() }), facts, close);
  }
}
