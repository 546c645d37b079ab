// A text of a model on the screen, as it grows: what has not changed is left alone, so that it stays selected.

import { blocksOf } from "./markdown.js";

const SHARE = 8; // of the time at most one part in eight is spent on a text that grows

export class Flow {
  #keys = [];
  #shown = null;
  #notBefore = 0;
  #timer = 0;

  constructor(node) {
    this.node = node;
  }

  show(text, isGrowing) {
    const now = `${isGrowing}${text}`;
    if (now === this.#shown) return;
    clearTimeout(this.#timer);
    const wait = isGrowing ? this.#notBefore - performance.now() : 0;
    if (wait > 0) {
      this.#timer = setTimeout(() => this.show(text, isGrowing), wait);
      return;
    }
    const began = performance.now();
    this.#shown = now;
    this.#put(blocksOf(text, isGrowing));
    this.#notBefore = performance.now() + SHARE * (performance.now() - began);
  }

  #put(blocks) {
    const nodes = this.node.children;
    blocks.forEach(({ key, make }, index) => {
      if (this.#keys[index] === key) return;
      const made = make().firstElementChild ?? document.createElement("p");
      if (index < nodes.length) merge(nodes[index], made);
      else this.node.append(made);
    });
    while (nodes.length > blocks.length) nodes[nodes.length - 1].remove();
    this.#keys = blocks.map(({ key }) => key);
  }
}

// Make `old` as `made` is, and keep of it what is the same.
function merge(old, made) {
  if (old.nodeType === Node.TEXT_NODE && made.nodeType === Node.TEXT_NODE) return write(old, made.data);
  if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName || !hasSameAttributes(old, made)) return old.replaceWith(made);
  if (made.matches(".code, .maths")) return old.isEqualNode(made) ? undefined : mergeLate(old, made);
  const wanted = [...made.childNodes];
  wanted.forEach((child, index) => (index < old.childNodes.length ? merge(old.childNodes[index], child) : old.append(child)));
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

// What a library fills in later holds on to the element that it was given; code that grows has none yet.
function mergeLate(old, made) {
  const [before, after] = [old, made].map((node) => node.querySelector(":scope > pre > code")?.childNodes ?? []);
  const isPlain = before.length === 1 && after.length === 1 && after[0].nodeType === Node.TEXT_NODE && before[0].nodeType === Node.TEXT_NODE;
  if (isPlain && after[0].data.startsWith(before[0].data) && after[0].data !== before[0].data) write(before[0], after[0].data);
  else old.replaceWith(made);
}

function hasSameAttributes(one, other) {
  return one.attributes.length === other.attributes.length && [...one.attributes].every(({ name, value }) => other.getAttribute(name) === value);
}

export function write(node, text) {
  if (node.data === text) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}
