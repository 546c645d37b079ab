// A small chart of the last minute: a point for every second, its height relative to the highest one shown.

const POINTS = 60;
const [WIDTH, HEIGHT] = [120, 32];
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  #series;

  // `figure` has a figcaption with the name and an output for the highest value; `names` are those of the curves.
  constructor(figure, names) {
    this.names = names;
    this.title = figure.querySelector("figcaption").firstChild.data.trim();
    this.most = figure.querySelector("output");
    this.svg = figure.querySelector("svg");
    this.paths = [path("area"), ...names.map((_, at) => path(at ? "curve second" : "curve"))];
    this.svg.replaceChildren(...this.paths);
    this.clear();
  }

  clear() {
    this.#series = this.names.map(() => []);
  }

  // One value per curve.
  add(...values) {
    this.#series = this.#series.map((series, at) => [...series, values[at]].slice(-POINTS));
    this.#draw();
  }

  #draw() {
    const highest = Math.max(...this.#series.flat());
    const step = WIDTH / (POINTS - 1);
    const from = WIDTH - step * (this.#series[0].length - 1);
    const lines = this.#series.map((series) => series.map((value, at) => `${(from + at * step).toFixed(2)},${(HEIGHT - 1 - ((HEIGHT - 3) * value) / Math.max(highest, 1e-9)).toFixed(2)}`).join("L"));
    this.paths[0].setAttribute("d", `M${from.toFixed(2)},${HEIGHT}L${lines[0]}L${WIDTH},${HEIGHT}Z`);
    lines.forEach((line, at) => this.paths[at + 1].setAttribute("d", `M${line}`));
    this.most.textContent = highest > 0 ? `most ${shown(highest)}` : "";
    const now = this.names.map((name, at) => `${name} ${shown(this.#series[at].at(-1))}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title} over the last minute: now ${now}; most ${shown(highest)}`);
  }
}

export function shown(value) {
  return value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString();
}

function path(className) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", className);
  return made;
}
