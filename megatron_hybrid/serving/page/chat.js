// The chat: answers as they come, each with what was reused of its prompt.

import { stream } from "./api.js";
import { copy, count, find, make, percent, words } from "./dom.js";
import { GrowingMarkdown } from "./markdown.js";
import { maxTokens, restore, sampling, system, whenChanged } from "./settings.js";
import { load, save } from "./store.js";

const PAUSE = 100; // milliseconds between two renderings of an answer; more if one takes long

let turns = []; // {role, content, thought, note, failed}
let hasTemplate = true;
let stopping = null;
let onAnswer = () => {};

export function whenAnswered(call) {
  onAnswer = call;
}

export function setTemplate(has) {
  hasTemplate = has;
  find("no-template").hidden = has;
}

// The prompt of the chat with one more message, as fields of a request.
export function promptWith(text) {
  return promptOf([...turns, { role: "user", content: text }]);
}

function promptOf(all) {
  // A question that was not answered is left out, unless it is the last one.
  const said = all.filter(({ failed }, index) => !failed && !all[index + 1]?.failed);
  const messages = said.map(({ role, content }) => ({ role, content }));
  if (system().trim()) messages.unshift({ role: "system", content: system() });
  if (hasTemplate) return { messages };
  // Without a template the model continues the text as it is.
  return { prompt: messages.map(({ role, content }) => (role === "user" ? content : `${content}\n`)).join("") };
}

function reuse(usage) {
  const { skipped_tokens: skipped, miss_reason: reason } = usage.prefix;
  const why = reason ? `: ${words(reason)}` : "";
  return `${count(skipped)} of ${count(usage.prompt_tokens)} prompt tokens skipped (${percent(skipped, usage.prompt_tokens)})${why}`;
}

// Elements of a turn ------------------------------------------------------------------------------

function button(name, title, call) {
  const element = make("button", { type: "button", className: "small", textContent: name, title });
  element.addEventListener("click", () => call(element));
  return element;
}

function copyButton(text) {
  return button("Copy", "Copy the text", async (element) => {
    element.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (element.textContent = "Copy"), 1500);
  });
}

function addTurn(turn) {
  const said = make("div", { className: "said" });
  const note = make("small", { textContent: turn.note ?? "" });
  const actions = make("div", { className: "actions" });
  const item = make("li", { className: turn.role }, said, note, actions);
  const view = { item, said, note, actions };
  if (turn.role === "user") {
    said.textContent = turn.content;
    actions.append(
      copyButton(() => turn.content),
      button("Edit", "Edit this message; what follows is answered again", () => edit(turn, view)),
    );
  } else {
    view.markdown = new GrowingMarkdown(said);
    if (turn.thought) thought(view).textContent = turn.thought;
    if (turn.content) finish(turn, view);
  }
  find("turns").append(item);
  return view;
}

function finish(turn, view) {
  view.item.classList.toggle("failed", Boolean(turn.failed));
  view.note.textContent = turn.note ?? "";
  view.markdown.finish(turn.content.trimStart());
  for (const code of view.said.querySelectorAll("pre")) {
    const text = code.textContent;
    code.prepend(copyButton(() => text));
  }
  view.actions.replaceChildren(...(turn.failed ? [] : [copyButton(() => turn.content)]));
  view.actions.append(
    button(turn.failed ? "Try again" : "Regenerate", "Answer again; what follows is dropped", () => {
      keepBefore(turns.indexOf(turn));
      answer();
    }),
  );
}

function thought(view) {
  view.thought ??= view.item.insertBefore(make("div", { className: "thought" }), view.said);
  return view.thought;
}

function edit(turn, view) {
  const text = make("textarea", { value: turn.content, rows: 3, ariaLabel: "Edited message" });
  const close = () => form.replaceWith(view.said, view.actions);
  const cancel = button("Cancel", "Leave the message as it was", close);
  const form = make("form", {}, text, make("div", { className: "controls" }, make("button", { textContent: "Send" }), cancel));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!text.value.trim() || stopping) return;
    keepBefore(turns.indexOf(turn));
    ask(text.value);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else sendOnEnter(event, form);
  });
  view.actions.remove();
  view.said.replaceWith(form);
  text.focus();
}

function keepBefore(index) {
  turns.length = index;
  while (find("turns").children.length > index) find("turns").lastChild.remove();
}

// Asking ------------------------------------------------------------------------------------------

function ask(text) {
  const turn = { role: "user", content: text };
  turns.push(turn);
  addTurn(turn);
  answer();
}

async function answer() {
  const { max_tokens: _, ...chosen } = sampling();
  const body = {
    ...promptOf(turns),
    ...chosen,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: maxTokens(),
  };
  const turn = { role: "assistant", content: "", thought: "" };
  turns.push(turn);
  const view = addTurn(turn);
  const list = find("turns");
  list.scrollTop = list.scrollHeight;
  const rendering = atMostEvery(PAUSE, () => {
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    if (turn.thought) thought(view).textContent = turn.thought;
    view.markdown.show(turn.content.trimStart());
    if (atEnd) list.scrollTop = list.scrollHeight;
  });
  const began = performance.now();
  setBusy(new AbortController());
  try {
    const path = hasTemplate ? "v1/chat/completions" : "v1/completions";
    for await (const chunk of stream(path, body, stopping.signal)) {
      const choice = chunk.choices[0];
      turn.thought += choice?.delta?.reasoning ?? "";
      turn.content += choice?.delta?.content ?? choice?.text ?? "";
      rendering.ask();
      if (chunk.usage) {
        const seconds = ((performance.now() - began) / 1000).toFixed(1);
        turn.note = `${reuse(chunk.usage)} · ${count(chunk.usage.completion_tokens)} new in ${seconds} s`;
      }
    }
    turn.note ??= "The answer is empty.";
  } catch (error) {
    const isStopped = error.name === "AbortError";
    turn.note = isStopped ? "stopped" : error.message;
    turn.failed = !isStopped || !turn.content;
  }
  rendering.end();
  finish(turn, view);
  list.scrollTop = list.scrollHeight;
  setBusy(null);
  keep();
  onAnswer();
}

// Call `draw` some time after it was asked for: at most every so many milliseconds, and for a tenth
// of the time.
function atMostEvery(pause, draw) {
  let timer = 0;
  let cost = 0;
  const run = () => {
    timer = 0;
    const began = performance.now();
    draw();
    cost = performance.now() - began;
  };
  return {
    ask: () => (timer ||= setTimeout(run, Math.max(pause, 9 * cost))),
    end: () => clearTimeout(timer),
  };
}

function setBusy(controller) {
  stopping = controller;
  const busy = Boolean(controller);
  find("chat-send").disabled = find("chat-new").disabled = busy;
  find("chat-send").hidden = busy;
  find("chat-stop").hidden = !busy;
  find("turns").ariaBusy = busy;
  find("chat").classList.toggle("busy", busy); // hides what would change the turns
  showEmpty();
}

const keep = () => save({ turns, system: system(), sampling: sampling() });

function showEmpty() {
  find("chat-empty").hidden = turns.length > 0;
}

function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

find("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("chat-text").value;
  if (!text.trim() || stopping) return;
  find("chat-text").value = "";
  ask(text);
});

find("chat-text").addEventListener("keydown", (event) => sendOnEnter(event, find("chat-form")));
find("chat-stop").addEventListener("click", () => stopping?.abort());

find("chat-new").addEventListener("click", () => {
  keepBefore(0);
  keep();
  showEmpty();
  find("chat-text").focus();
});

for (const example of document.querySelectorAll("#chat-empty button")) {
  example.addEventListener("click", () => {
    find("chat-text").value = example.textContent;
    find("chat-text").focus();
  });
}

const kept = load();
turns = kept.turns;
restore(kept.sampling, kept.system);
for (const turn of turns) {
  // Of an answer that a reload cut off there is what had come.
  if (turn.role === "assistant") turn.note ??= "stopped";
  const view = addTurn(turn);
  if (turn.role === "assistant" && !turn.content) finish(turn, view);
}
find("turns").scrollTop = find("turns").scrollHeight;
showEmpty();
whenChanged(keep);
addEventListener("pagehide", keep);
