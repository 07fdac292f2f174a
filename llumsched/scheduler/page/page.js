// SPDX-License-Identifier: Apache-2.0
// The cluster as `/events` tells it: states, which replace what was known. Text from elsewhere is set as text only.
"use strict";

const WINDOW_S = 120; // of history that is kept
const SPANS_S = [30, 60, 120]; // of which a young cluster's curves take the shortest that holds them
const MAX_ROWS = 64;
const MAX_SAMPLES = 40000;
const NUM_COLOURS = 8;
const MAX_MOVES = 100;
const SHOWN_MOVES = 12;
const ARC_LINGERS_S = 4;
const OLD_S = 2;
const WANTED_SHARE = 0.95; // of requests that meet their objectives; fewer are shown as trouble
const METRICS = {
  kv: { of: (instance) => instance.kv, most: () => 1, text: (value) => `${Math.round(value * 100)} %` },
  running: { of: (instance) => instance.running, most: nice, text: String },
  waiting: { of: (instance) => instance.waiting, most: nice, text: String },
};

const instances = new Map(); // id -> its newest state, with `samples`, `colour` and `heardAt`
const moves = new Map(); // number -> the rescheduler's record
const rows = new Map(); // id -> table row
const arcs = new Map(); // number -> SVG path
let metric = "kv";
let numColoured = 0;
let overview = null; // of the newest event: objectives, caches, wanted instances; null if there is none
let view = null; // of the newest event: connected, age_s, rescheduling; and `at`, when it came
let offset = 0; // Unix time of the scheduler minus our clock
let fresh = true; // the next event is the first of its connection
let linked = false;

const element = (id) => document.getElementById(id);
const clock = () => performance.now() / 1000;

function nice(greatest) {
  const step = 10 ** Math.floor(Math.log10(Math.max(greatest, 1)));
  return Math.max(4, Math.ceil(greatest / step) * step);
}

// ------------------------------------------------------------------------------------------------------------ Events

function listen() {
  const source = new EventSource("events");
  source.onopen = () => { fresh = true; linked = true; };
  source.onerror = () => { linked = false; };
  source.onmessage = (event) => { take(JSON.parse(event.data)); };
}

function take(event) {
  const now = clock();
  offset = event.at_s - now;
  view = { connected: event.connected, age_s: event.age_s, rescheduling: event.rescheduling, at: now };
  const told = new Set(event.instances.map((instance) => instance.id));
  const gone = fresh ? [...instances.keys()].filter((id) => !told.has(id)) : event.left.filter((id) => !told.has(id));
  fresh = false;
  overview = event.overview;
  for (const id of gone) instances.delete(id);
  for (const told of event.instances) put(told, now);
  for (const move of event.moves) {
    moves.delete(move.number);
    moves.set(move.number, { ...move, heardAt: now });
    if (moves.size > MAX_MOVES) moves.delete(moves.keys().next().value);
  }
  // For tests and for whoever looks into the console.
  window.cluster = { instances, moves, view, overview };
}

function put(told, now) {
  const known = instances.get(told.id);
  const same = known !== undefined && known.incarnation === told.incarnation;
  const colour = known ? known.colour : numColoured++;
  const instance = { ...told, colour, samples: same ? known.samples : [], heardAt: now };
  instances.set(told.id, instance);
  if (told.kv === null) return;
  const samples = instance.samples;
  const gap = WINDOW_S / Math.max(60, MAX_SAMPLES / instances.size);
  // Closer than can be seen: the newer one stands for both.
  if (samples.length > 1 && now - samples[samples.length - 2].at < gap) samples.pop();
  samples.push({ at: now, kv: told.kv, running: told.running, waiting: told.waiting });
  while (samples.length > 1 && samples[1].at < now - WINDOW_S) samples.shift();
}

// ------------------------------------------------------------------------------------------------------------ Drawing

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function colourOf(instance) { return instance && instance.colour < NUM_COLOURS ? `--c${instance.colour}` : "--other"; }

function draw() {
  const now = clock();
  const sorted = [...instances.values()].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  drawLink(now);
  drawTotals(sorted, now);
  drawOverview(sorted);
  drawRows(sorted, now);
  drawArcs(now);
  drawMoves(now);
  drawChart(sorted, now);
}

function drawLink(now) {
  const pill = element("link");
  const age = view === null ? 0 : view.age_s + now - view.at;
  const lost = !linked && view !== null;
  let [text, mood] = ["live", "good"];
  if (view === null) [text, mood] = ["connecting", ""];
  else if (lost) [text, mood] = [`scheduler not reached for ${seconds(now - view.at)}`, "bad"];
  else if (!view.connected) [text, mood] = [`view ${seconds(age)} old: the CMS is lost`, "bad"];
  else if (now - view.at > OLD_S) [text, mood] = [`view ${seconds(now - view.at)} old`, "warn"];
  pill.textContent = text;
  pill.className = `pill ${mood}`;
}

function drawTotals(sorted, now) {
  const loaded = sorted.filter((instance) => instance.kv !== null);
  const sum = (name) => loaded.reduce((total, instance) => total + instance[name], 0);
  const kv = loaded.map((instance) => instance.kv);
  const recent = [...moves.values()].filter((move) => now + offset - move.began_s < 60);
  const models = [...new Set(sorted.map((instance) => instance.model))];
  element("model").textContent = models.slice(0, 3).join(", ") + (models.length > 3 ? `, ${models.length - 3} more` : "");
  element("total-open").textContent = `${sorted.filter((i) => i.state === "open").length} of ${sorted.length}`;
  element("total-running").textContent = sum("running");
  element("total-waiting").textContent = sum("waiting");
  element("total-kv").textContent = kv.length ? METRICS.kv.text(sum("kv") / kv.length) : "–";
  const spread = kv.reduce((most, one) => Math.max(most, one), 0) - kv.reduce((least, one) => Math.min(least, one), 1);
  element("total-spread").textContent = kv.length ? `${Math.round(spread * 100)} pp` : "–";
  element("total-moves").textContent = view && view.rescheduling
    ? recent.reduce((total, move) => total + move.num_moved, 0) : "–";
}

// Counts [part, whole] as a share.
function share([part, whole]) { return `${Math.round((part / whole) * 100)} %`; }

function show(section, words) {
  element(section).hidden = words === null;
  if (words !== null) text(element(`total-${section}`), words);
}

function drawOverview(sorted) {
  const told = overview || { attainment: {}, cached: null, scaling: null };
  const models = Object.entries(told.attainment);
  const met = models.reduce(([part, whole], [, one]) => [part + one[0], whole + one[1]], [0, 0]);
  const urgent = sorted.reduce((total, instance) => total + (instance.urgent || 0), 0);
  const wanted = told.scaling || [];
  show("attainment", met[1] ? share(met) : null);
  show("cached", told.cached && told.cached[1] ? share(told.cached) : null);
  show("urgent", urgent ? String(urgent) : null);
  const sum = (name) => wanted.reduce((total, one) => total + one[name], 0);
  show("wanted", wanted.length ? `${sum("wanted")}, ${sum("replicas")} serve` : null);
  element("objectives").hidden = models.length === 0;
  fillTable("objective-rows", 5, [2, 5], models.sort(), (cells, [model, [part, whole]]) => {
    text(cells[0], model || "any");
    meter(cells[1], part / whole, share([part, whole]), part / whole < WANTED_SHARE ? "--warn" : "--good");
    [whole, part, whole - part].forEach((value, index) => text(cells[2 + index], value.toLocaleString("en")));
  });
  element("scaling").hidden = wanted.length === 0;
  fillTable("scaling-rows", 8, [2, 7], wanted, (cells, one) => {
    text(cells[0], one.model);
    text(cells[1], one.infer_type);
    [one.replicas, one.wanted, one.starting, one.leaving].forEach((value, index) => text(cells[2 + index], String(value)));
    cells[3].className = one.wanted === one.replicas ? "number" : "number warn";
    text(cells[6], one.saturation.toFixed(2));
    text(cells[7], one.reason);
  });
}

// As many rows as there are `items`. Cells from `first` up to `last` are numbers.
function fillTable(id, numCells, [first, last], items, fillCells) {
  const body = element(id);
  while (body.children.length > items.length) body.lastChild.remove();
  while (body.children.length < items.length) {
    const row = document.createElement("tr");
    for (let index = 0; index < numCells; index++) row.append(document.createElement("td"));
    for (let index = first; index < last; index++) row.cells[index].className = "number";
    body.append(row);
  }
  items.forEach((item, index) => fillCells(body.children[index].cells, item));
}

function meter(cell, part, words, colour) {
  if (!cell.firstChild) cell.append(newMeter());
  cell.firstChild.style.setProperty("--colour", `var(${colour})`);
  cell.querySelector("i").style.width = `${Math.min(1, part) * 100}%`;
  text(cell.querySelector("b"), words);
}

function newMeter() {
  const made = document.createElement("div");
  made.className = "meter";
  made.append(document.createElement("i"), document.createElement("b"));
  return made;
}

function drawRows(sorted, now) {
  const shown = sorted.slice(0, MAX_ROWS);
  const ids = new Set(shown.map((instance) => instance.id));
  for (const [id, row] of rows) if (!ids.has(id)) { row.remove(); rows.delete(id); }
  shown.forEach((instance, index) => {
    if (!rows.has(instance.id)) rows.set(instance.id, newRow());
    const row = rows.get(instance.id);
    if (element("rows").children[index] !== row) element("rows").insertBefore(row, element("rows").children[index] || null);
    fill(row, instance, now);
  });
  element("instances").hidden = sorted.length === 0;
  element("empty").hidden = sorted.length !== 0 || view === null;
  element("more").hidden = sorted.length <= MAX_ROWS;
  element("more").textContent = `and ${sorted.length - MAX_ROWS} more`;
}

function newRow() {
  const row = document.createElement("tr");
  for (let index = 0; index < 12; index++) row.append(document.createElement("td"));
  row.cells[0].className = "id";
  row.cells[2].append(newMeter());
  for (let index = 3; index < 11; index++) row.cells[index].className = "number";
  return row;
}

function fill(row, instance, now) {
  const number = (value) => (value === null ? "–" : value.toLocaleString("en"));
  const age = instance.age_s + now - instance.heardAt;
  row.style.setProperty("--colour", `var(${colourOf(instance)})`);
  row.dataset.id = instance.id;
  row.title = `${instance.type}, API server ${instance.api_server}, node ${instance.node || "unknown"}`;
  text(row.cells[0], instance.id);
  text(row.cells[1], instance.state);
  row.cells[1].className = { open: "good", silent: "soft", closed: "warn", suspect: "warn", hung: "bad" }[instance.state];
  row.cells[2].querySelector("i").style.width = `${Math.min(1, instance.kv || 0) * 100}%`;
  text(row.cells[2].querySelector("b"), instance.kv === null ? "" : METRICS.kv.text(instance.kv));
  text(row.cells[3], number(instance.running));
  text(row.cells[4], number(instance.urgent));
  text(row.cells[5], number(instance.waiting));
  text(row.cells[6], number(instance.prefill_tokens));
  [7, 8].forEach((cell, index) => fillPrediction(row.cells[cell], instance.predicted_ms[index], index));
  text(row.cells[9], number(instance.preemptions));
  text(row.cells[10], seconds(age));
}

// Milliseconds, and how much of the objective that the policy has for requests without one of their own.
function fillPrediction(cell, ms, which) {
  const objective = overview ? overview.objectives_ms[which] : null;
  text(cell, ms === null ? "–" : milliseconds(ms));
  cell.className = ms !== null && objective && ms > objective ? "number bad" : "number";
  cell.title = ms !== null && objective
    ? `${Math.round((1 - ms / objective) * 100)} % left of ${milliseconds(objective)}` : "";
}

function milliseconds(ms) { return ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : seconds(ms / 1000); }

function drawArcs(now) {
  const svg = element("arcs");
  const lane = element("lane").getBoundingClientRect();
  const frame = element("instances").getBoundingClientRect();
  svg.style.left = `${lane.left - frame.left + element("instances").scrollLeft}px`;
  svg.style.top = "0";
  const visible = new Set();
  for (const move of moves.values()) {
    const lingers = move.outcome === "open" || (move.outcome === "moved" && now - move.heardAt < ARC_LINGERS_S);
    const from = rows.get(move.source), to = rows.get(move.destination);
    if (!lingers || from === undefined || to === undefined) continue;
    visible.add(move.number);
    if (!arcs.has(move.number)) {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      svg.append(path);
      arcs.set(move.number, path);
    }
    const path = arcs.get(move.number);
    const middle = (row) => row.offsetTop + row.offsetHeight / 2;
    path.setAttribute("d", arc(middle(from), middle(to)));
    path.setAttribute("class", move.outcome === "open" ? "arc open" : "arc");
    path.style.stroke = `var(${colourOf(instances.get(move.destination))})`;
    path.style.opacity = move.outcome !== "open" && now - move.heardAt > ARC_LINGERS_S / 2 ? "0.15" : "1";
  }
  for (const [number, path] of arcs) if (!visible.has(number)) { path.remove(); arcs.delete(number); }
}

// From one height to another, with a head at the end.
function arc(from, to) {
  const reach = Math.min(90, 24 + Math.abs(to - from) * 0.6);
  return `M2 ${from} C${reach} ${from} ${reach} ${to} 6 ${to} m7 -5 l-8 5 l8 5`;
}

function drawMoves(now) {
  const newest = [...moves.values()].sort((a, b) => b.number - a.number).slice(0, SHOWN_MOVES);
  fillTable("move-rows", 9, [5, 9], newest, (cells, move) => {
    const why = move.error || Object.entries(move.refusals).map(([reason, count]) => `${reason} ${count}`).join(", ");
    text(cells[0], `${seconds(Math.max(0, now + offset - move.began_s))} ago`);
    text(cells[1], move.source);
    text(cells[2], move.destination);
    text(cells[3], move.policy);
    text(cells[4], why && move.outcome !== "moved" ? `${move.outcome}: ${why}` : move.outcome);
    cells[4].className = { open: "soft", moved: "good", nothing: "soft" }[move.outcome] || "warn";
    text(cells[5], `${move.num_moved} of ${move.num_selected}`);
    text(cells[6], move.moved_tokens.toLocaleString("en"));
    text(cells[7], bytes(move.copied_bytes));
    text(cells[8], move.outcome === "open" ? "" : `${Math.round(move.seconds * 1000)} ms`);
  });
  element("moves").hidden = newest.length === 0;
  element("no-moves").hidden = newest.length !== 0;
  element("no-moves").textContent = view && !view.rescheduling
    ? "The rescheduler does not run in this scheduler, so its moves are not seen here." : "None so far.";
}

// ------------------------------------------------------------------------------------------------------------ Curves

function drawChart(sorted, now) {
  const canvas = element("chart");
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  const { of, most, text } = METRICS[metric];
  let greatest = 0;
  for (const instance of sorted) for (const sample of instance.samples) greatest = Math.max(greatest, of(sample));
  const top = most(greatest);
  const frame = { left: 44, right: width - 118, top: 10, bottom: height - 24 };
  const oldest = sorted.reduce((least, { samples }) => Math.min(least, samples.length ? samples[0].at : now), now);
  const span = SPANS_S.find((seconds) => now - oldest <= seconds) || WINDOW_S;
  const x = (at) => frame.right - ((now - at) / span) * (frame.right - frame.left);
  const y = (value) => frame.bottom - Math.min(1, value / top) * (frame.bottom - frame.top);
  drawGrid(context, frame, top, text, x, y, now, span);
  const others = sorted.filter((instance) => instance.colour >= NUM_COLOURS);
  const coloured = sorted.filter((instance) => instance.colour < NUM_COLOURS);
  for (const instance of [...others, ...coloured]) drawCurve(context, instance, of, x, y, frame, now);
  drawLabels(context, coloured, of, text, y, frame);
  drawMoveMarks(context, of, x, y, now, span);
}

function drawGrid(context, frame, top, text, x, y, now, span) {
  context.strokeStyle = style("--line");
  context.fillStyle = style("--soft");
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (let part = 0; part <= 4; part++) {
    const at = Math.round(y((top * part) / 4)) + 0.5;
    context.beginPath();
    context.moveTo(frame.left, at);
    context.lineTo(frame.right, at);
    context.stroke();
    context.fillText(text((top * part) / 4), frame.left - 8, at);
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  for (let ago = 0; ago <= span; ago += span / 3) {
    context.fillText(ago === 0 ? "now" : `−${ago} s`, x(now - ago), frame.bottom + 7);
  }
}

// A state holds until the next one: steps.
function drawCurve(context, instance, of, x, y, frame, now) {
  if (instance.samples.length === 0) return;
  context.strokeStyle = style(colourOf(instance));
  context.lineWidth = instance.colour < NUM_COLOURS ? 2 : 1;
  context.lineJoin = "round";
  context.beginPath();
  let last = null;
  for (const sample of instance.samples) {
    const at = Math.max(frame.left, x(sample.at));
    if (last === null) context.moveTo(at, y(of(sample)));
    else { context.lineTo(at, y(of(last))); context.lineTo(at, y(of(sample))); }
    last = sample;
  }
  context.lineTo(x(now), y(of(last)));
  context.stroke();
}

function drawLabels(context, coloured, of, text, y, frame) {
  const labels = coloured.filter((instance) => instance.kv !== null)
    .map((instance) => ({ instance, at: y(of(instance)) })).sort((a, b) => a.at - b.at);
  // Names next to the ends of their curves, none over another.
  labels.forEach((label, index) => { if (index) label.at = Math.max(label.at, labels[index - 1].at + 15); });
  const over = labels.length ? labels[labels.length - 1].at - frame.bottom : 0;
  if (over > 0) labels.forEach((label) => { label.at -= Math.min(over, Math.max(0, label.at - frame.top)); });
  labels.forEach((label, index) => { if (index) label.at = Math.max(label.at, labels[index - 1].at + 15); });
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const { instance, at } of labels) {
    context.fillStyle = style(colourOf(instance));
    context.fillRect(frame.right + 8, at - 4, 8, 8);
    context.fillStyle = style("--ink");
    const name = instance.id.length > 11 ? `${instance.id.slice(0, 10)}…` : instance.id;
    context.fillText(`${name} ${text(of(instance))}`, frame.right + 21, at);
  }
}

// An arrow from the source's curve to the destination's, where requests moved.
function drawMoveMarks(context, of, x, y, now, span) {
  for (const move of moves.values()) {
    const at = move.began_s - offset;
    const from = valueAt(instances.get(move.source), at, of), to = valueAt(instances.get(move.destination), at, of);
    if (move.outcome !== "moved" || now - at > span || from === null || to === null) continue;
    const [here, start, end] = [x(at), y(from), y(to)];
    const sign = Math.sign(end - start) || 1;
    context.strokeStyle = context.fillStyle = style("--soft");
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(here, start);
    context.lineTo(here, end);
    context.stroke();
    context.setLineDash([]);
    context.beginPath();
    context.moveTo(here, end);
    context.lineTo(here - 4, end - 7 * sign);
    context.lineTo(here + 4, end - 7 * sign);
    context.fill();
  }
}

function valueAt(instance, at, of) {
  if (instance === undefined || instance.samples.length === 0) return null;
  let value = of(instance.samples[0]);
  for (const sample of instance.samples) { if (sample.at > at) break; value = of(sample); }
  return value;
}

// ------------------------------------------------------------------------------------------------------------ Words

function text(cell, words) { if (cell.textContent !== String(words)) cell.textContent = words; }

function seconds(value) {
  if (value < 10) return `${Math.max(0, value).toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

element("metrics").addEventListener("click", (event) => {
  if (!event.target.dataset.metric) return;
  metric = event.target.dataset.metric;
  for (const button of element("metrics").children) {
    button.setAttribute("aria-pressed", String(button.dataset.metric === metric));
  }
  draw();
});
listen();
draw();
setInterval(() => { if (!document.hidden) draw(); }, 100);
