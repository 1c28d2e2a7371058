// The page of a run: takes server-sent events and shows them. It never sends anything and never makes markup of text.
import { Charts } from "./charts.js";
import { bytes, clock, duration, element, pairs, setData, setText, short, whole } from "./format.js";
import { RegionMap } from "./map.js";
import { Pipeline, summary } from "./pipeline.js";
import { PeerTable } from "./table.js";

const LEVELS = {
  removed: "bad", trouble: "bad", unsaved: "bad", stopped: "bad", refused: "bad", skipped: "bad", killed: "bad",
  stall: "slow", spike: "slow", network: "slow", recovered: "slow", left: "slow", joined: "good", checkpoint: "good", finished: "good",
};
const EVENTS = 400; // kept here
const AGE_S = 20; // of a status, beyond which it is said
const SPOKEN_MS = 4000; // between two announcements to screen readers
const $ = (selector) => document.querySelector(selector);

const charts = new Charts($("#loss .chart"), $("#rate .chart"));
const pipeline = new Pipeline($("#stages"), $("#pipeline"));
const map = new RegionMap($("#map"));
const table = new PeerTable($("#peers table"));
const events = new Map(); // by serial and time, oldest first
let fields = [], state = null, lastLoss = null, announced = { events: null, phase: "" }, waiting = [], connected = false;

function receive(update) {
  if (update.whole) { fields = update.peer_fields; events.clear(); }
  state = update.state;
  const peers = state.peers.map((row) => Object.fromEntries(fields.map((name, at) => [name, row[at]])));
  const losses = update.steps.loss.filter((loss) => loss !== null);
  if (update.whole) lastLoss = null;
  lastLoss = losses.at(-1) ?? lastLoss;
  connected = true;
  showHead();
  showFigures(peers);
  for (const part of ["#pipeline", "#peers", "#traffic"]) $(part).hidden = !state.stages.length; // a machine alone has none
  pipeline.show(state, peers);
  map.show(state.spots, peers);
  setText($("#survives"), state.survives ? `The run ${state.survives}.` : "");
  charts.predict(state.forecast?.tokens_per_s ?? null);
  charts.add(update.steps, update.whole);
  showEvents();
  showAccount();
  showForecast();
  showContributors();
  table.show(peers);
  setText($("#peers-title"), `Peers (${summary(peers)})`);
}

function showHead() {
  document.title = `${state.name}: ${state.step}/${state.steps}`;
  setText($("#name"), state.name);
  setText($("#phase"), state.phase);
  setData($("#phase"), "phase", state.phase);
  setText($("#words"), state.phase === "starting" ? state.words : "");
  setText($("#elapsed"), duration(state.elapsed_s));
  $("#progress").value = state.steps ? state.step / state.steps : 0;
  const bad = state.phase === "stopped" || state.phase === "dead" ? state.words : "";
  const lines = [[bad, state.advice], [state.unsaved, ""]].filter(([title, text]) => title || text);
  const ended = state.phase === "ended";
  if (ended) lines.push(["The run has ended early, or its account does not balance", "see the account"]);
  const alert = $("#alert");
  alert.hidden = !lines.length;
  setData(alert, "level", ended && lines.length === 1 ? "slow" : null);
  const words = lines.flat().join("\n");
  if (alert.dataset.words !== words) {
    alert.dataset.words = words;
    alert.replaceChildren(...lines.flatMap(([title, text]) => [element("strong", {}, title), element("span", {}, text)]));
  }
  if (announced.phase && announced.phase !== state.phase) announce(`The run is ${state.phase}. ${bad}`);
  announced.phase = state.phase;
  showAge();
}

function showAge() {
  if (!state) return;
  const over = ["finished", "ended", "dead"].includes(state.phase);
  const at = new Date(Date.now() - 1000 * state.age_s).toLocaleString();
  const late = !over && state.age_s > AGE_S;
  setText($("#updated"), connected ? (over ? `as of ${at}` : late ? `the launcher has written nothing for ${duration(state.age_s)}` : "live") : "");
}

function showFigures(peers) {
  const living = peers.filter((peer) => !["gone", "left"].includes(peer.state)), tokens = state.step * state.tokens_per_step;
  const redone = state.account.redone;
  const tiles = [
    ["step", `${whole(state.step)}`, `of ${whole(state.steps)} · ${state.steps ? Math.floor((100 * state.step) / state.steps) : 0} %`],
    ["loss", lastLoss === null ? "–" : lastLoss.toFixed(3), "newest step"],
    ["tokens/s", state.tokens_per_s ? short(state.tokens_per_s) : "–", state.forecast ? `${short(state.forecast.tokens_per_s)} predicted` : "last 20 steps"],
    ["tokens", short(tokens), `${short(state.tokens_per_step)} per step`],
    state.remaining_s === null ? ["trained for", duration(state.elapsed_s), "this session"] : ["time to go", duration(state.remaining_s), `${duration(state.elapsed_s)} so far`],
    ...(state.stages.length ? [["peers", String(living.length), summary(living)]] : []),
    ["redone", whole(redone), redone && state.account.issued ? `${((100 * redone) / (state.account.issued * state.stages.length || 1)).toFixed(2)} % of the work` : "no work was lost"],
  ];
  const list = $("#figures dl");
  tiles.forEach(([term, value, note], at) => {
    const tile = list.children[at] ?? list.appendChild(element("div", {}, element("dt"), element("dd", {}, element("span"), element("small"))));
    setText(tile.children[0], term);
    setText(tile.children[1].children[0], value);
    setText(tile.children[1].children[1], note);
  });
}

function showEvents() {
  const first = announced.events === null, fresh = [];
  for (const event of state.events) {
    const key = `${event.serial} ${event.elapsed_s}`;
    if (events.has(key)) continue;
    events.set(key, event);
    fresh.push(event);
  }
  while (events.size > EVENTS) events.delete(events.keys().next().value);
  if (!first) for (const event of fresh) if (LEVELS[event.kind] && event.kind !== "network") announce(`${event.kind}: ${event.text}`);
  announced.events = true;
  if (fresh.length) drawEvents();
}

function drawEvents() {
  const all = $("#commits").checked, shown = [...events.values()].filter((event) => all || !["commit", "round"].includes(event.kind)).reverse();
  $("#events ol").replaceChildren(...shown.map((event) => {
    const text = element("span", { class: "text" }, event.label ? element("span", { class: "who" }, `${event.label}: `) : "", event.text);
    const item = element("li", {}, element("time", {}, clock(event.elapsed_s)), element("span", { class: "kind" }, event.kind), text);
    setData(item, "level", LEVELS[event.kind] ?? null);
    return item;
  }));
}

function showAccount() {
  const bad = { lost: "bad", "counted twice": "bad", undone: "slow", skipped: "slow" };
  pairs($("#account dl"), Object.entries(state.account).map(([name, count]) => [name, whole(count), count && bad[name] ? bad[name] : null]));
  $("#summary").hidden = !state.summary;
  setText($("#summary pre"), state.summary);
  const kinds = Object.entries(state.sent), total = kinds.reduce((sum, [, count]) => sum + count, 0);
  pairs($("#traffic dl"), [...kinds.map(([kind, count]) => [kind, bytes(count)]), ["in all", bytes(total)]]);
}

function showForecast() {
  const plan = state.forecast;
  $("#forecast").hidden = !plan;
  if (!plan) return;
  const step_s = state.tokens_per_s ? state.tokens_per_step / state.tokens_per_s : null;
  const off = (measured, predicted) => (measured ? ` (${measured >= predicted ? "+" : "−"}${Math.abs(100 * (measured / predicted - 1)).toFixed(0)} %)` : "");
  pairs($("#forecast dl"), [
    ["seconds per step, predicted", plan.step_s.toFixed(2)],
    ["measured", step_s ? step_s.toFixed(2) + off(step_s, plan.step_s) : "–"],
    ["tokens/s, predicted", short(plan.tokens_per_s)],
    ["measured", state.tokens_per_s ? short(state.tokens_per_s) + off(state.tokens_per_s, plan.tokens_per_s) : "–"],
  ]);
  setText($("#forecast .note"), [plan.text, plan.bottleneck ? `Predicted bottleneck: ${plan.bottleneck}` : ""].filter(Boolean).join(". "));
}

function showContributors() {
  const list = state.contributors, body = $("#contributors tbody");
  $("#contributors").hidden = !list.length;
  setText($("#contributors-title small"), `${whole(state.contributor_count)}, of ${whole(state.credited)} steps`);
  while (body.children.length > list.length) body.lastElementChild.remove();
  list.forEach((one, at) => {
    const row = body.children[at] ?? body.appendChild(element("tr", {}, element("td"), element("th", { scope: "row" }), ...Array.from({ length: 6 }, () => element("td"))));
    const cells = [`${one.rank}`, one.person, `${(100 * one.share).toFixed(1)} %`, whole(one.microbatches), short(one.tokens), whole(one.keys), one.seconds ? duration(one.seconds) : "–", one.evictions ? `${one.evictions}×` : "–"];
    cells.forEach((text, column) => setText(row.cells[column], text));
  });
}

function announce(text) {
  waiting.push(text);
}

setInterval(() => {
  if (!waiting.length) return;
  setText($("#announce"), waiting.slice(-3).join(". "));
  waiting = [];
}, SPOKEN_MS);

function disconnected(words) {
  connected = false;
  setText($("#phase"), "disconnected");
  setData($("#phase"), "phase", "disconnected");
  setText($("#words"), words);
  setText($("#updated"), state ? `last update ${new Date().toLocaleTimeString()}` : "");
}

const source = new EventSource("/events");
source.onmessage = (message) => receive(JSON.parse(message.data));
source.addEventListener("trouble", (message) => disconnected(JSON.parse(message.data)));
source.onerror = () => {
  if (connected || source.readyState === EventSource.CLOSED)
    disconnected(source.readyState === EventSource.CLOSED ? "Reload this page." : "the page's server does not answer");
};
$("#commits").addEventListener("change", drawEvents);
for (const input of document.querySelectorAll(".axis input")) input.addEventListener("change", () => charts.against(input.value));
