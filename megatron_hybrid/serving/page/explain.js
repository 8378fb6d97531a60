// The explain box: what would be skipped of a prompt now, and why not more.

import { post } from "./api.js";
import { promptWith } from "./chat.js";
import { count, fillBar, find } from "./dom.js";

let onPath = () => {};

export function whenExplained(call) {
  onPath = call;
}

find("explain-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = find("explain-text").value;
  if (!text.trim()) return;
  const body = find("explain-chat").checked ? promptWith(text) : { prompt: text };
  const client = find("explain-key").value.trim();
  if (client) body.api_key = client; // each key has prefixes of its own
  const answer = find("explain-answer");
  const bar = find("explain-bar");
  answer.hidden = false;
  try {
    const told = await post("cache/explain", body);
    const { prompt_tokens: prompt, skipped_tokens: skipped, shared_tokens: shared } = told;
    const known = Math.max(0, told.known_tokens - Math.max(shared, skipped));
    fillBar(
      bar,
      [
        ["skipped", skipped, `${count(skipped)} skipped`],
        ["shared", shared - skipped, `${count(shared - skipped)} shared, and computed again`],
        ["known", known, `${count(known)} known, without KV`],
        ["new", prompt - shared - known, `${count(prompt - shared - known)} new`],
      ],
      prompt,
    );
    bar.hidden = false;
    answer.textContent = told.text;
    onPath(told.edge);
  } catch (error) {
    bar.hidden = true;
    answer.textContent = error.message;
  }
});
