// The system prompt and the fields of sampling, which begin with the model's defaults. Only what was
// changed is sent, so that the server's rules for the rest hold.

import { find, make } from "./dom.js";

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, step: 0.05 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
];
const PAGE_DEFAULTS = { max_tokens: 256 };
const inputs = new Map();
let defaults = { ...PAGE_DEFAULTS };
let onChange = () => {};

for (const [name, label, attributes] of FIELDS) {
  const input = make("input", { type: "number", id: name.replace("_", "-"), ...attributes });
  input.addEventListener("input", changed);
  inputs.set(name, input);
  find("sampling").append(make("label", {}, `${label} `, input));
}
find("system").addEventListener("input", changed);
find("sampling-reset").addEventListener("click", () => {
  for (const [name, input] of inputs) input.value = defaults[name] ?? "";
  changed();
});

export function whenChanged(call) {
  onChange = call;
}

// What differs from the defaults.
export function sampling() {
  const different = [...inputs].filter(([name, { value }]) => value !== "" && Number(value) !== defaults[name]);
  return Object.fromEntries(different.map(([name, { value }]) => [name, Number(value)]));
}

export const maxTokens = () => Number(find("max-tokens").value || PAGE_DEFAULTS.max_tokens);
export const system = () => find("system").value;

export function setDefaults(model) {
  const chosen = sampling();
  // Both 0 and 1 keep all tokens; 1 is the usual way to say it.
  const told = model.sampling_defaults;
  defaults = { ...PAGE_DEFAULTS, ...told, top_p: told.top_p || 1 };
  restore(chosen, system());
}

export function restore(chosen, text) {
  for (const [name, input] of inputs) input.value = chosen[name] ?? defaults[name] ?? "";
  find("system").value = text;
  summarise();
}

function changed() {
  summarise();
  onChange();
}

function summarise() {
  const parts = Object.entries(sampling()).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  if (system().trim()) parts.unshift("a system prompt");
  find("settings-now").textContent = parts.join(", ") || "the model's defaults";
  find("sampling-reset").disabled = !Object.keys(sampling()).length;
}
