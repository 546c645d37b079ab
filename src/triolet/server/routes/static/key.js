// The API key: kept in this tab, and how a request carries it.

const KEPT = "triolet.key";

export const recallKey = () => sessionStorage.getItem(KEPT);
export const rememberKey = (key) => sessionStorage.setItem(KEPT, key);
export const forgetKey = () => sessionStorage.removeItem(KEPT);

// A header carries visible ASCII only: with another character in it, `fetch` throws.
export const isKey = (text) => /^[!-~]+$/.test(text);

export const headersOf = (key) => (key ? { authorization: `Bearer ${key}` } : {});

// A page can set no headers on a WebSocket: there the key goes along as a subprotocol, which may have no `/` or `=` in it.
export function protocolsOf(key) {
  if (!key) return [];
  const encoded = btoa(key).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["realtime", `triolet-api-key.${encoded}`];
}
