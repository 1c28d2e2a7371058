// Numbers as people read them, and elements made without markup: text of peers is only ever set as text.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setData(node, name, value) {
  if (value === null || value === undefined || value === false) delete node.dataset[name];
  else if (node.dataset[name] !== String(value)) node.dataset[name] = value;
}

export const whole = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });

export function short(value) { // 5.2k, 1.3M
  if (value === null || value === undefined || !isFinite(value)) return "–";
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e4]])
    if (Math.abs(value) >= size) return trimmed(value / (unit === "k" ? 1e3 : size)) + unit;
  return Math.abs(value) >= 100 ? whole(value) : trimmed(value);
}

export function trimmed(value) { // three digits
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1023.5 && unit < 5) { value /= 1024; unit++; }
  return `${unit && value < 9.95 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
  if (s < 60) return `${s} s`;
  if (m < 60) return m < 10 ? `${m} min ${s % 60} s` : `${m} min`;
  if (h < 24) return `${h} h ${m % 60} min`;
  return `${d} d ${h % 24} h`;
}

export function clock(seconds) { // 1:07:05
  const s = Math.max(0, Math.floor(seconds)), m = Math.floor(s / 60), h = Math.floor(m / 60);
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m % 60)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

export function pairs(list, rows) { // a <dl> of [term, value, level]; rows are reused
  while (list.children.length > rows.length) list.lastElementChild.remove();
  rows.forEach(([term, value, level], at) => {
    const row = list.children[at] ?? list.appendChild(element("div", {}, element("dt"), element("dd")));
    setText(row.firstElementChild, term);
    setText(row.children[1], value);
    setData(row.children[1], "level", level ?? null);
  });
}
