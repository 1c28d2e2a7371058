// Peers as a table that can be sorted by any column.
import { bytes, duration, element, setData, setText, trimmed } from "./format.js";

const natural = new Intl.Collator("en", { numeric: true }).compare;
const ORDER = ["gone", "slow", "loading", "waiting", "serving", "left"];
const known = (show) => (value) => (value === null || value === undefined ? "–" : show(value));
const COLUMNS = [ // field, title, in words, shown how
  ["label", "peer", true, String],
  ["stage", "stage", false, known(String)],
  ["state", "state", true, String],
  ["rate", "mb/s", false, known((value) => (value ? trimmed(value) : "–"))],
  ["queue_s", "waiting", false, (value) => (value ? `${trimmed(value)} s` : "–")],
  ["send_Bps", "sends", false, (value) => (value ? `${bytes(value)}/s` : "–")],
  ["receive_Bps", "receives", false, (value) => (value ? `${bytes(value)}/s` : "–")],
  ["sent", "sent", false, (value) => (value ? bytes(value) : "–")],
  ["received", "received", false, (value) => (value ? bytes(value) : "–")],
  ["memory", "memory", false, (value) => (value ? bytes(value) : "–")],
  ["join_s", "joined in", false, (value) => (value ? duration(value) : "–")],
  ["machine", "machine", true, (value) => value || "this one"],
  ["region", "region", true, (value) => value || "–"],
  ["reason", "reason", true, String],
];

export class PeerTable {
  constructor(table) {
    this.body = table.tBodies[0];
    this.rows = new Map();
    this.by = "stage";
    this.down = false;
    this.peers = [];
    this.heads = COLUMNS.map(([field, title, words]) => {
      const button = element("button", { type: "button" }, title);
      button.addEventListener("click", () => this.sortBy(field));
      const head = element("th", { scope: "col", ...(words ? { class: "words" } : {}) }, button);
      table.tHead.rows[0].append(head);
      return head;
    });
    this.mark();
  }

  sortBy(field) {
    this.down = this.by === field ? !this.down : !["label", "stage", "state", "machine", "region", "reason"].includes(field);
    this.by = field;
    this.mark();
    this.show(this.peers);
  }

  mark() {
    COLUMNS.forEach(([field], at) => {
      if (field === this.by) this.heads[at].setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else this.heads[at].removeAttribute("aria-sort");
    });
  }

  show(peers) {
    this.peers = peers;
    const labels = new Set(peers.map((peer) => peer.label));
    for (const [label, row] of this.rows) if (!labels.has(label)) { row.remove(); this.rows.delete(label); }
    [...peers].sort((a, b) => this.compare(a, b)).forEach((peer, at) => {
      const row = this.rows.get(peer.label) ?? this.row(peer.label);
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null);
      setData(row, "state", peer.state);
      COLUMNS.forEach(([field, , , shown], column) => {
        const cell = row.cells[column];
        if (field === "state") { setData(cell.firstElementChild, "state", peer.state); setText(cell.lastElementChild, peer.state + (peer.leading ? ", leads" : "")); }
        else setText(cell, shown(peer[field]));
      });
    });
  }

  row(label) {
    const row = element("tr");
    for (const [field, , words] of COLUMNS) {
      const cell = field === "label" ? element("th", { scope: "row" }) : element("td", words ? { class: "words" } : {});
      if (field === "state") { cell.classList.add("state"); cell.append(element("span", { class: "mark", "aria-hidden": "true" }), element("span")); }
      row.append(cell);
    }
    this.rows.set(label, row);
    return row;
  }

  compare(a, b) {
    const [x, y] = [a[this.by], b[this.by]], turn = this.down ? -1 : 1;
    let order;
    if (x === null || y === null) order = (x === null ? 1 : 0) - (y === null ? 1 : 0) || 0;
    else if (this.by === "state") order = turn * (ORDER.indexOf(x) - ORDER.indexOf(y));
    else order = turn * (typeof x === "number" ? x - y : natural(x, y));
    return order || natural(a.label, b.label);
  }
}
