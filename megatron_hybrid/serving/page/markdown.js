// Markdown of answers as elements. An answer is not trusted: its HTML is shown as text, and nothing
// of it runs or loads anything.

import { Lexer, Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js"; // as globalThis.DOMPurify

const escaped = (text) =>
  text.replace(/[&<>"]/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[char]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ text, href }) => `<em>[image: ${escaped(text || href)}]</em>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const purify = globalThis.DOMPurify;
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});
const ALLOWED = {
  ALLOWED_TAGS:
    "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul #text".split(" "),
  ALLOWED_ATTR: ["href", "align", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

// Unclosed signs cost a search to the end of their paragraph each: a very long one stays as it is.
const MOST_INLINE = 10_000; // characters

class BoundedLexer extends Lexer {
  inlineTokens(source, tokens = []) {
    if (source.length <= MOST_INLINE) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: source });
    return tokens;
  }
}

const lex = (text) => new BoundedLexer({ ...marked.defaults }).lex(text);
const elements = (tokens) => purify.sanitize(marked.parser(tokens), ALLOWED);

// A text that grows. Only its last block is rendered again: the cost of a long answer does not grow
// with its length.
export class GrowingMarkdown {
  #settled = 0; // characters of blocks that no longer change
  #tail = [];

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const source = text.replace(/\r\n?/g, "\n");
    const tokens = lex(source.slice(this.#settled));
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const settled = tokens.slice(0, Math.max(0, last));
    const raw = settled.map((token) => token.raw).join("");
    for (const node of this.#tail) node.remove();
    if (raw && source.startsWith(raw, this.#settled)) {
      this.element.append(elements(settled));
      this.#settled += raw.length;
      this.#setTail(tokens.slice(settled.length));
    } else this.#setTail(tokens);
  }

  // The whole text at once: links that are defined at its end work, too.
  finish(text) {
    this.#settled = 0;
    this.element.replaceChildren(elements(lex(text)));
    this.#tail = [...this.element.childNodes];
  }

  #setTail(tokens) {
    const fragment = elements(tokens);
    this.#tail = [...fragment.childNodes];
    this.element.append(fragment);
  }
}
