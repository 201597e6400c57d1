// The page: what the server sends, drawn. Foreign text is set as text, never as HTML.
"use strict";

const POINTS = 1200; // drawn of one run, at most; more are bundled, their extremes kept
const KINDS = { // of events: what they are called, their colour, and the log events they are
  restart: ["restart", "--warn", ["role_restarted", "shard_restored", "shard_restored_with_loss", "run_restored", "other_copy_dead", "other_copy_silent", "role_killed"]],
  takeover: ["takeover", "--c3", ["backup_takes_over", "primary_alone"]],
  join: ["join", "--good", ["host_joined", "role_back", "replica_formed", "taken"]],
  loss: ["loss", "--bad", ["host_lost", "host_lost_with", "host_left", "role_left_out", "group_left_out", "role_failed", "guest_away"]],
  refused: ["refused or lost pushes", "--c1", []],
  checkpoint: ["checkpoint", "--idle", []],
};
const ACTIVITIES = { computing: "--c2", copying: "--c4", "waiting for shards": "--c0", "waiting for roles": "--c5", reading: "--c1", "waiting for samples": "--c7" };

const root = document.documentElement;
const $ = (id) => document.getElementById(id);
const runs = []; // of each: columns, n (points), state, marks
const charts = new Map(); // key -> {box, plot, shape, ...}
let chosen = 0, span = null, dirty = { points: true, state: true }, queued = false;

// --- numbers as text, as on the terminal

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const known = (x) => x !== null && x !== undefined && Number.isFinite(x);
function figure(x) {
  if (!known(x)) return "–";
  const a = Math.abs(x);
  if (a === 0) return "0";
  return a >= 1e5 || a < 1e-3 ? x.toExponential(2) : a >= 1000 ? whole.format(x) : String(+x.toPrecision(3));
}
const count = (x) => (known(x) ? whole.format(x) : "–");
const percent = (x) => (known(x) ? `${(100 * x).toFixed(Math.abs(x) < 0.9995 && x !== 0 ? 1 : 0)} %` : "–");
function scaled(x, unit, steps = ["", "k", "M", "G", "T"]) {
  if (!known(x)) return "–";
  let n = 0;
  while (Math.abs(x) >= 999.5 && n < steps.length - 1) { x /= 1000; n += 1; }
  const text = x === 0 ? "0" : Math.abs(x) >= 99.95 ? x.toFixed(0) : String(+x.toPrecision(3));
  return `${text} ${steps[n]}${unit}`.trim();
}
const bytes = (x) => scaled(x, "B");
const speed = (x) => scaled(x, "B/s");
const rate = (x) => (known(x) ? (x >= 10 ? count(x) : x.toFixed(1)) : "–");
function duration(s) {
  if (!known(s)) return "–";
  if (s < 9.95) return `${+s.toFixed(1)} s`;
  s = Math.round(s);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor(s / 60) % 60).padStart(2, "0")} m`;
  return `${Math.floor(s / 86400)} d ${String(Math.floor(s / 3600) % 24).padStart(2, "0")} h`;
}
const tick = (s) => duration(s).replace(/ 0+ [smh]$/, "").replace(/ 00 [smh]$/, "");
const isShare = (name) => ["accuracy", "top5"].includes(name) || name.endsWith("_share");
const words = (name) => name.replace(/_/g, " ");

// --- DOM

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function put(element, text) { if (element.textContent !== text) element.textContent = text; }
function mark(element, name) { if (element.className !== name) element.className = name; }
function rows(parent, n, build) { // as many children as `n`
  while (parent.children.length > n) parent.lastChild.remove();
  while (parent.children.length < n) parent.append(build());
  return parent.children;
}
const colours = {}; // of the theme: to ask for one is slow
const colour = (name) => (colours[name] ??= getComputedStyle(root).getPropertyValue(name).trim());
const colourOf = (run) => `--c${run % 8}`;

// --- what comes in

function runAt(index) {
  while (runs.length <= index) runs.push({ columns: {}, n: 0, state: null, marks: [], counted: [], seen: 1, lines: {} });
  return runs[index];
}
function addPoints({ run, from, to, columns }) {
  const it = runAt(run);
  if (from < it.n) Object.assign(it, { columns: {}, n: 0, lines: {}, counted: [], seen: 1 });
  for (const [name, values] of Object.entries(columns)) {
    const column = (it.columns[name] ??= []);
    while (column.length < from) column.push(null);
    for (const value of values) column.push(value);
  }
  it.n = to;
  dirty.points = true;
}
function setStates(states) {
  states.forEach((state, index) => { runAt(index).state = state; });
  dirty.state = true;
  draw();
}
function hearParent() { // in a notebook: a widget around the page says everything anew
  $("link").hidden = document.querySelector("footer").hidden = true;
  addEventListener("message", ({ source, data }) => {
    if (source !== parent) return;
    const [points, states] = data.map((text) => JSON.parse(text));
    points.forEach(addPoints);
    setStates(states);
  });
}
function connect() {
  if (location.protocol === "about:") { hearParent(); return; }
  const source = new EventSource("events");
  const say = (text, name) => { put($("link"), text); mark($("link"), name); };
  source.onopen = () => { runs.length = 0; say("live", "on"); };
  source.onerror = () => { say("no answer from the server: trying again", "off"); };
  source.addEventListener("points", (event) => { addPoints(JSON.parse(event.data)); draw(); });
  source.addEventListener("state", (event) => { setStates(JSON.parse(event.data)); });
  source.addEventListener("end", () => {
    source.close();
    say("its server has ended: this is the last state", "");
  });
}
function draw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    const todo = dirty;
    dirty = { points: false, state: false };
    if (todo.state) drawState();
    if (todo.points || todo.state) collectMarks();
    if (todo.points) drawCharts();
    if (!isStepping) drawSome();
  });
}

// --- curves

// Lines grow with their points: nothing is computed again.
function grown(it, key, begin, add) {
  const line = (it.lines[key] ??= { values: [], ...begin });
  while (line.values.length < it.n) line.values.push(add(line, line.values.length) ?? null);
  return line.values;
}
function ema(it, name, values, weight) {
  if (!weight) return values;
  return grown(it, `${name} ${weight}`, { sum: 0, scale: 0 }, (line, i) => {
    if (!known(values[i])) return null;
    line.sum = weight * line.sum + (1 - weight) * values[i];
    line.scale = weight * line.scale + (1 - weight);
    return line.sum / line.scale; // without the pull to zero at the begin
  });
}
function fresh(it, name) { // an evaluation counts where it first appears
  const values = it.columns[name], line = it.lines[`${name} fresh`];
  if (line?.values.length && line.values.length < it.n && line.isOld) line.values[line.values.length - 1] = null;
  return grown(it, `${name} fresh`, { last: null, isOld: false }, (own, i) => {
    own.isOld = !known(values[i]) || values[i] === own.last;
    if (!own.isOld) own.last = values[i];
    return own.isOld && i < it.n - 1 ? null : own.last; // the line goes on to the end
  });
}
function perSecond(it, name) {
  const values = it.columns[name], times = it.columns.time;
  return grown(it, `${name} speed`, {}, (_, i) => {
    const seconds = i ? times[i] - times[i - 1] : 0;
    return seconds > 0 && known(values[i]) && known(values[i - 1]) ? Math.max(values[i] - values[i - 1], 0) / seconds : null;
  });
}
function steps(values) { // where a new value begins
  let last;
  return [...values.keys()].filter((i) => known(values[i]) && values[i] !== last && ((last = values[i]), true));
}
function xs(it) {
  const axis = $("axis").value, values = it.columns[axis] ?? [];
  if (axis === "time") return values;
  return grown(it, "risen", { most: 0 }, (line, i) => (line.most = Math.max(line.most, values[i] ?? 0)));
}
function position(sorted, x) { // of the first value that is not below x
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}
function bundled(x, lines) { // what is visible, by bundles and their extremes
  const first = span ? Math.max(position(x, span[0]) - 1, 0) : 0;
  const last = span ? Math.min(position(x, span[1]) + 1, x.length) : x.length;
  const n = last - first, size = Math.ceil((2 * n) / POINTS);
  const part = (line) => Array.from({ length: n }, (_, i) => line[first + i] ?? null);
  if (size <= 2) return [x.slice(first, last), ...lines.map(part)];
  const at = [], out = lines.map(() => []);
  for (let begin = first; begin < last; begin += size) {
    const end = Math.min(begin + size, last);
    at.push(x[begin], x[Math.min(begin + (size >> 1), last - 1)]);
    lines.forEach((line, k) => {
      let low = null, high = null;
      for (let i = begin; i < end; i += 1) {
        const value = line[i];
        if (value === null || value === undefined) continue;
        if (low === null || value < line[low]) low = i;
        if (high === null || value > line[high]) high = i;
      }
      const pair = low === null ? [null, null] : low <= high ? [line[low], line[high]] : [line[high], line[low]];
      out[k].push(...pair);
    });
  }
  return [at, ...out];
}
function plan() { // which charts there are, and the lines of each
  const names = new Set();
  runs.forEach((it) => Object.keys(it.columns).forEach((name) => names.add(name)));
  const has = (name) => runs.some((it) => it.columns[name]?.some(known));
  const found = [{ key: "loss", title: "Loss", show: figure, log: $("log").checked, lines: [["training", "loss", "smooth"], ["held out", "held_out_loss", "fresh"]] }];
  for (const name of names) {
    if (name.startsWith("metric:") && name !== "metric:loss") {
      const metric = name.slice(7);
      found.push({ key: name, title: `Held-out ${metric}`, show: isShare(metric) ? percent : figure, lines: [[metric, name, "fresh"]] });
    }
  }
  found.push({ key: "rate", title: "Speed", unit: "samples/s", show: (x) => scaled(x, ""), zero: true, lines: [["samples/s", "samples_per_second", "smooth"]] });
  if (has("staleness_mean")) found.push({ key: "staleness", title: "Staleness", unit: "pushes", show: figure, zero: true, lines: [["mean", "staleness_mean", "plain"], ["p95", "staleness_p95", "plain"]] });
  found.push({ key: "bytes", title: "Traffic of all shards", unit: "B/s", show: speed, zero: true, lines: [["received", "bytes_in", "speed"], ["sent", "bytes_out", "speed"]] });
  for (const name of names) {
    if (!name.startsWith("figure:") || name.startsWith("figure:seconds_waited_for_")) continue;
    const figureName = name.slice(7);
    found.push({ key: name, title: words(figureName), show: isShare(figureName) ? percent : figure, lines: [[words(figureName), name, "smooth"]] });
  }
  return found.slice(0, 24);
}
function tableOf(it, lines, weight) { // x and the lines of one run, ready to be drawn
  const x = xs(it), out = [], n = span ? position(x, span[1]) - position(x, span[0]) : x.length;
  weight **= Math.min(1, 512 / 2 ** Math.ceil(Math.log2(Math.max(n, 1)))); // more points, more smoothing
  for (const [, column, way] of lines) {
    let values = it.columns[column];
    if (!values) values = [];
    else if (way === "fresh") values = fresh(it, column);
    else if (way === "speed") values = perSecond(it, column);
    const smooths = way === "smooth" || way === "speed";
    if (smooths && weight) out.push(values);
    out.push(smooths ? ema(it, column, values, weight) : values);
  }
  return bundled(x, out);
}
function seriesOf(spec, weight) {
  const series = [{}];
  runs.forEach((it, run) => {
    spec.lines.forEach(([label, , way], k) => {
      const several = runs.length > 1;
      const base = colour(several ? colourOf(run) : `--c${k}`);
      const name = several ? `${nameOf(run)}${spec.lines.length > 1 ? `, ${label}` : ""}` : label;
      const value = (_, x) => spec.show(x);
      const line = { label: name, stroke: base, width: 1.8, value, spanGaps: true, points: { show: false } };
      if (several && k) line.dash = [6, 4];
      if (way === "fresh") line.points = { show: (u, s) => u.data[s].filter(known).length < 60, size: 5, fill: base, filter: (u, s) => steps(u.data[s]) };
      if ((way === "smooth" || way === "speed") && weight) {
        series.push({ ...line, label: `${name}, raw`, class: "raw", stroke: faint(base), width: 1 });
      }
      series.push(line);
    });
  });
  return series;
}
const faint = (hex) => `${hex}55`;
const nameOf = (run) => {
  const own = runs[run].state?.name ?? `run ${run}`;
  const twins = runs.filter((it) => it.state?.name === own).length > 1;
  return twins ? runs[run].state.path.split("/").filter(Boolean).pop() : own;
};
const TIMES = [0.1,0.2,0.5,1,2,5,10,15,30,60,120,300,600,900,1800,3600,7200,10800,21600,43200,86400,172800,604800];

function optionsOf(spec, series, width) {
  const isTime = $("axis").value === "time", ink = colour("--dim"), grid = { stroke: colour("--grid"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
  return {
    width, height: 230, series, pxAlign: 0,
    padding: [10, 14, 0, 0],
    scales: {
      x: { time: false, range: (_, low, high) => span ?? (low === null ? [0, 1] : high > low ? [low, high] : [low - 1, high + 1]) },
      y: { distr: spec.log ? 3 : 1, range: spec.log ? undefined : (_, low, high) => yRange(low, high, spec.zero) },
    },
    axes: [
      { ...axis, size: 30, space: 68, values: (_, splits) => splits.map((x) => (isTime ? tick(x) : scaled(x, ""))), ...(isTime ? { incrs: TIMES } : {}) },
      { ...axis, size: 62, gap: 4, values: (_, splits) => splits.map((y) => (y === null ? "" : spec.show(y))) },
    ],
    cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "all" }, focus: { prox: 24, dist: (u, s, _, y, at) => (u.cursor.event && u.series[s].class !== "raw" ? y - at : Infinity) } },
    legend: { live: true },
    hooks: {
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        span = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        zoom();
      }],
      draw: [(u) => drawMarks(u)],
      setCursor: [(u) => showTip(u)],
    },
  };
}
function yRange(low, high, zero) {
  if (low === null || high === null) return [0, 1];
  if (zero) return [0, high > 0 ? high * 1.08 : 1];
  const room = (high - low || Math.abs(high) * 0.1 || 1) * 0.06;
  return [low >= 0 ? Math.max(low - room, 0) : low - room, high + room];
}
function zoom() {
  $("whole").hidden = span === null;
  dirty.points = true;
  draw();
}
let stateSteps = [], chartSteps = [], isStepping = false;
function drawCharts() {
  const weight = Number($("smooth").value), specs = plan(), keys = new Set(specs.map((spec) => spec.key));
  for (const [key, chart] of charts) {
    if (!keys.has(key)) { chart.plot?.destroy(); chart.box.remove(); charts.delete(key); }
  }
  chartSteps = specs.map((spec, place) => () => drawChart(spec, place, weight));
}
function drawSome() { // as much in one frame as its time allows
  const begin = performance.now();
  do (stateSteps.shift() ?? chartSteps.shift())?.(); while (performance.now() - begin < 8 && stateSteps.length + chartSteps.length);
  isStepping = stateSteps.length + chartSteps.length > 0;
  if (isStepping) requestAnimationFrame(drawSome);
}
function drawChart(spec, place, weight) {
  const tables = runs.map((it) => tableOf(it, spec.lines, weight));
  let data = tables.length === 1 ? tables[0] : tables.length ? uPlot.join(tables) : [[]];
  if (spec.log) data = data.map((line, k) => (k ? line.map((y) => (y > 0 ? y : null)) : line));
  const chart = charts.get(spec.key) ?? newChart(spec);
  if ($("charts").children[place] !== chart.box) $("charts").insertBefore(chart.box, $("charts").children[place] ?? null);
  const shape = JSON.stringify([runs.map((_, run) => nameOf(run)), weight > 0, spec.log, $("axis").value, spec.lines.length]);
  if (chart.shape !== shape) {
    chart.plot?.destroy();
    chart.shape = shape;
    chart.plot = new uPlot(optionsOf(spec, seriesOf(spec, weight), widthOf(chart)), data, chart.place);
    chart.plot.over.addEventListener("dblclick", () => { span = null; zoom(); });
  } else {
    chart.plot.setData(data);
  }
  chart.nothing.hidden = data.slice(1).some((line) => line.some(known));
  put(chart.axis, $("axis").value === "time" ? "over time of the job" : "over samples");
}
function newChart(spec) {
  const axis = make("span"), place = make("div"), tip = make("div", { class: "tip", hidden: "" });
  const nothing = make("p", { class: "nothing" }, "nothing measured yet");
  const title = make("h3", {}, spec.unit ? `${spec.title} (${spec.unit})` : spec.title);
  const box = make("div", { class: "chart", tabindex: "0", role: "img", "aria-label": `${spec.title}: curve` }, make("div", { class: "head" }, title, axis), place, nothing, tip);
  const chart = { box, place, axis, tip, nothing, plot: null, shape: "" };
  box.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    const u = chart.plot, n = u.data[0].length;
    if (!steps || !n) return;
    event.preventDefault();
    const at = Math.min(Math.max((u.cursor.idx ?? (steps > 0 ? -1 : n)) + steps, 0), n - 1);
    u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.over.clientHeight / 2 });
  });
  charts.set(spec.key, chart);
  new ResizeObserver(() => {
    const width = widthOf(chart);
    if (chart.plot && chart.plot.width !== width) chart.plot.setSize({ width, height: 230 });
  }).observe(box);
  return chart;
}
const widthOf = (chart) => Math.max(chart.box.clientWidth - 24, 160);

// --- events on the curves

function collectMarks() {
  const kinds = {};
  for (const [kind, [, , what]] of Object.entries(KINDS)) what.forEach((name) => (kinds[name] = kind));
  runs.forEach((it) => {
    const marks = [];
    for (const message of it.state?.messages ?? []) {
      const kind = kinds[message.what];
      if (kind) marks.push({ kind, time: message.seconds, text: message.text });
    }
    const { time = [], pushes_refused: refused = [], pushes_lost: lost = [], n_checkpoints: saved = [] } = it.columns;
    for (; it.seen < it.n; it.seen += 1) {
      const i = it.seen, more = Math.max(refused[i] - refused[i - 1], 0) || 0, gone = Math.max(lost[i] - lost[i - 1], 0) || 0;
      const add = (kind, text) => it.counted.push({ kind, time: time[i], text });
      if (more) add("refused", `${count(more)} pushes refused`);
      if (gone) add("refused", `${count(gone)} pushes lost`);
      if (saved[i] > saved[i - 1]) add("checkpoint", `checkpoints of shards: ${count(saved[i] - saved[i - 1])}`);
    }
    it.marks = [...marks, ...it.counted].sort((a, b) => a.time - b.time);
  });
  const present = new Set(runs.flatMap((it) => it.marks.map((each) => each.kind)));
  const legend = $("marks-legend"), shown = Object.keys(KINDS).filter((kind) => present.has(kind));
  legend.hidden = !shown.length || !$("marks").checked;
  const key = shown + root.dataset.theme;
  if (legend.dataset.key !== key) {
    legend.dataset.key = key;
    legend.replaceChildren(...shown.map((kind) => keyOf(KINDS[kind][1], KINDS[kind][0])));
  }
}
function keyOf(name, text) {
  const key = make("i");
  key.style.background = `var(${name})`;
  return make("span", { class: "key" }, key, text);
}
function placed(it, event) { // where an event is on the present axis
  if ($("axis").value === "time") return event.time;
  const at = position(it.columns.time ?? [], event.time);
  return xs(it)[Math.min(at, it.n - 1)] ?? null;
}
function visibleMarks(u) {
  if (!$("marks").checked) return [];
  const { min, max } = u.scales.x;
  return runs.flatMap((it, run) => it.marks.map((each) => ({ ...each, run, x: placed(it, each) }))).filter((each) => each.x !== null && each.x >= min && each.x <= max);
}
function drawMarks(u) {
  const { ctx } = u, { left, top, height } = u.bbox, dpr = devicePixelRatio;
  u.marks = visibleMarks(u).map((each) => ({ ...each, at: u.valToPos(each.x, "x", true) }));
  ctx.save();
  const last = {};
  for (const { kind, at } of u.marks) {
    if (Math.abs(at - last[kind]) < 6 * dpr) continue; // there is one already
    last[kind] = at;
    ctx.strokeStyle = ctx.fillStyle = colour(KINDS[kind][1]);
    ctx.lineWidth = dpr;
    ctx.beginPath();
    if (kind === "checkpoint") {
      ctx.moveTo(at - 4 * dpr, top + height);
      ctx.lineTo(at + 4 * dpr, top + height);
      ctx.lineTo(at, top + height - 7 * dpr);
      ctx.fill();
      continue;
    }
    ctx.setLineDash([3 * dpr, 3 * dpr]);
    ctx.globalAlpha = 0.75;
    ctx.moveTo(at, top);
    ctx.lineTo(at, top + height);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.moveTo(at - 4 * dpr, top - 1 * dpr);
    ctx.lineTo(at + 4 * dpr, top - 1 * dpr);
    ctx.lineTo(at, top + 6 * dpr);
    ctx.fill();
  }
  ctx.restore();
}
function showTip(u) {
  const chart = [...charts.values()].find((each) => each.plot === u);
  if (!chart) return;
  const dpr = devicePixelRatio, x = u.cursor.left, over = u.bbox.left / dpr;
  const near = x < 0 || u.cursor.event == null ? [] : (u.marks ?? []).filter((each) => Math.abs(each.at / dpr - over - x) < 5);
  chart.tip.hidden = !near.length;
  if (!near.length) return;
  put(chart.tip, near.slice(0, 4).map((each) => `${duration(each.time)}: ${each.text}`).join(" · ") + (near.length > 4 ? ` · and ${near.length - 4} more` : ""));
  chart.tip.style.left = `${Math.min(x + over + 18, chart.box.clientWidth - 250)}px`;
  chart.tip.style.top = "44px";
}

// --- runs, roles, hosts

function drawState() {
  const states = runs.map((it) => it.state).filter(Boolean);
  mark($("runs"), states.length > 1 ? "many" : "");
  document.title = states.length === 1 ? `${states[0].name}: ${states[0].phase || states[0].state}` : `${states.length} runs`;
  chosen = Math.min(chosen, Math.max(states.length - 1, 0));
  [...rows($("runs"), states.length, () => make("div", { class: "card" }))].forEach((card, run) => drawRun(card, states[run], run, states.length > 1));
  const state = states[chosen];
  if (!state) return;
  put($("roles-of"), states.length > 1 ? `of ${nameOf(chosen)}` : "");
  drawWhy(state);
  drawPlan(state);
  turn += 1;
  stateSteps = [() => drawHosts(state), () => drawEvents(state)];
  for (let from = 0; !from || from < state.roles.length; from += ROWS) stateSteps.push(() => drawRoles(state, from));
  const files = $("files");
  if (files.childElementCount !== states.length) {
    files.replaceChildren(...states.map((_, run) => make("a", { href: `runs/${run}/metrics.csv`, download: "metrics.csv" }, states.length > 1 ? `CSV of ${nameOf(run)}` : "CSV")));
  }
}
function drawRun(card, state, run, several) {
  if (!card.parts) {
    const parts = (card.parts = { swatch: make("i", { class: "swatch" }), name: make("span", { class: "name" }), chip: make("span", { class: "chip" }), choose: make("button", { class: "choose" }, "show its roles"), path: make("p", { class: "path" }), note: make("p", { class: "note bad" }), bar: make("progress", { max: "1", "aria-label": "done" }), done: make("p", { class: "note" }), tiles: make("dl", { class: "tiles" }) });
    parts.choose.addEventListener("click", () => { chosen = run; dirty.state = true; draw(); });
    card.append(make("div", { class: "top" }, parts.swatch, parts.name, parts.chip, parts.choose), parts.path, parts.note, parts.bar, parts.done, parts.tiles);
  }
  const { parts } = card, view = state.view;
  parts.swatch.hidden = parts.choose.hidden = !several;
  parts.swatch.style.background = `var(${colourOf(run)})`;
  parts.choose.ariaPressed = run === chosen;
  put(parts.name, state.name);
  put(parts.chip, state.state === "running" ? view.phase : state.state);
  mark(parts.chip, `chip ${state.state}`);
  put(parts.path, state.path);
  put(parts.note, state.note);
  parts.note.hidden = !state.note;
  const share = view?.progress;
  parts.bar.hidden = !known(share);
  if (known(share)) parts.bar.value = Math.min(share, 1);
  const total = view?.total_samples ? ` of ${count(view.total_samples)}` : "";
  const seen = state.state === "running" || !known(state.age) ? "" : `last status ${duration(state.age)} ago`;
  put(parts.done, view ? [known(share) ? percent(share) : "", `${count(view.samples)}${total} samples`, state.left, view.stop_reason, seen].filter(Boolean).join(" · ") : state.state === "starting" ? "No status yet: its roles are starting." : "");
  drawTiles(parts.tiles, view ? tilesOf(view, state) : []);
}
function tilesOf(view, state) {
  const show = isShare(view.metric_name) ? percent : figure;
  const mean = view.training_seconds > 0 ? view.samples / view.training_seconds : null;
  const running = state.state === "running";
  const tiles = [
    [running ? "samples/s" : "samples/s, mean", rate(running ? view.samples_per_second : mean), running && known(mean) ? `mean ${rate(mean)}` : ""],
    ["training loss", figure(view.loss), ""],
    ["held-out loss", figure(view.held_out_loss), ""],
  ];
  if (view.metric_name !== "loss") tiles.push([`held-out ${view.metric_name}`, show(view.metric), known(view.best_metric) ? `best ${show(view.best_metric)}` : ""]);
  tiles.push(["time", duration(view.seconds), ""]);
  if (known(view.staleness_mean)) tiles.push(["staleness, mean", figure(view.staleness_mean), known(view.staleness_p95) ? `p95 ${count(view.staleness_p95)} pushes` : ""]);
  tiles.push(["pushes applied", count(view.pushes_applied), `${count(view.pushes_refused)} refused, ${view.pushes_lost === null ? "unknown" : count(view.pushes_lost)} lost`, (view.pushes_refused || view.pushes_lost) && "more"]);
  tiles.push(["received by shards", bytes(view.bytes_in), `sent ${bytes(view.bytes_out)}`]);
  const restarts = state.roles.reduce((sum, role) => sum + role.restarts, 0);
  tiles.push(["restarts", count(restarts), `checkpoints: ${count(view.n_checkpoints)}`, restarts && "warn"]);
  return tiles;
}
function drawTiles(list, tiles) {
  [...rows(list, tiles.length, () => make("div", {}, make("dt"), make("dd", {}, make("span"), make("small"))))].forEach((tile, n) => {
    const [name, value, more, warns] = tiles[n], [term, data] = tile.children;
    put(term, name);
    put(data.children[0], value);
    put(data.children[1], more);
    mark(data, warns || "");
  });
}
function drawWhy(state) {
  const { why } = state;
  $("why").hidden = !why;
  if (!why) return;
  mark($("why"), why.role ? "found" : "");
  const lines = [(runs.length > 1 ? `${nameOf(chosen)}: ` : "") + why.text, why.help.replaceAll("`", "")].filter(Boolean);
  [...rows($("why"), lines.length, () => make("p"))].forEach((line, n) => { put(line, lines[n]); mark(line, n ? "note" : ""); });
}
function look(role) {
  if (role.trouble) return "trouble";
  if (/^(computing|measuring|serving|primary|backup|applying|saving|following|pushing|fetching)/.test(role.state)) return "busy";
  return /wait|gather|reading|import|start|build|join|restor/.test(role.state) ? "wait" : "";
}
function drawPlan(state) {
  $("plan").hidden = !state.has_plan || location.protocol === "about:";
  const at = `runs/${chosen}/plan.png`;
  if ($("plan").hidden || $("plan").dataset.at === at) return;
  $("plan").dataset.at = at;
  rows($("plan"), 1);
  $("plan").append(make("img", { src: at, alt: "layers of the model, and their ranks", loading: "lazy" }));
}
function drawHosts(state) {
  const places = new Map([["", { label: "the supervisor's host", roles: [] }]]);
  for (const host of state.hosts) places.set(host.label, { ...host, roles: [] });
  for (const role of state.roles) {
    if (!places.has(role.host)) places.set(role.host, { label: role.host, roles: [] });
    places.get(role.host).roles.push(role);
  }
  const shown = [...places.values()].filter((place) => place.roles.length || place.state);
  [...rows($("hosts"), shown.length, () => make("div", { class: "host" }, make("h3"), make("p"), make("div", { class: "dots", "aria-hidden": "true" }), make("p")))].forEach((box, n) => {
    const place = shown[n], live = state.state === "running";
    const flow = place.roles.reduce((sum, role) => sum + (role.bytes_in ?? 0) + (role.bytes_out ?? 0), 0);
    const [title, facts, dots, sum] = box.children;
    mark(box, ["gone", "leaving", "rejected"].includes(place.state) ? "host gone" : "host");
    put(title, place.label);
    put(facts, [place.state, known(place.cores) ? `${place.cores} cores` : "", place.memory_bytes ? bytes(place.memory_bytes) : "", known(place.bandwidth) ? `link ${speed(place.bandwidth)}` : "", live && flow ? `${speed(flow)} in use` : ""].filter(Boolean).join(", "));
    [...rows(dots, place.roles.length, () => make("i"))].forEach((dot, k) => {
      mark(dot, look(place.roles[k]));
      const text = `${place.roles[k].name}: ${place.roles[k].state}`;
      if (dot.title !== text) dot.title = text;
    });
    const counts = {};
    place.roles.forEach((role) => { const word = role.state.replace(/( for)? [a-z]+-[0-9.]+.*$/, ""); counts[word] = (counts[word] ?? 0) + 1; });
    put(sum, Object.entries(counts).map(([word, k]) => `${k} ${word}`).join(", "));
  });
}
const HEADS = [["role", ""], ["host", "wide"], ["state", "name"], ["rate", "num"], ["staleness", "num wide"], ["received", "num wide"], ["sent", "num wide"], ["its time", ""], ["heard", "num wide"], ["restarts", "num wide"]];
const ROWS = 50; // drawn at once
let turn = 0;
const sight = new IntersectionObserver((all) => {
  for (const { target, isIntersecting } of all) {
    dirty.state ||= isIntersecting && target.unseen; // it may be old
    target.unseen = !isIntersecting;
  }
  if (dirty.state) draw();
});
function drawRoles(state, from) {
  const table = $("roles"), roles = state.roles, live = state.state === "running";
  if (!table.tHead) {
    const head = table.createTHead(), heads = HEADS.map(([text, name]) => make("th", { role: "columnheader", class: name }, text));
    head.append(make("tr", { role: "row" }, ...heads));
    for (const part of [head, table.createTBody()]) part.role = "rowgroup";
  }
  $("no-roles").hidden = roles.length > 0;
  table.parentElement.hidden = !roles.length;
  const most = {};
  for (const role of roles) most[role.unit] = Math.max(most[role.unit] ?? 0, role.rate ?? 0);
  const flow = live ? speed : bytes, elsewhere = roles.some((role) => role.host);
  table.tHead.rows[0].cells[1].hidden = !elsewhere;
  const body = table.tBodies[0], end = Math.min(from + ROWS, roles.length);
  const list = rows(body, Math.max(end, Math.min(body.children.length, roles.length)), newRow);
  roles.slice(from, end).forEach((role, n) => {
    const row = list[from + n], cell = row.children, key = [state.path, role.name, role.trouble].join();
    if (live && row.unseen && row.key === key && (n + turn) % 8) return; // those out of sight in turn
    row.key = key;
    put(cell[0], role.name);
    cell[1].hidden = !elsewhere;
    put(cell[1], role.host || "here");
    put(cell[2].firstChild, role.state);
    mark(cell[2].firstChild, `state ${look(role)}`);
    const [text, unit, meter] = cell[3].children;
    put(text, rate(role.rate));
    put(unit, known(role.rate) ? ` ${role.unit}/s` : "");
    meter.firstChild.style.width = `${known(role.rate) && most[role.unit] ? (100 * role.rate) / most[role.unit] : 0}%`;
    put(cell[4], figure(role.staleness));
    put(cell[5], flow(role.bytes_in));
    put(cell[6], flow(role.bytes_out));
    drawSpent(cell[7], role.spent);
    put(cell[8], known(role.heard) ? `${duration(role.heard)} ago` : "–");
    put(cell[9], count(role.restarts));
  });
  const used = Object.keys(ACTIVITIES).filter((name) => roles.some((role) => role.spent[name] > 0));
  const legend = $("spent-legend"), key = used.join();
  legend.hidden = !key;
  if (legend.dataset.key !== key) {
    legend.dataset.key = key;
    legend.replaceChildren(...used.map((name) => keyOf(ACTIVITIES[name], name)), keyOf("--grid", "other"));
  }
}
function newRow() {
  const row = make("tr", { role: "row" }, make("th", { role: "rowheader" }));
  sight.observe(row);
  HEADS.slice(1).forEach(([, name]) => row.append(make("td", { class: name, role: "cell" })));
  row.children[2].append(make("span"));
  row.children[3].append(make("span"), make("span", { class: "wide" }), make("span", { class: "meter", "aria-hidden": "true" }, make("i")));
  row.children[7].append(make("span", { class: "stack", role: "img" }));
  return row;
}
function drawSpent(cell, spent) {
  const stack = cell.firstChild, parts = Object.keys(ACTIVITIES).filter((name) => spent[name] > 0);
  const text = parts.map((name) => `${name} ${percent(spent[name])}`).join(", ") || "not counted";
  if (stack.title === text) return;
  stack.title = text;
  stack.ariaLabel = text;
  [...rows(stack, parts.length, () => make("i"))].forEach((part, n) => {
    part.style.width = `${100 * spent[parts[n]]}%`;
    part.style.background = `var(${ACTIVITIES[parts[n]]})`;
  });
}
function drawEvents(state) {
  const messages = [...state.messages].reverse();
  $("no-events").hidden = messages.length > 0;
  [...rows($("events"), messages.length, () => make("li", {}, make("time"), make("span")))].forEach((item, n) => {
    put(item.children[0], duration(messages[n].seconds));
    put(item.children[1], messages[n].text);
    mark(item.children[1], messages[n].level);
  });
}

// --- controls

function redraw() { for (const name in colours) delete colours[name]; for (const chart of charts.values()) chart.shape = ""; dirty = { points: true, state: true }; draw(); }
function keep(name, value) { try { localStorage.setItem(name, value); } catch { /* not allowed: forget it */ } }
function kept(name) { try { return localStorage.getItem(name); } catch { return null; } }
function setTheme(theme) {
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  put($("theme"), theme);
  $("theme").ariaLabel = `Colours: ${theme === "auto" ? "as the system" : theme}`;
  keep("theme", theme);
  redraw();
}
$("theme").addEventListener("click", () => setTheme({ auto: "dark", dark: "light", light: "auto" }[$("theme").textContent]));
$("axis").addEventListener("change", () => { span = null; zoom(); });
$("smooth").addEventListener("input", () => { put($("smooth-value"), Number($("smooth").value).toFixed(2)); dirty.points = true; draw(); });
for (const id of ["log", "marks"]) $(id).addEventListener("change", redraw);
$("whole").addEventListener("click", () => { span = null; zoom(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
setTheme(["dark", "light"].includes(kept("theme")) ? kept("theme") : "auto");
connect();
