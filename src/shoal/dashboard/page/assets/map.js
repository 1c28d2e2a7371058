// Where the peers are: a badge with their number at each region that is known, on a map of the world.
import { element, setData, setText } from "./format.js";
import { summary } from "./pipeline.js";

const WIDTH = 1000, HEIGHT = 435; // of land.svg
const WORST = ["slow", "gone", "loading", "waiting", "serving", "left"];

export class RegionMap {
  constructor(section) {
    this.section = section;
    this.list = section.querySelector("ol");
    this.note = section.querySelector(".note");
    this.badges = new Map();
  }

  show(spots, peers) {
    const regions = Object.keys(spots);
    this.section.hidden = !regions.length;
    for (const [region, badge] of this.badges) if (!(region in spots)) { badge.remove(); this.badges.delete(region); }
    regions.forEach((region) => this.fill(this.badges.get(region) ?? this.badge(region), spots[region], peers.filter((peer) => peer.region === region)));
    this.place(regions.map((region) => ({ badge: this.badges.get(region), x: spots[region].x, y: spots[region].y })));
    const elsewhere = peers.filter((peer) => !(peer.region in spots)).length;
    setText(this.note, elsewhere ? `${elsewhere} more in regions that are not known: network.region tells one` : "");
  }

  badge(region) {
    const badge = element("li", {}, element("b"), element("span"));
    this.badges.set(region, badge);
    this.list.append(badge);
    return badge;
  }

  fill(badge, spot, peers) {
    const living = peers.filter((peer) => !["gone", "left"].includes(peer.state));
    const [count, name] = badge.children;
    setData(badge, "state", WORST.find((state) => peers.some((peer) => peer.state === state)));
    setText(count, String(living.length));
    setText(name, spot.title);
    const words = `${spot.title}: ${summary(peers)}`;
    if (badge.title !== words) badge.title = words;
    count.setAttribute("aria-label", `${summary(peers)} in`);
  }

  place(marks) { // neighbours are moved apart, and a name that would lie over another mark is left to the tooltip and the table
    const shown = this.list.parentElement.clientWidth, size = marks[0]?.badge.firstElementChild.offsetHeight;
    if (!shown || !size) return;
    const apart = (size + 3) * (WIDTH / shown);
    for (let round = 0; round < 50; round++)
      marks.forEach((one, at) => marks.slice(0, at).forEach((other) => pushed(one, other, apart)));
    for (const { badge, x, y } of marks) {
      badge.style.left = `${(100 * Math.min(Math.max(x, 0), WIDTH)) / WIDTH}%`;
      badge.style.top = `${(100 * Math.min(Math.max(y, 0), HEIGHT)) / HEIGHT}%`;
      badge.classList.toggle("west", x > 0.78 * WIDTH); // its name would leave the map
      badge.classList.remove("bare");
    }
    const taken = marks.map(({ badge }) => badge.firstElementChild.getBoundingClientRect());
    marks.forEach(({ badge }, own) => {
      const name = badge.lastElementChild.getBoundingClientRect();
      if (taken.some((other, at) => at !== own && overlap(name, other))) badge.classList.add("bare");
      else taken.push(name);
    });
  }
}

function pushed(one, other, apart) {
  const dx = one.x - other.x || 1, dy = one.y - other.y, far = Math.hypot(dx, dy);
  if (far >= apart) return;
  const by = (apart - far) / 2 / far;
  one.x += dx * by; one.y += dy * by;
  other.x -= dx * by; other.y -= dy * by;
}

function overlap(a, b) {
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}
