// Helpers for elements, and for what outlives the page.

export const find = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function quiet(text, onclick, label = null) {
  const made = element("button", { type: "button", className: "quiet", textContent: text, onclick });
  if (label) made.setAttribute("aria-label", label);
  return made;
}

// What the browser keeps, where it lets a page keep something.
export function remember(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // a private window: then it is forgotten
  }
}

export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
