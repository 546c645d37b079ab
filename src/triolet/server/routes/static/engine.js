// State of the engine, read from /metrics once a second while the page is visible.

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 3000; // a server that is slower than this is said to be silent
const NUM_RATES = 60;
const STATES = ["in_use", "cached", "free"];
const SAMPLE = /^([\w:]+?)(?:\{(.*)\})? ([\d.eE+-]+|NaN|\+Inf)$/;

export class EngineView {
  #before = null; // the sample that the next rate counts from
  #last = null; // the latest sample, also of a server that has gone since
  #lastAt = null; // its time
  #rates = [];
  #timer = 0;
  #isPolling = false;

  constructor(root) {
    this.find = (id) => root.getElementById(id);
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
    this.#rates = [];
  }

  #show(now, time) {
    const before = this.#before;
    const isRestarted = this.#last && (now.tokens < this.#last.tokens || now.firstTokens < this.#last.firstTokens);
    this.#last = now;
    this.#lastAt = new Date();
    this.#setText("running", now.running);
    this.#setText("waiting", now.waiting);
    this.#showBlocks(now.blocks);
    if (isRestarted) this.#setText("ttft", "–");
    if (!before || isRestarted) {
      this.#before = { ...now, time };
      this.#setText("rate", "–");
      return;
    }
    if (time - before.time < INTERVAL_MS / 2) return; // too short for a rate
    this.#before = { ...now, time };
    const rate = Math.max(0, (now.tokens - before.tokens) / ((time - before.time) / 1000));
    this.#rates = [...this.#rates, rate].slice(-NUM_RATES);
    this.#setText("rate", rate < 10 ? rate.toFixed(1) : Math.round(rate));
    if (now.firstTokens > before.firstTokens) {
      const seconds = (now.firstTokenSeconds - before.firstTokenSeconds) / (now.firstTokens - before.firstTokens);
      this.#setTime(seconds);
    }
    this.#draw();
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

  #setTime(seconds) {
    const isLong = seconds >= 1;
    const unit = Object.assign(document.createElement("small"), { textContent: isLong ? "s" : "ms" });
    this.find("ttft").replaceChildren(isLong ? seconds.toFixed(1) : Math.round(seconds * 1000), unit);
  }

  // A step of the curve is a second; its height is relative to the highest one shown.
  #draw() {
    const most = Math.max(...this.#rates, 1);
    const width = 120 / (NUM_RATES - 1);
    const from = 120 - width * (this.#rates.length - 1);
    const points = this.#rates.map((rate, at) => `${(from + at * width).toFixed(2)},${(31 - (29 * rate) / most).toFixed(2)}`);
    const [area, curve] = this.find("rates").children;
    curve.setAttribute("d", `M${points.join("L")}`);
    area.setAttribute("d", `M${from.toFixed(2)},32L${points.join("L")}L120,32Z`);
  }

  #setText(id, text) {
    this.find(id).textContent = text;
  }
}

function parse(text) {
  const now = { running: 0, waiting: 0, tokens: 0, firstTokens: 0, firstTokenSeconds: 0, blocks: {} };
  const simple = {
    num_requests_running: "running",
    num_requests_waiting: "waiting",
    generation_tokens_total: "tokens",
    time_to_first_token_seconds_count: "firstTokens",
    time_to_first_token_seconds_sum: "firstTokenSeconds",
  };
  for (const line of text.split("\n")) {
    const sample = SAMPLE.exec(line);
    if (!sample) continue;
    const name = Object.keys(simple).find((suffix) => sample[1].endsWith(suffix)); // whatever the prefix
    if (name) now[simple[name]] = Number(sample[3]);
    if (sample[1].endsWith("kv_blocks")) now.blocks[/state="(\w+)"/.exec(sample[2])[1]] = Number(sample[3]);
  }
  return now;
}
