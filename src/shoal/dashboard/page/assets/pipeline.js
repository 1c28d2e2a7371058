// The pipeline as a picture: stages with their peers, and what flows between them.
import { bytes, element, setData, setText, trimmed } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const DENSE = 48; // peers beyond which each is only a mark
const MANY = 6; // stages beyond which they wrap

export class Pipeline {
  constructor(list, section) {
    this.list = list;
    this.section = section;
    this.stages = [];
  }

  show(state, peers) {
    const unseated = peers.some((peer) => peer.stage === null) ? 1 : 0;
    const count = state.stages.length + unseated;
    while (this.stages.length > count) this.stages.pop().item.remove();
    while (this.stages.length < count) this.stages.push(this.stage());
    this.section.classList.toggle("dense", peers.length > DENSE);
    this.section.classList.toggle("many", state.stages.length > MANY);
    this.list.style.gridTemplateColumns = state.stages.length > MANY ? "" : this.stages.map((_, at) => (state.stages[at + 1] ? "minmax(0, 1fr) auto" : "minmax(0, 1fr)")).join(" ");
    const most = Math.max(1, ...state.stages.map((stage) => Math.max(stage.activations_Bps, stage.gradients_Bps)));
    this.stages.forEach((stage, at) => {
      const seated = at < state.stages.length;
      const here = peers.filter((peer) => peer.stage === (seated ? at : null));
      this.fill(stage, seated ? { ...state.stages[at], number: at, bottleneck: state.bottleneck === at, needed: ["running", "stopped"].includes(state.phase) } : null, here, peers.length > DENSE);
      const next = state.stages[at + 1];
      stage.flow.hidden = !next;
      if (next) {
        this.flow(stage.forward, state.stages[at].activations_Bps, most);
        this.flow(stage.back, next.gradients_Bps, most);
      }
    });
  }

  stage() {
    const title = element("strong"), rate = element("span"), badge = element("b");
    const parts = { title, rate, badge, inside: element("div", { class: "inside" }), peers: element("ul"), nodes: new Map() };
    parts.forward = arrow("forward");
    parts.back = arrow("back");
    parts.flow = element("div", { class: "flow" }, parts.forward.node, parts.back.node);
    parts.box = element("div", { class: "box" }, element("h3", {}, title, rate, badge), parts.inside, parts.peers);
    parts.item = element("li", { class: "stage" }, parts.box, parts.flow);
    this.list.append(parts.item);
    return parts;
  }

  fill(stage, figures, peers, dense) {
    const living = peers.filter((peer) => !["gone", "left"].includes(peer.state));
    const empty = figures?.needed && !living.length;
    setText(stage.title, figures ? `Stage ${figures.number}` : "No stage yet");
    setText(stage.rate, figures && figures.rate ? `${trimmed(figures.rate)} mb/s` : "");
    if (!stage.rate.title) stage.rate.title = "microbatches per second that its peers pass when busy";
    setText(stage.badge, figures?.bottleneck ? "bottleneck" : empty ? "nobody serves it" : "");
    setData(stage.item, "bottleneck", figures?.bottleneck || null);
    setData(stage.item, "empty", empty || null);
    const inside = [];
    if (dense) inside.push(exceptions(peers));
    if (figures?.averaging_Bps) inside.push(`averaging ${bytes(figures.averaging_Bps)}/s`);
    if (figures?.state_Bps) inside.push(`state ${bytes(figures.state_Bps)}/s`);
    setText(stage.inside, inside.join("\n"));
    const labels = new Set(peers.map((peer) => peer.label));
    for (const [label, node] of stage.nodes) if (!labels.has(label)) { node.remove(); stage.nodes.delete(label); }
    peers.forEach((peer, at) => {
      let node = stage.nodes.get(peer.label);
      if (!node) {
        node = element("li", { class: "peer" }, element("span", { class: "mark" }), element("span", { class: "label" }), element("span", { class: "star" }), element("span", { class: "figure" }));
        stage.nodes.set(peer.label, node);
      }
      if (stage.peers.children[at] !== node) stage.peers.insertBefore(node, stage.peers.children[at] ?? null);
      const [mark, label, star, figure] = node.children;
      setData(node, "state", peer.state);
      setData(node, "leads", peer.leading || null);
      setData(mark, "state", peer.state);
      setText(label, peer.label);
      setText(star, peer.leading ? "★" : "");
      star.hidden = !peer.leading;
      setText(figure, ["gone", "left", "loading"].includes(peer.state) ? peer.state : peer.rate ? `${trimmed(peer.rate)}/s` : peer.machine);
      const words = `${peer.label}, ${peer.state}${peer.leading ? ", leads" : ""}${peer.reason ? `: ${peer.reason}` : ""}`;
      if (node.title !== words) { node.title = words; star.setAttribute("aria-label", "leads"); star.setAttribute("role", "img"); }
    });
    stage.peers.setAttribute("aria-hidden", dense); // the line above says how many; the table has each
  }

  flow(wire, Bps, most) {
    setText(wire.text, Bps ? `${bytes(Bps)}/s` : "–");
    wire.line.setAttribute("stroke-width", Bps ? (1.2 + 3 * (Bps / most)).toFixed(1) : 1);
    setData(wire.line, "flows", Bps ? 1 : null);
  }
}

export function summary(peers) {
  const counts = new Map();
  for (const peer of peers) counts.set(peer.state, (counts.get(peer.state) ?? 0) + 1);
  return [...counts].map(([state, count]) => `${count} ${state}`).join(", ") || "nobody";
}

function exceptions(peers) { // how many, and who does not serve
  const others = peers.filter((peer) => peer.state !== "serving");
  return `${peers.length} peers${others.length ? `: ${summary(others)}` : ""}`;
}

function arrow(direction) {
  const drawing = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "path"), tip = document.createElementNS(SVG, "path");
  drawing.setAttribute("viewBox", "0 0 80 12");
  drawing.setAttribute("aria-hidden", "true");
  line.setAttribute("class", "wire");
  line.setAttribute("d", direction === "forward" ? "M0 6H72" : "M8 6H80");
  tip.setAttribute("class", "tip");
  tip.setAttribute("d", direction === "forward" ? "M70 1 80 6 70 11Z" : "M10 1 0 6 10 11Z");
  drawing.append(line, tip);
  const text = element("div");
  const hidden = element("span", { class: "hidden" }, direction === "forward" ? "activations forward " : "gradients back ");
  const node = element("div", { class: direction, title: direction === "forward" ? "activations to the next stage" : "gradients back" }, drawing, hidden, text);
  return { node, line, text };
}

