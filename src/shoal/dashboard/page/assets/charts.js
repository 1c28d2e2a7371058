// Loss and throughput by uPlot, against time, tokens or steps.
import { clock, short, trimmed } from "./format.js";

const SMOOTH = 60; // the bold line is a mean over two times this part of all steps
const MOST = 6000; // points kept here; beyond, every second one is dropped
const MINUTES = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((m) => 60 * m), ...[1, 2, 4, 8, 12, 24, 48, 96, 168, 336, 720].map((h) => 3600 * h)];
const AXES = { time_s: clock, tokens: short, step: short };

export class Charts {
  constructor(loss, rate) {
    this.places = { loss, rate };
    this.columns = { step: [], time_s: [], tokens: [], loss: [], heldout_loss: [], tokens_per_s: [] };
    this.axis = "time_s";
    this.predicted = null;
    this.plots = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    new ResizeObserver(() => this.resize()).observe(loss);
  }

  add(steps, replace) {
    for (const name of Object.keys(this.columns)) {
      if (replace) this.columns[name] = [];
      this.columns[name].push(...steps[name]);
    }
    if (this.columns.step.length > MOST)
      for (const name of Object.keys(this.columns)) this.columns[name] = this.columns[name].filter((_, at) => at % 2);
    if (!this.plots.length || this.heldOut() !== this.measured) this.build();
    else if (replace || steps.step.length) this.draw();
  }

  predict(tokens_per_s) {
    if (tokens_per_s === this.predicted) return;
    this.predicted = tokens_per_s;
    this.build();
  }

  against(axis) {
    this.axis = axis;
    this.build();
  }

  heldOut() {
    return this.columns.heldout_loss.some((value) => value !== null);
  }

  data() {
    const { loss, heldout_loss, tokens_per_s } = this.columns, x = this.columns[this.axis];
    const smooth = smoothed(loss, Math.floor(loss.length / SMOOTH));
    const predicted = this.predicted === null ? [] : [x.map(() => this.predicted)];
    return [[x, loss, smooth, ...(this.heldOut() ? [heldout_loss] : [])], [x, tokens_per_s, ...predicted]];
  }

  build() {
    if (!window.uPlot) return;
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const last = (plot, number, at) => number ?? plot.data[at].at(-1); // of the newest step while nothing is pointed at
    const shown = (format) => (plot, number, at) => ((number = last(plot, number, at)) === null || number === undefined ? "–" : format(number));
    const value = shown(short);
    const line = (label, stroke, width, more = {}) => ({ label, stroke: colour(stroke), width, value, points: { show: this.columns.step.length < 3 }, ...more });
    const kinds = [
      [line("loss", "--raw", 1), line("smoothed", "--accent", 2.5), ...(this.heldOut() ? [line("held out", "--slow", 2, { spanGaps: true, points: { show: true } })] : [])],
      [line("tokens/s", "--accent", 2, { fill: colour("--accent-soft") }), ...(this.predicted === null ? [] : [line("predicted", "--slow", 2, { dash: [8, 6] })])],
    ];
    this.plots.forEach((plot) => plot.destroy());
    this.measured = this.heldOut();
    const size = parseFloat(getComputedStyle(document.documentElement).fontSize), format = AXES[this.axis];
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: `${Math.round(0.8 * size)}px system-ui, sans-serif` };
    const sync = uPlot.sync("steps");
    this.plots = this.data().map((data, at) => new uPlot({
      ...this.size(Object.values(this.places)[at]),
      padding: [8, 10, 0, 0],
      cursor: { sync: { key: sync.key }, drag: { setScale: true } },
      scales: { x: { time: false }, y: at ? { range: (_, __, high) => [0, (high || 1) * 1.1] } : {} },
      series: [{ label: this.axis === "time_s" ? "time" : this.axis === "step" ? "step" : "tokens", value: shown(format) }, ...kinds[at]],
      axes: [{ ...axis, ...(this.axis === "time_s" ? { incrs: MINUTES } : {}), space: 4.5 * size, size: 2 * size, values: (_, ticks) => ticks.map(format) }, { ...axis, size: 3.6 * size, values: (_, ticks) => labels(ticks) }],
    }, data, Object.values(this.places)[at]));
    this.plots.forEach((plot) => plot.root.setAttribute("aria-hidden", "true")); // described below
    this.describe();
  }

  draw() {
    this.data().forEach((data, at) => this.plots[at].setData(data));
    this.describe();
  }

  size(place) {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    return { width: place.clientWidth, height: parseFloat(getComputedStyle(place).getPropertyValue("--plot")) * rem };
  }

  resize() {
    this.plots.forEach((plot, at) => plot.setSize(this.size(Object.values(this.places)[at])));
  }

  describe() { // for who does not see them
    const words = (values, unit) => {
      const known = values.filter((value) => value !== null);
      if (!known.length) return `No ${unit} yet`;
      return `${unit}: ${trimmed(known[0])} at first, ${trimmed(known.at(-1))} now, between ${trimmed(known.reduce((a, b) => Math.min(a, b)))} and ${trimmed(known.reduce((a, b) => Math.max(a, b)))}, over ${this.columns.step.at(-1)} steps`;
    };
    const heldOut = this.heldOut() ? `; ${words(this.columns.heldout_loss, "Held-out loss")}` : "";
    this.places.loss.setAttribute("aria-label", words(this.columns.loss, "Loss") + heldOut);
    const predicted = this.predicted === null ? "" : `; ${trimmed(this.predicted)} predicted`;
    this.places.rate.setAttribute("aria-label", words(this.columns.tokens_per_s, "Tokens per second") + predicted);
  }
}

function smoothed(values, reach) { // the mean over `reach` steps on both sides
  return values.map((_, at) => {
    let sum = 0, count = 0;
    for (const value of values.slice(Math.max(0, at - reach), at + reach + 1)) if (value !== null) { sum += value; count++; }
    return count ? sum / count : null;
  });
}

function labels(ticks) { // all in one unit
  const most = Math.max(...ticks.map(Math.abs)), [unit, size] = most >= 1e9 ? ["B", 1e9] : most >= 1e6 ? ["M", 1e6] : most >= 1e4 ? ["k", 1e3] : ["", 1];
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) / size : 1, digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  return ticks.map((tick) => (tick / size).toFixed(digits) + (tick ? unit : ""));
}
