// Maths between $, $$, \( \) and \[ \], as MathML. The library is fetched with the first formula.

const LONGEST = 4000; // characters of a formula; a longer one stays as it is written
const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const MATHML = "http://www.w3.org/1998/Math/MathML";
const ATTRIBUTES = /^(class|display|displaystyle|scriptlevel|mathvariant|stretchy|symmetric|fence|separator|form|lspace|rspace|minsize|maxsize|largeop|movablelimits|accent|accentunder|width|height|depth|voffset|linethickness|columnalign|columnspacing|columnlines|rowlines|rowspacing|columnspan|rowspan|notation|mathcolor|mathbackground|mathsize|xmlns)$/;
const STYLES = /^(text-align|padding|border|color|background-color|font-weight|font-style|math-)/;

let loading = null;

// Teach the parser the four pairs of signs.
export function addMathsTo(parser) {
  parser.inline.ruler.before("escape", "maths", (state, isSilent) => {
    const found = at(state.src, state.pos, state.posMax);
    if (!found) return false;
    if (!isSilent) {
      const token = state.push("maths", "", 0);
      Object.assign(token, { content: found.content, markup: found.open, block: found.isBlock });
    }
    state.pos = found.end;
    return true;
  });
  // Lines between signs that stand alone are one formula, whatever else they look like.
  parser.block.ruler.before("fence", "maths", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function at(source, start, end) {
  for (const [open, close, isBlock] of PAIRS) {
    if (!source.startsWith(open, start)) continue;
    const from = start + open.length;
    const to = source.indexOf(close, from);
    if (to < 0 || to === from || to + close.length > end) return null;
    const content = source.slice(from, to);
    // Amounts of money: as pandoc has it, no space inside of the signs, and no digit after them.
    if (open === "$" && (/^\s|\s$|\n\n/.test(content) || /\d/.test(source[to + 1] ?? ""))) return null;
    return { content, open, isBlock, end: to + close.length };
  }
  return null;
}

function block(state, startLine, endLine, isSilent) {
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]).trim();
  const pair = PAIRS.find(([open, , isBlock]) => isBlock && line(startLine) === open);
  if (!pair) return false;
  let end = startLine + 1;
  while (end < endLine && line(end) !== pair[1]) end++;
  if (end >= endLine) return false;
  if (isSilent) return true;
  const token = state.push("maths", "", 0);
  const content = Array.from({ length: end - startLine - 1 }, (_, index) => line(startLine + 1 + index)).join("\n");
  Object.assign(token, { content, markup: pair[0], block: true, map: [startLine, end + 1] });
  state.line = end + 1;
  return true;
}

// Return an element that shows a formula; until the library is there, or if it is wrong, as it was written.
export function mathsOf(source, markup, isBlock) {
  const made = document.createElement("span");
  made.className = isBlock ? "maths block" : "maths";
  const close = PAIRS.find(([open]) => open === markup)[1];
  made.textContent = `${markup}${source}${close}`;
  if (source.length > LONGEST) return made;
  if (globalThis.temml) draw(made, source, isBlock);
  else load().then(() => draw(made, source, isBlock));
  return made;
}

function load() {
  loading ??= new Promise((resolve) => {
    const script = document.createElement("script"); // it is no module
    script.src = new URL("../vendor/temml.min.js", import.meta.url).href;
    script.onload = resolve;
    document.head.append(script);
  });
  return loading;
}

function draw(made, source, isBlock) {
  const drawn = document.createElement("span");
  try {
    globalThis.temml.render(source, drawn, { displayMode: isBlock, throwOnError: true, annotate: false, maxExpand: 200, maxSize: [20, 20] });
    made.replaceChildren(...[...drawn.childNodes].map(taken));
  } catch {
    // as it was written
  }
}

// Of what the library makes only MathML is taken, without anything that could act or lead elsewhere.
function taken(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  const isMaths = node.namespaceURI === MATHML && !/^(semantics|annotation|annotation-xml|maction)$/.test(node.localName);
  const made = isMaths ? document.createElementNS(MATHML, node.localName) : document.createElement("span");
  for (const { name, value } of node.attributes) if (ATTRIBUTES.test(name)) made.setAttribute(name, value);
  for (const name of node.style) if (STYLES.test(name)) made.style.setProperty(name, node.style.getPropertyValue(name));
  made.append(...[...node.childNodes].map(taken));
  return made;
}
