"use strict";
// Text comes from peers, so it is only ever set as text.
const PARTS = ["handshake", "claim", "verify", "move", "commit"];
const STALE_SECONDS = 5;
const AGAIN_SECONDS = 5;
let heard = 0, refused = false;

const find = id => document.getElementById(id);

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function three(value, units, step) {
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) { value /= step; at += 1; }
  return `${Number(value.toPrecision(3))} ${units[at]}`;
}

function bytes(value) {
  const said = three(value, ["B", "kB", "MB", "GB", "TB"], 1000);
  return value < 1000 ? said : `${said} (${three(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024)})`;
}

function rate(value) {
  if (!(value > 0)) return "";
  return `${three(value, ["B/s", "kB/s", "MB/s", "GB/s"], 1000)} (${three(value * 8, ["b/s", "kb/s", "Mb/s", "Gb/s"], 1000)})`;
}

function seconds(value) {
  if (value <= 0) return "0 s";
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} us`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return value < 120 ? `${Number(value.toPrecision(3))} s` : `${Math.round(value / 60)} min`;
}

function way(record) {
  if (!record.transport) return "nothing yet";
  return record.path === record.transport ? record.path : `${record.transport}, ${record.path || "no path yet"}`;
}
const side = record => `${record.role} (${record.mode})`;

function fill(id, rows, cells, none) {
  // A table that says the same as before is left alone: focus and scroll stay where they are.
  const shown = JSON.stringify(rows.map(row => cells(row).map(cell => cell.nodeType ? cell.outerHTML : cell)));
  const table = find(id);
  if (table.dataset.shown === shown) return;
  table.dataset.shown = shown;
  const lines = rows.map(row => {
    const line = make("tr");
    for (const cell of cells(row)) {
      if (cell.nodeType) line.append(cell);
      else line.append(make("td", cell));
    }
    return line;
  });
  if (!lines.length) {
    const line = make("tr"), cell = make("td", none, "soft");
    cell.colSpan = table.tHead.rows[0].cells.length;
    line.append(cell);
    lines.push(line);
  }
  table.tBodies[0].replaceChildren(...lines);
}

function pairs(id, entries) {
  find(id).replaceChildren(...entries.map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", name), make("dd", value));
    return box;
  }));
}

function split(told) {
  if (told.error) return make("td", `✗ ${told.error}`, "failed");
  const timings = told.record.timings, cell = make("td", undefined, "wide"), bar = make("div", undefined, "bar");
  const total = PARTS.reduce((sum, part) => sum + timings[part], 0);
  PARTS.forEach((part, at) => {
    if (!(timings[part] > 0)) return;
    const piece = make("span", undefined, `p${at}`);
    piece.style.width = `${100 * timings[part] / total}%`;
    piece.title = `${part} ${seconds(timings[part])}`;
    bar.append(piece);
  });
  bar.setAttribute("aria-hidden", "true");
  const said = PARTS.filter(part => timings[part] > 0).map(part => `${part} ${seconds(timings[part])}`);
  cell.append(bar, make("span", said.join(" · "), "soft"));
  return cell;
}

function show(view) {
  document.title = `${view.name} · kvferry`;
  find("name").textContent = view.name;
  find("up").textContent = `up ${seconds(view.up_seconds)}`;
  const stats = view.stats, count = name => stats ? String(stats[name]) : "–";
  const ways = view.tallied.ways, sum = name => String(ways.reduce((all, one) => all + one[name], 0));
  pairs("counts", [
    ["in flight", count("transfers")], ["leases held", count("holds")], ["copies now", count("copies")],
    ["peers connected", count("peers")], ["transfers ended", sum("transfers")], ["failed", sum("failed")],
  ]);
  pairs("facts", view.facts);
  const alarm = find("alarm");
  alarm.hidden = !view.alarms.length;
  const said = view.alarms.join("\n");
  if (alarm.dataset.said !== said) {
    alarm.dataset.said = said;
    alarm.querySelector("ul").replaceChildren(...view.alarms.map(text => make("li", text)));
  }
  const held = view.transfers.filter(one => one.phase === "held");
  fill("in-flight", view.transfers.filter(one => one.phase !== "held"), one => [
    one.record.request_id, one.record.peer, side(one.record), one.phase, bytes(one.record.nbytes),
    way(one.record), seconds(one.seconds), seconds(one.lease_seconds),
  ], "Nothing moves now.");
  fill("leases", held, one => [
    one.record.request_id, side(one.record), seconds(one.seconds), seconds(one.lease_seconds),
  ], "None.");
  fill("ways", [...ways].reverse(), one => [
    one.peer || "nobody", `${one.role} (${one.mode})`, (one.fallback ? "▲ " : "") + way(one), String(one.transfers),
    bytes(one.nbytes), rate(one.seconds > 0 ? one.nbytes / one.seconds : 0), rate(one.last_bytes_per_second),
    one.failed ? make("td", `${one.failed}: ${one.last_error}`, "failed") : "0",
  ], "Nothing has moved yet.");
  fill("recent", view.tallied.recent, told => [
    new Date(told.at_seconds * 1000).toLocaleTimeString(), seconds(told.record.timings.total), split(told),
    bytes(told.record.nbytes), way(told.record), side(told.record), told.record.peer, told.record.request_id,
  ], "Nothing has ended yet.");
}

function tell() {
  const link = find("link"), age = (Date.now() - heard) / 1000, live = heard > 0 && age < STALE_SECONDS;
  const said = live ? "● live" : heard ? `▲ no word for ${Math.round(age)} s: what is shown is old`
    : refused ? "▲ refused: too many pages are open here, close one" : "connecting";
  if (link.textContent !== said) link.textContent = said;
  link.classList.toggle("live", live);
}

find("legend").append("Parts, in order:", ...PARTS.flatMap((part, at) => [make("span", "", `swatch p${at}`), part]));

function listen() {
  const events = new EventSource("events");
  events.onmessage = event => { heard = Date.now(); show(JSON.parse(event.data)); tell(); };
  // A browser comes back by itself after a connection that broke, not after a refusal.
  events.onerror = () => {
    if (events.readyState !== EventSource.CLOSED) return;
    refused = true;
    tell();
    setTimeout(listen, AGAIN_SECONDS * 1000);
  };
}

listen();
setInterval(tell, 1000);
