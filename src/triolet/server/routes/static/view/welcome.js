// The first words: which model answers, how much it can read, and what to try.

import { element, find } from "./dom.js";

// What triolet-nano has learned; other models can be asked more.
const FOR_NANO = ["Who are you?", "Tell me a short story", "Count from 1 to 40", "What is 7 plus 5?"];
const FOR_OTHERS = ["Who are you?", "Explain a triolet in three sentences", "Compare lists and tuples of Python in a table", "Write a function that tells whether a year is a leap year"];

// `send` asks what is clicked.
export function showWelcome(card, send) {
  find("whom").textContent = card.id;
  const isNano = card.root === "triolet-nano";
  const length = card.max_model_len ? `, and reads up to ${card.max_model_len.toLocaleString("en")} tokens` : "";
  const kind = isNano ? "A small model that comes with triolet, to try it with: it chats about little things" : "This model runs on this server, under triolet";
  find("first-words").textContent = `${kind}${length}. What you write goes to this server only. Try:`;
  const buttons = (isNano ? FOR_NANO : FOR_OTHERS).map((text) => element("li", {}, element("button", { type: "button", textContent: text, onclick: () => send(text) })));
  find("suggestions").replaceChildren(...buttons);
}
