// The tokens of an answer, each with how likely it was, and what else might have come.

import { element } from "./dom.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1]; // of probability, from sure to unlikely

export class TokensView {
  #tokens = [];
  #at = -1;

  constructor() {
    this.text = element("div", { className: "tokens", tabIndex: 0, dir: "auto" });
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Tokens; the arrow keys go from one to the next");
    this.card = element("p", { className: "card" });
    this.card.setAttribute("role", "status");
    this.root = element("div", { hidden: true }, this.text, this.card);
    this.text.onmouseover = ({ target }) => target.dataset.at && this.#choose(Number(target.dataset.at));
    this.text.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.#choose(this.#at + by);
    };
  }

  show(tokens) {
    this.#tokens = tokens;
    this.#at = -1;
    this.text.replaceChildren(...tokens.map(({ token, logprob }, at) => {
      const span = element("span", { className: `level${levelOf(logprob)}`, textContent: token });
      span.dataset.at = at;
      return span;
    }));
    this.card.textContent = "Point at a token, or go through them with the arrow keys.";
  }

  #choose(at) {
    if (!this.#tokens[at] || at === this.#at) return;
    this.text.children[this.#at]?.classList.remove("current");
    this.text.children[at].classList.add("current");
    this.#at = at;
    const { token, logprob, top_logprobs: others } = this.#tokens[at];
    const parts = [one(token, logprob, "b"), ...others.filter((other) => other.token !== token).map((other) => one(other.token, other.logprob, "span"))];
    this.card.replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
  }
}

function one(token, logprob, tag) {
  const percent = 100 * Math.exp(logprob);
  const text = percent >= 9.95 ? percent.toFixed(0) : percent >= 0.1 ? percent.toFixed(1) : "< 0.1";
  return element(tag, {}, element("bdi", { textContent: shown(token) }), `\u00a0${text}\u00a0%`);
}

// White space can be seen.
function shown(token) {
  return token.replaceAll("\n", "↵").replaceAll(" ", "␣") || "(nothing)";
}

function levelOf(logprob) {
  const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  return level < 0 ? LEVELS.length : level;
}
