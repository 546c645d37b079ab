// Markdown into elements. Nothing is ever parsed as HTML: every element is made by name out of a fixed list, and what a
// model writes becomes text nodes and, where it is an address of the web, the target of a link.

import MarkdownIt from "../vendor/markdown-it.esm.min.mjs";
import { codeBlock } from "./code.js";
import { addMathsTo, mathsOf } from "./maths.js";

// Elements that a token of the parser may open. Headings are those below the page's own.
const TAGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6", p: "p", ul: "ul", ol: "ol", li: "li", blockquote: "blockquote" };
const INLINE = { em: "em", strong: "strong", s: "del" };
const TABLE = { table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td" };
const ALLOWED = { ...TAGS, ...INLINE, ...TABLE };
const WEB = /^(https?:\/\/|mailto:)/i;

const parser = new MarkdownIt("default", { html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
addMathsTo(parser);

// Return the blocks of `text`: what each was written as, and a function that makes its elements. The last one of an answer
// that still grows is `open`.
export function blocksOf(text, isGrowing = false) {
  const source = text.replaceAll("\r\n", "\n");
  const lines = source.split("\n");
  const references = {};
  const tokens = parser.parse(source, { references });
  const blocks = [];
  for (let at = 0; at < tokens.length; at++) {
    const from = at;
    let depth = tokens[at].nesting;
    while (depth > 0) depth += tokens[++at].nesting;
    const own = tokens.slice(from, at + 1);
    const [start, end] = own[0].map ?? [0, lines.length];
    blocks.push({ key: `${own[0].type}\n${lines.slice(start, end).join("\n")}`, tokens: own, isOpen: false });
  }
  if (isGrowing && blocks.length) blocks.at(-1).isOpen = true;
  // A definition of a link that comes late changes what stands before it.
  const defined = JSON.stringify(references);
  return blocks.map(({ key, tokens: own, isOpen }) => ({ key: `${isOpen}${defined}${key}`, make: () => elementsOf(own, isOpen) }));
}

function elementsOf(tokens, isOpen) {
  const root = document.createDocumentFragment();
  const stack = [root];
  for (const token of tokens) {
    if (token.hidden) continue; // paragraphs of a list without blank lines
    if (token.nesting < 0) stack.pop();
    else if (token.nesting > 0) {
      const made = open(token);
      stack.at(-1).append(made.outer ?? made);
      stack.push(made.inner ?? made);
    } else stack.at(-1).append(...leaf(token, isOpen));
  }
  return root;
}

function open(token) {
  if (token.tag === "a") return link(token.attrGet("href"), token.attrGet("title"));
  const made = document.createElement(ALLOWED[token.tag] ?? "span");
  if (token.tag === "ol" && token.attrGet("start") !== null) made.start = Number(token.attrGet("start"));
  const aligned = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (aligned) made.className = aligned[1];
  if (token.tag !== "table") return made;
  const outer = document.createElement("div");
  outer.className = "scroll";
  outer.tabIndex = 0;
  outer.setAttribute("role", "group");
  outer.setAttribute("aria-label", "Table");
  outer.append(made);
  return { outer, inner: made };
}

function link(address, title) {
  if (!WEB.test(address ?? "")) return document.createElement("span");
  const made = document.createElement("a");
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  made.title = title ? `${title} (${address})` : address; // where it leads can be seen before
  return made;
}

function leaf(token, isOpen) {
  switch (token.type) {
    case "inline":
      return [elementsOf(token.children, isOpen)];
    case "softbreak":
    case "hardbreak":
      return [document.createElement("br")];
    case "hr":
      return [document.createElement("hr")];
    case "code_inline": {
      const code = document.createElement("code");
      code.textContent = token.content;
      return [code];
    }
    case "fence":
    case "code_block":
      return [codeBlock(token.content.replace(/\n$/, ""), token.info?.trim().split(/\s/)[0] ?? "", isOpen)];
    case "maths":
      return [mathsOf(token.content, token.markup, token.block)];
    case "image":
      return picture(token);
    default:
      return [document.createTextNode(token.content)];
  }
}

// A picture from elsewhere would tell its server that it was looked at: it is a link.
function picture(token) {
  const made = link(token.attrGet("src"), token.attrGet("title"));
  made.append(document.createTextNode(token.content || token.attrGet("src") || "picture"));
  return [made];
}
