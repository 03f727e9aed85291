// The table of the servers that change together with this one.

import { el } from "./dom.js";

const COLUMNS = [
  ["Server", (peer) => [el("code", {}, peer.url ?? "not known"), peer.here ? " (this one)" : ""]],
  ["State", (peer) => [peer.ready ? "ready" : "not ready", el("span", { class: "reason" }, peer.reason ?? "")]],
  ["Changes", (peer) => [peer.number?.toLocaleString() ?? "–"]],
  ["Weights", (peer) => [versionsText(peer.models)]],
  ["Adapters", (peer) => [versionsText(peer.adapters)]],
];

/** Names with their versions; those that never changed have the label "default". */
export function versionsText(versions = {}) {
  return Object.entries(versions).map(([name, version]) => `${name}: ${version}`).join(", ") || "–";
}

/** Show a row for each server of the fleet; the section is hidden without any. */
export function showPeers(section, peers) {
  section.hidden = !peers.length;
  const head = el("tr", {}, ...COLUMNS.map(([name]) => el("th", { scope: "col" }, name)));
  const rows = peers.map((peer) =>
    el("tr", {}, ...COLUMNS.map(([name, value]) => el("td", { "data-name": name }, ...value(peer)))),
  );
  section.querySelector("table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}
