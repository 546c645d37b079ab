// State of the engine, read from /metrics once a second while the page is visible.

import { parse } from "./metrics.js";
import { Chart, shown } from "./view/chart.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 3000; // a server that is slower than this is said to be silent
const STATES = ["in_use", "cached", "free"];

export class EngineView {
  #before = null; // the sample that the next rate counts from
  #last = null; // the latest sample, also of a server that has gone since
  #lastAt = null; // its time
  #timer = 0;
  #isPolling = false;

  constructor(root) {
    this.find = (id) => root.getElementById(id);
    const chart = (id, names) => new Chart(this.find(id).closest("figure"), names);
    this.charts = { rates: chart("rates", ["answers", "prompts"]), requests: chart("requests", ["running", "waiting"]), gaps: chart("gaps", ["mean"]) };
    root.addEventListener("visibilitychange", () => (root.hidden ? this.pause() : this.start()));
  }

  start() {
    this.pause();
    this.#timer = setInterval(() => this.poll(), INTERVAL_MS);
    this.poll();
  }

  pause() {
    clearInterval(this.#timer);
    this.#breakCurve();
  }

  // One at a time: an answer that is late must not overwrite a newer one.
  async poll() {
    if (this.#isPolling) return;
    this.#isPolling = true;
    try {
      const answer = await fetch("metrics", { signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (!answer.ok) throw new Error(answer.statusText);
      this.#show(parse(await answer.text()), performance.now());
      this.#setStale(false);
    } catch {
      this.#setStale(true);
    } finally {
      this.#isPolling = false;
    }
  }

  // What was shown stays readable, but nobody shall take it for what is so now.
  #setStale(isStale) {
    this.find("engine").toggleAttribute("data-stale", isStale);
    const since = this.#lastAt && `These numbers are from ${this.#lastAt.toLocaleTimeString()}.`;
    const note = isStale ? `The server does not answer. ${since ?? "There are no numbers yet."}` : "";
    // Only a change is written: a screen reader says it once and not every second.
    if (this.find("engine-note").textContent !== note) this.#setText("engine-note", note);
    if (isStale) this.#breakCurve();
  }

  // A rate needs two samples in a row, and the curve has a point for every second.
  #breakCurve() {
    this.#before = null;
    for (const chart of Object.values(this.charts)) chart.clear();
  }

  #show(now, time) {
    const before = this.#before;
    const isRestarted = this.#last && (now.tokens < this.#last.tokens || now.firstTokens < this.#last.firstTokens);
    this.#last = now;
    this.#lastAt = new Date();
    this.#setText("running", now.running);
    this.#setText("waiting", now.waiting);
    this.#showBlocks(now.blocks);
    if (isRestarted) for (const name of ["ttft", "gap"]) this.#setText(name, "–");
    this.#setText("hits", now.promptTokens ? `${Math.round((100 * now.cachedTokens) / now.promptTokens)}\u00a0%` : "–");
    if (!before || isRestarted) {
      this.#before = { ...now, time };
      this.#setText("rate", "–");
      return;
    }
    if (time - before.time < INTERVAL_MS / 2) return; // too short for a rate
    this.#before = { ...now, time };
    const grown = (name) => Math.max(0, now[name] - before[name]);
    const seconds = (time - before.time) / 1000;
    this.#setText("rate", shown(grown("tokens") / seconds));
    if (grown("firstTokens")) this.#setTime("ttft", grown("firstTokenSeconds") / grown("firstTokens"));
    if (grown("gaps")) this.#setTime("gap", grown("gapSeconds") / grown("gaps"));
    this.charts.rates.add(grown("tokens") / seconds, grown("promptTokens") / seconds);
    this.charts.requests.add(now.running, now.waiting);
    this.charts.gaps.add(grown("gaps") ? (1000 * grown("gapSeconds")) / grown("gaps") : 0);
  }

  #showBlocks(blocks) {
    const total = Object.values(blocks).reduce((sum, count) => sum + count, 0);
    this.#setText("blocks-total", total.toLocaleString());
    for (const state of STATES) {
      this.#setText(state, (blocks[state] ?? 0).toLocaleString());
      this.find("blocks").querySelector(`.${state}`).style.width = `${(100 * (blocks[state] ?? 0)) / (total || 1)}%`;
    }
    this.find("blocks").setAttribute("aria-label", STATES.map((state) => `${blocks[state]} ${state.replace("_", " ")}`).join(", "));
  }

  #setTime(id, seconds) {
    const isLong = seconds >= 1;
    const unit = Object.assign(document.createElement("small"), { textContent: isLong ? "s" : "ms" });
    this.find(id).replaceChildren(isLong ? seconds.toFixed(1) : shown(seconds * 1000), unit);
  }

  #setText(id, text) {
    this.find(id).textContent = text;
  }
}
