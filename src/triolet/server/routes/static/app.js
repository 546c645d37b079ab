// The page: lanes on the screen, and the keys and buttons that move them. Text from outside never becomes markup.

import { Chat } from "./chat/chat.js";
import { Lane } from "./chat/lane.js";
import { Store } from "./chat/store.js";
import { Connection } from "./connection.js";
import { EngineView } from "./engine.js";
import { forgetKey, headersOf, isKey, recallKey, rememberKey } from "./key.js";
import { Options } from "./options.js";
import { Settings } from "./settings.js";
import { copyOnClick } from "./text/code.js";
import { ChatsPanel } from "./view/chats_panel.js";
import { find, recall, remember } from "./view/dom.js";
import { LaneView } from "./view/lane_view.js";
import { Models } from "./view/models.js";
import { showWelcome } from "./view/welcome.js";

const THEME = "triolet.theme";
const base = new URL(".", location.href);

let connection = null;
let lanes = [];
// Lanes that were closed while an answer was on its way. The server ends it first, then it answers what is asked next on
// a stream of that name: until its last event has come, events of the stream belong to the closed lane.
let closing = [];
const views = new Map();
const store = new Store();

// ------------------------------------------------------------------------------------------- lanes

function addLane(lane) {
  const acts = { fork, mayAsk: () => mayAsk([lane]), close: closeLane, leave, isAlone: () => lanes.length < 2, shown: showControls };
  const view = new LaneView(lane, acts);
  views.set(lane, view);
  lanes.push(lane);
  find("lanes").append(view.root);
  for (const other of views.values()) other.show();
  view.turns.scrollTop = view.turns.scrollHeight;
  settings.show();
}

function changed(lane) {
  views.get(lane)?.change();
  // When a question is asked, and when its answer has ended.
  const turn = lane.turns.at(-1);
  if (turn && (turn.last === -1 || turn.state !== "active")) store.put(lane.chat);
}

function discard(lane) {
  lane.stop();
  if (lane.active) closing.push(lane);
}

function hear(event) {
  closing = closing.filter((lane) => lane.active);
  const isOfStream = (lane) => lane.name === event.stream_id;
  (closing.find(isOfStream) ?? lanes.find(isOfStream))?.hear(event);
}

function resume() {
  closing = closing.filter((lane) => lane.active?.id); // of the others the server knows nothing any more
  for (const lane of [...closing, ...lanes]) lane.resume();
}

function closeLane(lane) {
  discard(lane);
  views.get(lane).root.remove();
  views.delete(lane);
  lanes = lanes.filter((other) => other !== lane);
  for (const view of views.values()) view.show();
  settings.show();
  showControls();
  find("prompt").focus();
}

function fork(lane, upTo = lane.turns.length) {
  if (lanes.length > 1) return;
  const name = lane.name === "a" ? "b" : "a";
  const other = lane.fork(name, upTo, changed);
  addLane(other);
  views.get(other).root.scrollIntoView({ inline: "end" });
  find("prompt").focus();
}

function newChat() {
  openChat(new Chat());
  find("prompt").focus();
}

// The way out of a chat that is too long.
function leave(turn) {
  newChat();
  find("prompt").value = turn.asked;
  grow();
  showControls();
}

function openChat(chat) {
  const { options } = lanes[0];
  for (const lane of [...lanes]) {
    discard(lane);
    views.get(lane).root.remove();
  }
  views.clear();
  lanes = [];
  addLane(new Lane("a", connection, options, changed, chat));
  chats.show();
}

// ---------------------------------------------------------------------------------------- controls

function targets() {
  const wanted = document.querySelector("input[name=target]:checked").value;
  const named = lanes.filter((lane) => lane.name === wanted);
  return lanes.length < 2 || wanted === "both" || !named.length ? lanes : named;
}

function showControls() {
  const isActive = lanes.some((lane) => lane.active);
  find("stop").hidden = !isActive;
  find("send").hidden = isActive;
  find("send").disabled = !find("prompt").value.trim();
  find("fork").disabled = lanes.length > 1 || !lanes[0]?.turns.length || isActive;
  find("target").hidden = lanes.length < 2;
  find("welcome").hidden = lanes.some((lane) => lane.turns.length);
}

function send(text) {
  const chosen = targets();
  if (!text.trim() || !chosen.length || chosen.some((lane) => lane.active) || !mayAsk(chosen)) return;
  for (const lane of chosen) lane.ask(text.trim());
  find("prompt").value = "";
  grow();
  showControls();
}

// With a wrong parameter a lane would ask for something else than the panel shows.
function mayAsk(asking) {
  const wrong = asking.find((lane) => lane.options.faults.length);
  const ofLane = lanes.length > 1 ? ` of lane ${wrong?.name.toUpperCase()}` : "";
  find("unsent").textContent = wrong ? `Not sent. Parameters${ofLane} to correct: ${wrong.options.faults.join("; ")}.` : "";
  return !wrong;
}

function stop() {
  for (const lane of lanes) lane.stop();
}

function grow() {
  const prompt = find("prompt");
  if (CSS.supports("field-sizing", "content")) return;
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function toggle(button, panel, ...others) {
  const isShown = panel.hidden;
  panel.hidden = !isShown;
  button.setAttribute("aria-expanded", isShown);
  for (const other of others) if (isShown && isNarrow() && !other.panel.hidden) toggle(other.button, other.panel);
}

// One panel at a time.
function isNarrow() {
  return matchMedia("(max-width: 90rem)").matches;
}

function turnTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (isDark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  remember(THEME, document.documentElement.dataset.theme);
}

const settings = new Settings(find("settings"), () => lanes, () => (find("unsent").textContent = ""));
const chats = new ChatsPanel(find("chats"), store, {
  open: (chat) => {
    openChat(chat);
    if (matchMedia("(max-width: 62rem)").matches) toggle(panels.chats.button, panels.chats.panel); // it covers the chat
  },
  deleted: (chat) => lanes[0].chat === chat && openChat(new Chat()),
  current: () => lanes[0]?.chat,
});
const panels = {
  chats: { button: find("show-chats"), panel: find("chats") },
  settings: { button: find("show-settings"), panel: find("settings") },
  engine: { button: find("show-engine"), panel: find("engine") },
};

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(find("prompt").value);
});
find("prompt").addEventListener("input", () => {
  grow();
  showControls();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(event.target.value);
});
find("target").addEventListener("change", () => {
  const [lane] = targets();
  views.get(lane).root.scrollIntoView({ inline: "start" }); // on a phone there is room for one
});
copyOnClick(find("lanes"));
find("stop").onclick = stop;
find("new").onclick = newChat;
find("fork").onclick = () => fork(lanes[0]);
find("theme").onclick = turnTheme;
for (const one of Object.values(panels)) {
  const others = Object.values(panels).filter((other) => other !== one);
  one.button.onclick = () => toggle(one.button, one.panel, ...others);
}
panels.chats.button.addEventListener("click", () => {
  if (panels.chats.panel.hidden) return;
  chats.show();
  store.load(); // what other tabs have written
  find("search").focus();
});

const KEYS = { KeyC: "show-chats", KeyN: "new", KeyF: "fork", KeyP: "show-settings", KeyE: "show-engine" };
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return stop();
  const button = event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code];
  if (!button) return;
  event.preventDefault();
  find(button).click();
});

// Leaving the page cancels; a lost connection is resumed.
window.addEventListener("pagehide", () => {
  const active = [...closing, ...lanes].filter((lane) => lane.active);
  stop();
  // What is sent on the socket now may not leave the page; this does.
  const headers = headersOf(connection?.key);
  for (const { active: { id } } of active) if (id) fetch(`v1/responses/${encodeURIComponent(id)}/cancel`, { method: "POST", keepalive: true, headers });
  store.leave([...new Set(active.map((lane) => lane.chat))]);
});

// ------------------------------------------------------------------------------------------- start

// The models, and the key that they were shown for; it is kept once the server has accepted it.
async function findModels() {
  for (let key = recallKey(); ; key = await askForKey(key)) {
    if (key && !isKey(key)) continue;
    const answer = await fetch("v1/models", { headers: headersOf(key) });
    if (answer.status === 401) {
      forgetKey();
      continue;
    }
    const said = await answer.json().catch(() => ({})); // a proxy may say something else
    if (!answer.ok) throw new Error(said.error?.message ?? `The server answers with status ${answer.status}.`);
    if (key) rememberKey(key);
    return [key, said.data];
  }
}

function askForKey(refused) {
  const dialog = find("key");
  find("key-refused").hidden = !refused;
  find("key-value").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(find("key-value").value.trim()), { once: true });
  });
}

function showState(state) {
  const shown = find("connection");
  shown.dataset.state = state;
  shown.textContent = { connecting: "connecting", open: "connected", waiting: "reconnecting", failed: "not connected" }[state];
}

function showFailure(error) {
  showState("failed");
  find("unsent").textContent = `${error.message.replace(/\.$/, "")}. Reload the page to try again.`;
}

async function start() {
  document.documentElement.dataset.theme = recall(THEME) ?? "";
  if (matchMedia("(max-width: 40rem)").matches) toggle(panels.engine.button, panels.engine.panel);
  const options = Options.stored();
  const [key, cards] = await findModels();
  const choose = (into, { id, max_model_len: longest }) => Object.assign(into, { model: id, longest });
  const models = new Models(cards, (card) => {
    for (const lane of lanes) choose(lane.options, card);
    showWelcome(card, send);
  });
  choose(options, models.chosen);
  showWelcome(models.chosen, send);
  const url = new URL("v1/responses", base);
  url.protocol = base.protocol === "https:" ? "wss:" : "ws:";
  connection = new Connection(url.href, key);
  connection.addEventListener("event", ({ detail }) => hear(detail));
  connection.addEventListener("refused", ({ detail }) => {
    for (const lane of [...closing, ...lanes]) lane.refuse(detail);
  });
  const engineView = new EngineView(document);
  let wasLost = false;
  connection.addEventListener("state", ({ detail }) => {
    showState(detail);
    engineView.poll(); // no need to wait a second to learn that the server has gone, or is back
    if (detail === "open" && wasLost) resume();
    wasLost = detail === "waiting";
  });
  await store.open();
  addLane(new Lane("a", connection, options, changed, new Chat()));
  connection.open();
  engineView.start();
  find("prompt").focus();
}

start().catch(showFailure);
