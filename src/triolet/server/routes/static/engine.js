// State of the engine, read from /metrics once a second while the page is visible.

const INTERVAL_MS = 1000;
const NUM_RATES = 60;
const STATES = ["in_use", "cached", "free"];
const SAMPLE = /^([\w:]+?)(?:\{(.*)\})? ([\d.eE+-]+|NaN|\+Inf)$/;

export class EngineView {
  #before = null;
  #rates = [];
  #timer = 0;

  constructor(root) {
    this.find = (id) => root.getElementById(id);
    root.addEventListener("visibilitychange", () => (root.hidden ? this.pause() : this.start()));
  }

  start() {
    this.pause();
    this.#timer = setInterval(() => this.#poll(), INTERVAL_MS);
    this.#poll();
  }

  pause() {
    clearInterval(this.#timer);
    this.#before = null;
  }

  async #poll() {
    try {
      const answer = await fetch("metrics", { signal: AbortSignal.timeout(5000) });
      if (!answer.ok) throw new Error(answer.statusText);
      this.#show(parse(await answer.text()), performance.now());
      this.#setText("engine-note", "");
    } catch {
      this.#setText("engine-note", "No news from the engine.");
      this.#before = null;
    }
  }

  #show(now, time) {
    const before = this.#before;
    this.#before = { ...now, time };
    this.#setText("running", now.running);
    this.#setText("waiting", now.waiting);
    this.#showBlocks(now.blocks);
    if (!before) return;
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
