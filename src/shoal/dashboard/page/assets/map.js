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
    badge.style.left = `${(100 * spot.x) / WIDTH}%`;
    badge.style.top = `${(100 * spot.y) / HEIGHT}%`;
    badge.classList.toggle("west", spot.x > 0.78 * WIDTH); // its name would leave the map
    setData(badge, "state", WORST.find((state) => peers.some((peer) => peer.state === state)));
    setText(count, String(living.length));
    setText(name, spot.title);
    const words = `${spot.title}: ${summary(peers)}`;
    if (badge.title !== words) badge.title = words;
    count.setAttribute("aria-label", `${summary(peers)} in`);
  }
}
