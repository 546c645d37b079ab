// Code with colours and a button that copies it. The highlighter is fetched with the first code.

let highlighter = null;
const waiting = new Set();

// Return the element of a block of code. What still grows gets its colours when it is complete.
export function codeBlock(text, language, isOpen) {
  const code = element("code", "", text);
  const pre = element("pre", "");
  pre.tabIndex = 0;
  pre.append(code);
  const copy = element("button", "quiet", "Copy");
  copy.type = "button";
  copy.dataset.copy = "";
  const bar = element("div", "bar-of-code");
  bar.append(element("span", "", language), copy);
  const block = element("div", "code");
  block.setAttribute("role", "group");
  block.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  block.append(bar, pre);
  if (isOpen) block.dataset.open = "";
  if (!isOpen && language) colour(code, language);
  return block;
}

function colour(code, language) {
  if (highlighter) return paint(code, language);
  waiting.add([code, language]);
  if (waiting.size > 1) return;
  import("../vendor/highlight.min.js").then(({ default: loaded }) => {
    highlighter = loaded;
    for (const one of waiting) paint(...one);
    waiting.clear();
  });
}

// The highlighter answers in HTML. It is read in a document that runs nothing, and of it only text and the classes of
// colours are taken.
function paint(code, language) {
  if (!highlighter.getLanguage(language) || code.textContent.length > 50_000) return;
  const { value } = highlighter.highlight(code.textContent, { language, ignoreIllegals: true });
  const parsed = new DOMParser().parseFromString(`<pre>\n${value}</pre>`, "text/html");
  code.replaceChildren(...taken(parsed.querySelector("pre")));
}

function taken(node) {
  return [...node.childNodes].map((child) => {
    if (child.nodeType === Node.TEXT_NODE) return document.createTextNode(child.data);
    const span = element("span", /^[\w -]*$/.test(child.className) ? child.className : "");
    span.append(...taken(child));
    return span;
  });
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

// Copy the code that a button belongs to.
export function copyOnClick(root) {
  root.addEventListener("click", async ({ target }) => {
    const button = target.closest("button[data-copy]");
    if (!button) return;
    await copyText(button.closest(".code").querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

// Browsers give their clipboard to secure pages only; elsewhere the older way is left.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
