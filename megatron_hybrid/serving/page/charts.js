// The last hour: how much was skipped, what was lost and why, what was evicted, memory.

import { bytes, count, counted, fillBar, find, make, makeSvg, percent, words } from "./dom.js";

const BINS = 60;
const HOUR = 3600;
const MARGIN = 42;
const HEIGHT = 94;
const EVICTED = [
  ["checkpoints_evicted", "states"],
  ["kv_blocks_evicted", "KV blocks"],
  ["host_records_evicted", "host records"],
  ["disk_records_evicted", "disk records"],
];

export function showHistory(columns) {
  const last = (key) => columns[key].at(-1);
  const skipped = binned(columns, ["skipped_tokens"]);
  const prompts = binned(columns, ["prompt_tokens"]);
  drawBars(find("rate"), skipped.map((value, bin) => (prompts[bin] ? value / prompts[bin] : null)), 1, (rate, bin) =>
    `${percent(rate, 1)} of ${count(prompts[bin])} prompt tokens`,
  );
  find("rate-now").textContent = percent(last("skipped_tokens"), last("prompt_tokens"));

  const keys = EVICTED.map(([key]) => key);
  const evicted = binned(columns, keys);
  drawBars(find("evictions"), evicted, Math.max(1, ...evicted), (value) => `${count(value)} evicted`);
  const parts = EVICTED.filter(([key]) => last(key)).map(([key, name]) => `${count(last(key))} ${name}`);
  find("evictions-now").textContent = parts.join(", ") || "none";

  showLost(columns, last);
  showMemory(last);
}

// The growth of counters in each of BINS parts of the last hour.
function binned(columns, keys) {
  const bins = new Array(BINS).fill(0);
  const end = columns.time.at(-1);
  for (let i = 1; i < columns.time.length; i++) {
    const bin = BINS - 1 - Math.floor(((end - columns.time[i]) / HOUR) * BINS);
    if (bin < 0) continue;
    for (const key of keys) bins[bin] += columns[key][i] - columns[key][i - 1];
  }
  return bins;
}

function drawBars(svg, values, most, title) {
  const width = Math.max(60, svg.clientWidth - MARGIN);
  const className = svg.id === "rate" ? "skipped" : "evicted";
  const step = width / values.length;
  const bars = values.flatMap((value, bin) => {
    if (!value) return [];
    const height = Math.max(1, (HEIGHT * value) / most);
    const bar = makeSvg("rect", { x: bin * step, y: HEIGHT - height, width: step - 0.6, height, class: className });
    bar.append(makeSvg("title", {}, title(value, bin)));
    return [bar];
  });
  const line = makeSvg("line", { x1: 0, x2: width, y1: HEIGHT, y2: HEIGHT, class: "axis" });
  const labels = [
    makeSvg("text", { x: 0, y: HEIGHT + 13 }, "1 h ago"),
    makeSvg("text", { x: width, y: HEIGHT + 13, "text-anchor": "end" }, "now"),
    makeSvg("text", { x: width + 3, y: 9 }, most === 1 && svg.id === "rate" ? "100 %" : count(most)),
  ];
  svg.setAttribute("aria-label", svg.previousElementSibling.textContent);
  svg.replaceChildren(line, ...bars, ...labels);
}

function showLost(columns, last) {
  const lost = Object.keys(columns)
    .filter((key) => key.startsWith("lost_tokens_") && last(key) > 0)
    .map((key) => [words(key.slice("lost_tokens_".length)), last(key)])
    .sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...lost.map(([, value]) => value));
  find("lost").replaceChildren(
    ...(lost.length
      ? lost.flatMap(([reason, value]) => row(reason, [["shared", value, reason]], most, `${count(value)} tokens`))
      : [make("dt", { textContent: "none" }), make("dd")]),
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
