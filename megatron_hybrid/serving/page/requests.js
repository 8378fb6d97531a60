// The requests as bars: what was skipped of each prompt, what is computed, and why not less.

import { count, fairPower, fillBar, find, make, words } from "./dom.js";

const rows = new Map(); // by request id
let selected = null;
let onSelect = () => {};

export function whenSelected(call) {
  onSelect = call;
}

// Select the request that ended last, as after an answer of the chat.
export function selectNewest(requests) {
  const ended = requests.find((request) => request.is_ended);
  if (ended) select(ended.request_id, requests);
}

export function selectedEdge(requests) {
  return requests.find((request) => request.request_id === selected)?.edge ?? 0;
}

function select(id, requests) {
  selected = id;
  for (const [each, row] of rows) row.button.setAttribute("aria-pressed", each === id);
  onSelect(selectedEdge(requests));
}

export function showRequests(requests) {
  find("no-requests").hidden = requests.length > 0;
  const lengths = requests.map(lengthOf);
  const [longest, power] = [Math.max(1, ...lengths), fairPower(lengths)];
  const seen = new Set(requests.map((request) => request.request_id));
  for (const [id, row] of rows) {
    if (!seen.has(id)) {
      row.item.remove();
      rows.delete(id);
    }
  }
  const items = requests.map((request) => {
    const row = rows.get(request.request_id) ?? newRow(request.request_id);
    row.button.onclick = () =>
      select(selected === request.request_id ? null : request.request_id, requests);
    row.bar.style.width = `max(12px, ${100 * (lengthOf(request) / longest) ** power}%)`;
    fillRow(row, request);
    return row.item;
  });
  const list = find("request-rows");
  if (items.some((item, index) => list.children[index] !== item)) list.replaceChildren(...items);
}

function newRow(id) {
  const name = make("span", { textContent: `#${id}` });
  const bar = make("span", { className: "bar" });
  const text = make("span", { className: "text" });
  const button = make("button", { type: "button", className: "row" }, name, bar, text);
  button.setAttribute("aria-pressed", "false");
  const row = { item: make("li", {}, button), button, bar, text };
  rows.set(id, row);
  return row;
}

const lengthOf = (request) => request.prompt_tokens + request.generated_tokens;

function fillRow(row, request) {
  const { prompt_tokens: prompt, skipped_tokens: skipped, shared_tokens: shared } = request;
  const done = Math.max(Math.min(request.computed_tokens, prompt), skipped);
  const recomputed = Math.max(0, Math.min(shared, done) - skipped);
  row.button.classList.toggle("ended", request.is_ended);
  fillBar(
    row.bar,
    [
      ["skipped", skipped, `${count(skipped)} skipped`],
      ["shared", recomputed, `${count(recomputed)} computed, their KV is shared`],
      ["computed", done - skipped - recomputed, `${count(done - skipped - recomputed)} computed`],
      ["pending", prompt - done, `${count(prompt - done)} to compute`],
      ["answer", request.generated_tokens, `${count(request.generated_tokens)} of the answer`],
    ],
    lengthOf(request),
  );
  const reason = request.miss_reason ? `: ${words(request.miss_reason)}` : "";
  const first = request.seconds_to_first_token;
  const parts = [
    words(request.status),
    `${count(skipped)} of ${count(prompt)} skipped${reason}`,
    `${count(request.generated_tokens)} new`,
    ...(request.draft_tokens
      ? [`${count(request.accepted_draft_tokens)} of ${count(request.draft_tokens)} drafts accepted`]
      : []),
    ...(first === null ? [] : [`first token ${(1000 * first).toFixed(0)} ms`]),
    ...(request.text ? [`“…${request.text}”`] : []),
  ];
  row.text.textContent = row.text.title = parts.join(" · ");
}
