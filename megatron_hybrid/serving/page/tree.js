// The tree of cached prefixes as an icicle: left to right the tokens of prompts, top to bottom the
// prompts. A dot is a saved state.

import { bytes, count, counted, fairPower, find, make, words } from "./dom.js";

const AXIS = 18;
const ROW = 16;
const MAX_HEIGHT = 460;
const TIERS = { pool: "in the pool", host: "in host memory", disk: "on disk" };

// What the server has told: its columns of each edge, and the version to ask for changes of.
const told = new Map();
let version = null;
let tree = null;
let root = 0; // the edge that fills the picture; 0: all
let lit = 0; // the last edge of the lit path
let cursor = 0; // the edge that the keyboard is at

const canvas = find("tree-canvas");
const items = find("tree-items");

export const treeQuery = () => (version ? `?since=${encodeURIComponent(version)}` : "");

// Take over an answer of the server. Returns whether it has changed the tree.
function takeChanges(columns) {
  // Of two answers to one question the second comes too late.
  if (columns.since !== null && columns.since !== version) return false;
  if (columns.since === null) told.clear();
  version = columns.version;
  for (const number of columns.removed) told.delete(number);
  columns.numbers.forEach((number, index) => {
    told.set(number, {
      number,
      above: columns.parents[index],
      start: columns.starts[index],
      end: columns.ends[index],
      held: columns.held_ends[index],
      text: columns.texts?.[index],
      states: [],
    });
  });
  for (const [number, position, tier, kind, uses, size] of columns.states) {
    told.get(number).states.push({ position, tier, kind, uses, size });
  }
  return columns.since === null || columns.removed.length + columns.numbers.length > 0;
}

// Parents come first: a child begins where its parent ends. So one pass down and one up lay the
// tree out.
function layOut(numEdges) {
  const edges = new Map();
  const top = { number: 0, start: 0, end: 0, held: 0, row: 0, children: [], states: [], parent: null };
  edges.set(0, top);
  for (const edge of [...told.values()].sort((a, b) => a.start - b.start)) {
    edge.parent = edges.get(edge.above);
    edge.children = [];
    edge.row = 0;
    edges.set(edge.number, edge);
    edge.parent.children.push(edge);
  }
  const ordered = [...edges.values()];
  for (const edge of ordered.toReversed()) {
    // A leaf keeps its number when it is split: children stay in their order.
    edge.children.sort((a, b) => a.first - b.first);
    edge.first = edge.children[0]?.first ?? edge.number;
    edge.leaves = edge.children.reduce((sum, child) => sum + child.leaves, 0) || 1;
    edge.depth = Math.max(edge.end, ...edge.children.map((child) => child.depth));
  }
  for (const edge of ordered) {
    let { row } = edge;
    for (const child of edge.children) {
      child.row = row;
      row += child.leaves;
    }
  }
  return { edges, numEdges, shapes: [] };
}

export function showTree(columns) {
  if (!takeChanges(columns)) return;
  performance.mark("tree-begin");
  tree = layOut(columns.num_edges);
  const shown = tree.edges.size - 1;
  const more = tree.numEdges > shown ? `, the last used ${count(shown)} are shown` : "";
  const pieces = [...told.values()];
  const tokens = pieces.reduce((sum, { held, start }) => sum + held - start, 0);
  const tiers = Object.groupBy(pieces.flatMap(({ states }) => states), ({ tier }) => tier);
  const states = Object.entries(TIERS)
    .filter(([tier]) => tiers[tier])
    .map(([tier, place]) => `${counted(tiers[tier].length, "state")} ${place}`);
  find("tree-summary").textContent = [
    `${counted(tree.numEdges, "piece")}${more}`,
    `KV of ${counted(tokens, "token")} in the pool`,
    ...states,
  ].join(" · ");
  find("tree-empty").hidden = tree.numEdges > 0;
  find("tree-box").hidden = find("tree-detail").hidden = !tree.numEdges;
  if (!tree.edges.has(root)) root = 0;
  drawTree();
  performance.measure("tree", "tree-begin");
}

export function lightPath(edge) {
  lit = edge;
  if (tree) drawTree();
}

export function drawTree() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`);
  const colors = Object.fromEntries(
    ["held", "known", "lit", "faint", "pool", "host", "disk"].map((name) => [name, color(name)]),
  );
  const shown = tree.edges.get(root);
  const width = canvas.parentElement.clientWidth;
  const height = Math.min(MAX_HEIGHT, Math.max(3, shown.leaves) * ROW);
  const scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = (height + AXIS) * scale;
  canvas.style.height = `${height + AXIS}px`;
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);

  const rowHeight = height / shown.leaves;
  const span = Math.max(1, shown.depth - shown.start);
  const leaves = [...tree.edges.values()].filter((edge) => !edge.children.length && edge.end > shown.start);
  const power = fairPower(leaves.map((edge) => edge.end - shown.start));
  const place = (position) => 4 + (width - 12) * Math.max(0, (position - shown.start) / span) ** power;
  const path = new Set();
  for (let edge = tree.edges.get(lit); edge; edge = edge.parent) path.add(edge);

  tree.shapes = [];
  const dots = [];
  const stack = shown.number ? [shown] : [...shown.children];
  while (stack.length) {
    const edge = stack.pop();
    stack.push(...edge.children);
    const left = place(edge.start);
    const right = place(edge.end);
    const shape = {
      edge,
      left,
      right: Math.max(right, left + 1),
      top: (edge.row - shown.row) * rowHeight,
      bottom: (edge.row - shown.row + edge.leaves) * rowHeight,
    };
    tree.shapes.push(shape);
    const gap = rowHeight > 5 ? 1 : 0;
    const rect = (from, to, fill) => {
      draw.fillStyle = fill;
      draw.fillRect(from, shape.top, Math.max(0.7, to - from - gap), shape.bottom - shape.top - gap);
    };
    rect(left, right, colors.known);
    if (edge.held > edge.start) rect(left, place(edge.held), colors.held);
    if (path.has(edge)) {
      draw.fillStyle = colors.lit;
      draw.fillRect(left, shape.top, Math.max(1.5, right - left - gap), Math.max(2, Math.min(4, rowHeight)));
    }
    for (const state of edge.states) dots.push([state, place(state.position), shape]);
  }
  const radius = Math.max(1, Math.min(4.5, rowHeight / 3));
  for (const [state, x, shape] of dots) {
    draw.beginPath();
    draw.arc(x, Math.min(shape.top + ROW / 2, (shape.top + shape.bottom) / 2), radius, 0, 7);
    if (state.tier === "evicted") {
      if (radius < 2) continue;
      draw.strokeStyle = colors.faint;
      draw.stroke();
    } else {
      draw.fillStyle = colors[state.tier];
      draw.fill();
    }
  }
  drawAxis(draw, ticksOf(shown, span, power, width / 110), place, height, width, colors);
  find("tree-whole").hidden = !root;
  showCursor();
}

// Round numbers of tokens, about as many as asked for: at even distances of tokens, or of the picture
// where a power is drawn.
function ticksOf(shown, span, power, most) {
  const round = (value) => {
    const unit = 10 ** Math.floor(Math.log10(Math.max(1, value)));
    return [1, 2, 5, 10].map((digit) => digit * unit).find((each) => each >= value);
  };
  if (power < 1) {
    const parts = [...Array(Math.floor(most)).keys()].map((i) => span * (i / most) ** (1 / power));
    return [shown.start, ...new Set(parts.slice(1).map((each) => shown.start + round(each)))].filter((at) => at <= shown.depth);
  }
  const step = round(span / Math.max(2, most));
  const first = Math.ceil(shown.start / step);
  return [...Array(Math.floor(shown.depth / step) - first + 1).keys()].map((i) => (first + i) * step);
}

function drawAxis(draw, ticks, place, height, width, colors) {
  draw.fillStyle = colors.faint;
  draw.font = "10px system-ui, sans-serif";
  for (const at of ticks) {
    draw.fillRect(place(at), height, 1, 4);
    const text = count(at);
    const left = place(at) - draw.measureText(text).width / 2;
    draw.fillText(text, Math.min(width - draw.measureText(text).width, Math.max(0, left)), height + 15);
  }
}

function shapeAt(event) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  // The deepest one: children are behind their parents in the list.
  return tree?.shapes.findLast((s) => s.left <= x && x < s.right && s.top <= y && y < s.bottom);
}

function describe({ edge }) {
  const held = edge.held === edge.end ? "all KV in the pool" : `KV up to ${count(edge.held)} in the pool`;
  const states = edge.states.map(
    ({ position, tier, kind, uses, size }) =>
      `${count(position)} ${words(kind)} (${tier}${size ? `, ${bytes(size)}` : ""}, ${counted(uses, "use")})`,
  );
  return [
    `tokens ${count(edge.start)} to ${count(edge.end)}`,
    edge.held > edge.start ? held : "known, no KV in the pool",
    states.length ? `states at ${states.join(", ")}` : "no states",
    ...(edge.text ? [`“${edge.text}…”`] : []),
  ].join(" · ");
}

canvas.addEventListener("mousemove", (event) => {
  const shape = shapeAt(event);
  if (shape) find("tree-detail").textContent = describe(shape);
});

canvas.addEventListener("click", (event) => {
  const shape = shapeAt(event);
  if (!shape) return;
  cursor = shape.edge.number;
  enlarge(shape.edge);
});

function enlarge(edge) {
  root = edge.number === root ? 0 : edge.number;
  drawTree();
  find("tree-detail").textContent = describe({ edge });
}

find("tree-whole").addEventListener("click", () => {
  root = 0;
  drawTree();
});

// The keyboard ------------------------------------------------------------------------------------

// Of up to ten thousand pieces only the one at the cursor is an element. It says where in the tree
// it is, and another one takes its place, and the focus, when the cursor moves.
function showCursor() {
  const first = tree.edges.get(root);
  if (!tree.shapes.some(({ edge }) => edge.number === cursor)) {
    cursor = (root ? first : first.children[0])?.number ?? 0;
  }
  const shape = tree.shapes.find(({ edge }) => edge.number === cursor);
  if (!shape) return items.replaceChildren();
  let item = items.firstChild;
  if (Number(item?.dataset.edge) !== cursor) {
    const hadFocus = item !== null && item === document.activeElement;
    item = make("div", { role: "treeitem", tabIndex: 0 });
    item.dataset.edge = cursor;
    items.replaceChildren(item);
    if (hadFocus) item.focus({ preventScroll: true });
  }
  const { edge } = shape;
  const siblings = edge.parent.children;
  let level = 0;
  for (let each = edge; each.parent; each = each.parent) level += 1;
  item.ariaLevel = level;
  item.ariaSetSize = siblings.length;
  item.ariaPosInSet = siblings.indexOf(edge) + 1;
  item.ariaExpanded = edge.children.length ? "true" : null;
  item.ariaLabel = describe(shape);
  const [width, height] = [shape.right - shape.left, shape.bottom - shape.top];
  Object.assign(item.style, {
    left: `${shape.left}px`,
    top: `${shape.top}px`,
    width: `${Math.max(6, width)}px`,
    height: `${Math.max(6, height)}px`,
  });
}

// The next piece below, or above, on the same level or nearer to the start.
function beside(edge, step) {
  for (let each = edge; each.parent && each.number !== root; each = each.parent) {
    const siblings = each.parent.children;
    const found = siblings[siblings.indexOf(each) + step];
    if (found) return found;
  }
  return edge;
}

function target(key, edge) {
  const first = root ? tree.edges.get(root) : tree.edges.get(0).children[0];
  if (key === "ArrowRight") return edge.children[0];
  if (key === "ArrowLeft") return edge.number !== root && edge.parent.number ? edge.parent : edge;
  if (key === "ArrowDown") return beside(edge, 1);
  if (key === "ArrowUp") return beside(edge, -1);
  if (key === "Home") return first;
  if (key !== "End") return null;
  let last = root ? first : tree.edges.get(0).children.at(-1);
  while (last.children.length) last = last.children.at(-1);
  return last;
}

items.addEventListener("keydown", (event) => {
  const edge = tree.edges.get(cursor);
  const found = target(event.key, edge);
  if (found) {
    cursor = found.number;
    showCursor();
    find("tree-detail").textContent = describe({ edge: found });
  } else if (event.key === "Enter" || event.key === " ") enlarge(edge);
  else if (event.key === "Escape" && root) enlarge(tree.edges.get(root));
  else if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
});

items.addEventListener("focusin", () => {
  find("tree-detail").textContent = describe({ edge: tree.edges.get(cursor) });
});

new ResizeObserver(() => tree && drawTree()).observe(canvas.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => tree && drawTree());
