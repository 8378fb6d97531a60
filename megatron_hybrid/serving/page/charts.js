// The last minutes, hour or day: tokens per second, latencies, the queue, what was skipped, evicted
// and lost, memory.

import { bytes, count, counted, fillBar, find, make, makeSvg, percent, words } from "./dom.js";

const TICKS = [60, 300, 900, 3600, 21600]; // seconds between labels of the time axis
const LEAST = 120; // seconds that a chart shows, of a server that has just begun
const MARGIN = 54;
const TOP = 6;
const HEIGHT = 94;
const FEW = 12; // points of a line that are all marked
const EVICTED = {
  checkpoints_evicted: "states",
  kv_blocks_evicted: "KV blocks",
  host_records_evicted: "host records",
  disk_records_evicted: "disk records",
};
const percentiles = (name) => [50, 90, 99].map((part) => [`p${part}`, `p${part}`, (h) => h.columns[`${name}_p${part}`]]);

// Each chart: how its values are written, its lines or bars as [class, name, values of a history],
// what they come to in the whole time (their peak, if `isPeak`), what is written and not drawn, what stands for it where nothing
// has happened.
const CHARTS = {
  tokens: {
    write: (value) => `${short(value)}/s`,
    series: [
      ["generated", "generated", (h) => h.rate("generation_tokens")],
      ["computed", "computed of prompts", (h) => h.rate("prefill_tokens")],
    ],
    empty: "No token was computed in this time.",
  },
  rate: {
    write: (value) => `${(100 * value).toFixed(1)} %`,
    most: 1,
    series: [["skipped", "", (h) => h.share("skipped_tokens", "prompt_tokens")]],
    total: (h) => h.sum("skipped_tokens") / h.sum("prompt_tokens"),
    bars: true,
    empty: "No prompt came in this time.",
  },
  first: {
    write: seconds_,
    series: percentiles("time_to_first_token_seconds"),
    empty: "No answer began in this time.",
  },
  between: {
    write: seconds_,
    series: percentiles("inter_token_latency_seconds"),
    empty: "No answer grew in this time.",
  },
  queue: {
    write: (value) => count(value),
    series: [
      ["running", "running at most", (h) => h.running()],
      ["waiting", "waiting at most", (h) => h.columns.requests_waiting],
    ],
    isPeak: true,
    // Drawn, thousands of them would press the other lines flat.
    written: (h) => `${count(h.sum("requests"))} started`,
    empty: "No request ran or waited in this time.",
  },
  evictions: {
    write: (value) => count(value),
    series: [["evicted", "", (h) => h.growth(...Object.keys(EVICTED))]],
    total: (h) => h.sum(...Object.keys(EVICTED)),
    bars: true,
    empty: "Nothing was evicted in this time.",
  },
};

let history = null;
let hovered = null; // index of a point
let onSpan = () => {};

export const seconds = () => Number(document.querySelector("#span input:checked").value);

export function whenSpanChanges(call) {
  onSpan = call;
}

function short(value) {
  return value >= 10_000 ? `${(value / 1000).toFixed(0)}k` : value >= 10 ? value.toFixed(0) : value.toFixed(1);
}

function seconds_(value) {
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

export function showHistory(columns, span) {
  history = read(columns, span);
  if (hovered >= columns.time.length) hovered = null;
  drawAll();
  showLost();
  showMemory((key) => columns[key].at(-1));
}

function read(columns, span) {
  const { time } = columns;
  const growths = (call) => time.map((_, i) => (i ? call(i) : null));
  const grown = (key, i) => columns[key][i] - columns[key][i - 1];
  return {
    columns,
    span: Math.min(span, Math.max(LEAST, time.at(-1) - time[0])), // of a young server its life
    end: time.at(-1),
    rate: (key) => growths((i) => grown(key, i) / Math.max(0.001, time[i] - time[i - 1])),
    share: (part, whole) => growths((i) => (grown(whole, i) ? grown(part, i) / grown(whole, i) : null)),
    growth: (...keys) => growths((i) => keys.reduce((sum, key) => sum + grown(key, i), 0)),
    sum: (...keys) => keys.reduce((sum, key) => sum + columns[key].at(-1) - columns[key][0], 0),
    // A request that no sample saw ran, too.
    running: () => columns.requests_running.map((seen, i) => Math.max(seen, i && grown("requests", i) ? 1 : 0)),
  };
}

function drawAll() {
  if (history) for (const [id, chart] of Object.entries(CHARTS)) drawChart(find(id), chart);
}

// What was skipped of all prompts in the time that is shown.
export function skipped() {
  const prompts = history.sum("prompt_tokens");
  const span = document.querySelector("#span label:has(:checked)").textContent;
  if (!prompts) return `no prompt in ${span}`;
  return `${CHARTS.rate.write(CHARTS.rate.total(history))} of ${counted(prompts, "prompt token")} skipped in ${span}`;
}

function drawChart(svg, { write, series, total, isPeak, written, most, bars, empty }) {
  const { time } = history.columns;
  const width = Math.max(60, svg.clientWidth - MARGIN);
  const begin = history.end - history.span;
  const place = (at) => (width * Math.max(0, at - begin)) / history.span;
  const lines = series.map(([className, name, values]) => ({ className, name, values: values(history) }));
  const peak = Math.max(0, ...lines.flatMap(({ values }) => values));
  const isEmpty = most ? lines.every(({ values }) => values.every((value) => value === null)) : !peak;
  const top = most ?? roundUp(peak);
  const level = (value) => HEIGHT - ((HEIGHT - TOP) * value) / top;
  const shown = [makeSvg("line", { x1: 0, x2: width, y1: HEIGHT, y2: HEIGHT, class: "axis" }), ...drawTicks(place, begin, width)];
  if (!isEmpty) {
    shown.push(makeSvg("line", { x1: 0, x2: width, y1: TOP, y2: TOP, class: "axis faint" }));
    shown.push(makeSvg("text", { x: width + 4, y: TOP + 4 }, write(top)));
    for (const line of lines) shown.push(...(bars ? drawBars(line, place, level) : drawLine(line, place, level)));
    if (hovered !== null) {
      const x = place(time[hovered]);
      shown.push(makeSvg("line", { x1: x, x2: x, y1: 0, y2: HEIGHT, class: "hover" }));
    }
  } else shown.push(makeSvg("text", { x: 0, y: HEIGHT / 2, class: "empty" }, empty));
  svg.replaceChildren(...shown);
  const parts = lines.map(({ className, name, values }) => {
    const last = () => (isPeak ? Math.max(...values) : values.findLast((each) => each !== null));
    const now = () => (total ? total(history) : last());
    const value = hovered === null ? now() : values[hovered];
    const text = value === undefined || value === null ? "–" : write(value);
    const sign = name ? [make("i", { className: `sign ${className}` }), `${name} `] : [];
    return make("span", {}, ...sign, make("b", { textContent: text }));
  });
  const first = hovered === null ? written?.(history) : clock(time[hovered]);
  if (first) parts.unshift(make("span", { textContent: first }));
  const told = find(`${svg.id}-now`);
  told.replaceChildren(...(isEmpty ? [] : parts));
  svg.setAttribute("aria-label", `${svg.previousElementSibling.firstChild.textContent}: ${told.textContent || empty}`);
}

// 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((digit) => digit * power).find((each) => each >= value * 0.999);
}

function drawBars({ className, values }, place, level) {
  const { time } = history.columns;
  return values.flatMap((value, i) => {
    const [left, right] = [i ? place(time[i - 1]) : 0, place(time[i])];
    if (!value || right <= 0) return [];
    const height = Math.max(1, HEIGHT - level(value));
    const width = Math.max(3, right - left - 0.6);
    return [makeSvg("rect", { x: right - width, y: HEIGHT - height, width, height, class: className })];
  });
}

// A line, with gaps where there is no value. A value without a neighbour, and each of few, is a dot.
function drawLine({ className, values }, place, level) {
  const { time } = history.columns;
  const begin = history.end - history.span;
  const is = (i) => i >= 0 && i < time.length && values[i] !== null && time[i] >= begin;
  const points = [...time.keys()].filter(is).map((i) => [i, place(time[i]).toFixed(1), level(values[i]).toFixed(1)]);
  if (!points.length) return [];
  const path = points.map(([i, x, y]) => `${is(i - 1) ? "L" : "M"}${x} ${y}`).join("");
  const dots = points.filter(([i]) => points.length <= FEW || !(is(i - 1) || is(i + 1)));
  return [
    makeSvg("path", { d: path, class: className }),
    ...dots.map(([, cx, cy]) => makeSvg("circle", { cx, cy, r: 3, class: className })),
  ];
}

const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB", history.span > 300 ? { hour: "2-digit", minute: "2-digit" } : {});

// At whole minutes or hours of the clock on the wall.
function drawTicks(place, begin, width) {
  const step = TICKS.find((each) => history.span <= 5 * each);
  const offset = 60 * new Date(1000 * history.end).getTimezoneOffset();
  const ticks = [];
  for (let at = Math.ceil((begin - offset) / step) * step + offset; at <= history.end; at += step) {
    const x = place(at);
    const anchor = x < 16 ? "start" : x > width - 16 ? "end" : "middle";
    const text = new Date(1000 * at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
    ticks.push(makeSvg("line", { x1: x, x2: x, y1: HEIGHT, y2: HEIGHT + 3, class: "axis" }));
    ticks.push(makeSvg("text", { x, y: HEIGHT + 14, "text-anchor": anchor }, text));
  }
  return ticks;
}

function showLost() {
  const { columns } = history;
  const lost = Object.keys(columns)
    .filter((key) => key.startsWith("lost_tokens_"))
    .map((key) => [words(key.slice("lost_tokens_".length)), columns[key].at(-1) - columns[key][0]])
    .filter(([, value]) => value > 0)
    .sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...lost.map(([, value]) => value));
  find("lost").replaceChildren(
    ...(lost.length
      ? lost.flatMap(([reason, value]) => row(reason, [["shared", value, reason]], most, `${count(value)} tokens`))
      : [make("dt", { textContent: "None: all that was known was reused." }), make("dd")]),
  );
}

function showMemory(last) {
  const [pages, inUse, cached] = [last("pages"), last("pages_in_use"), last("pages_cached")];
  const pool = [
    ["computed", inUse, `${percent(inUse, pages)} in use`],
    ["held", cached, `${percent(cached, pages)} cached`],
    ["new", pages - inUse - cached, "free"],
  ];
  find("memory").replaceChildren(
    ...row("pool", pool, pages, `${percent(inUse, pages)} in use, ${percent(cached, pages)} cached`),
    ...row("states in the pool", [], 1, count(last("checkpoints"))),
    ...row("host memory", [], 1, `${counted(last("host_states"), "state")}, ${bytes(last("host_bytes"))}`),
    ...row("disk", [], 1, `${counted(last("disk_states"), "state")}, ${bytes(last("disk_bytes"))}`),
  );
}

function row(name, pieces, whole, text) {
  const bars = pieces.length ? [fillBar(make("span", { className: "bar" }), pieces, whole)] : [];
  return [make("dt", { textContent: name }), make("dd", {}, ...bars, make("span", { textContent: text }))];
}

function hover(index) {
  if (index === hovered) return;
  hovered = index;
  drawAll();
}

for (const [id, { series }] of Object.entries(CHARTS)) {
  const svg = find(id);
  svg.addEventListener("pointermove", (event) => {
    if (!history) return;
    const width = Math.max(60, svg.clientWidth - MARGIN);
    const share = Math.min(1, Math.max(0, (event.clientX - svg.getBoundingClientRect().left) / width));
    const at = history.end - history.span * (1 - share);
    const { time } = history.columns;
    const values = series.map(([, , call]) => call(history));
    const told = [...time.keys()].filter((i) => values.some((each) => each[i] !== null));
    hover(told.reduce((best, i) => (Math.abs(time[i] - at) < Math.abs(time[best] - at) ? i : best), told[0] ?? null));
  });
  svg.addEventListener("pointerleave", () => hover(null));
}

find("span").addEventListener("change", () => {
  hovered = null;
  onSpan();
});
new ResizeObserver(drawAll).observe(find("history"));
