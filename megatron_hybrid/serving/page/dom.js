// Small helpers for elements, bars and numbers.

export const find = (id) => document.getElementById(id);

export function make(tag, fields = {}, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function makeSvg(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

export const count = (number) => number.toLocaleString("en");
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
export const words = (reason) => reason.replaceAll("_", " ").replace(/^kv /, "KV ");

export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, number)) / 10));
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

// The power of lengths that are drawn in place of lengths of which few are far longer than the rest:
// a fourth of them has less than a fifth of the width, at most.
export function fairPower(lengths) {
  const sorted = [...lengths].sort((a, b) => a - b);
  const share = sorted[Math.floor((sorted.length - 1) / 4)] / sorted.at(-1);
  return share > 0 && share < 0.2 ? Math.log(0.2) / Math.log(share) : 1;
}

// Pieces of a bar: [class, amount, title], drawn as parts of a whole.
export function fillBar(bar, pieces, whole) {
  bar.replaceChildren(
    ...pieces
      .filter(([, amount]) => amount > 0)
      .map(([className, amount, title]) => {
        const piece = make("span", { className, title });
        piece.style.width = `${(100 * amount) / whole}%`;
        return piece;
      }),
  );
  return bar;
}

// Whether the text is in the clipboard now. Pages without TLS have only the older way.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
