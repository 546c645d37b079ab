// The name of the model, or a choice where the server has several.

import { element, find, recall, remember } from "./dom.js";

const STORED = "triolet.model";

export class Models {
  // `cards` are those of /v1/models; `onChoice` gets the one that is chosen.
  constructor(cards, onChoice) {
    this.cards = cards;
    const stored = recall(STORED);
    this.chosen = cards.find(({ id }) => id === stored) ?? cards[0];
    const shown = find("model");
    if (cards.length === 1) {
      shown.textContent = this.chosen.id;
      return;
    }
    const select = element("select");
    select.setAttribute("aria-label", "Model");
    for (const { id } of cards) select.append(element("option", { value: id, textContent: id, selected: id === this.chosen.id }));
    select.onchange = () => {
      this.chosen = cards.find(({ id }) => id === select.value);
      remember(STORED, this.chosen.id);
      onChoice(this.chosen);
    };
    shown.replaceChildren(select);
  }
}
