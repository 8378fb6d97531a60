// The chat: answers as they come, each with what was reused of its prompt.

import { stream } from "./api.js";
import { count, find, make, percent, words } from "./dom.js";

export const messages = [];
let stopping = null;
let onAnswer = () => {};

export function whenAnswered(call) {
  onAnswer = call;
}

function addTurn(className) {
  const text = make("span");
  const note = make("small");
  const item = make("li", { className }, text, note);
  find("turns").append(item);
  item.scrollIntoView({ block: "nearest" });
  return { item, text, note };
}

function reuse(usage) {
  const { skipped_tokens: skipped, miss_reason: reason } = usage.prefix;
  const why = reason ? `: ${words(reason)}` : "";
  return `${count(skipped)} of ${count(usage.prompt_tokens)} prompt tokens skipped (${percent(skipped, usage.prompt_tokens)})${why}`;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  addTurn("user").text.textContent = text;
  const turn = addTurn("assistant");
  const answer = { role: "assistant", content: "" };
  stopping = new AbortController();
  setBusy(true);
  const began = performance.now();
  try {
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(find("temperature").value),
      max_completion_tokens: Number(find("max-tokens").value),
    };
    for await (const chunk of stream("v1/chat/completions", body, stopping.signal)) {
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.reasoning) thought(turn).textContent += delta.reasoning;
      answer.content += delta.content ?? "";
      turn.text.textContent = answer.content.trimStart();
      if (chunk.usage) {
        turn.note.textContent = `${reuse(chunk.usage)} · ${count(chunk.usage.completion_tokens)} new in ${((performance.now() - began) / 1000).toFixed(1)} s`;
      }
      turn.item.parentElement.scrollTop = turn.item.parentElement.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") turn.note.textContent = "stopped";
    else {
      turn.item.classList.add("failed");
      turn.text.textContent = error.message;
    }
  }
  if (turn.item.classList.contains("failed")) messages.pop();
  else messages.push(answer);
  setBusy(false);
  onAnswer();
}

function thought(turn) {
  turn.thought ??= turn.item.insertBefore(make("div", { className: "thought" }), turn.text);
  return turn.thought;
}

function setBusy(busy) {
  find("chat-send").disabled = find("chat-new").disabled = busy;
  find("chat-stop").hidden = !busy;
}

find("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("chat-text").value;
  if (!text.trim() || find("chat-send").disabled) return;
  find("chat-text").value = "";
  ask(text);
});

find("chat-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("chat-form").requestSubmit();
  }
});

find("chat-stop").addEventListener("click", () => stopping?.abort());

find("chat-new").addEventListener("click", () => {
  messages.length = 0;
  find("turns").replaceChildren();
  find("chat-text").focus();
});
