// What outlives a reload, in the browser alone: the chat and its settings.

const KEY = "megatron-hybrid-chat";
const MOST = 1_000_000; // characters; a browser keeps about five times as much for a server

export function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
    return { system: "", sampling: {}, ...kept, turns: Array.isArray(kept.turns) ? kept.turns : [] };
  } catch {
    return { turns: [], system: "", sampling: {} };
  }
}

// Of a chat that is too long, the first turns are forgotten, in pairs.
export function save({ turns, system, sampling }) {
  let size = turns.reduce((sum, turn) => sum + JSON.stringify(turn).length, 0);
  let first = 0;
  while (size > MOST && first < turns.length) {
    size -= JSON.stringify(turns[first]).length;
    first += 1;
  }
  if (turns[first]?.role === "assistant") first += 1;
  try {
    localStorage.setItem(KEY, JSON.stringify({ turns: turns.slice(first), system, sampling }));
  } catch {
    // Storage is full or forbidden: the chat goes on without it.
  }
}
