// The routes of /openapi.json: fields of bodies, and what is answered.

import { find, make } from "./dom.js";

const described = await (await fetch("openapi.json")).json();

function bodyOf(operation) {
  const schema = operation.requestBody?.content["application/json"].schema;
  const name = schema?.$ref?.split("/").at(-1);
  return described.components.schemas[name];
}

function routeOf(method, path, operation) {
  const section = make("section", {}, make("h2", { textContent: `${method} ${path}` }));
  const body = bodyOf(operation);
  if (body) {
    const fields = Object.keys(body.properties).map((name) =>
      body.required?.includes(name) ? `${name} (required)` : name,
    );
    section.append(make("p", { textContent: `Fields: ${fields.join(", ")}` }));
  }
  const answers = Object.entries(operation.responses).map(([status, answer]) =>
    make("li", { textContent: `${status}: ${answer.description}, as ${Object.keys(answer.content).join(" or ")}` }),
  );
  section.append(make("ul", {}, ...answers));
  return section;
}

for (const [path, operations] of Object.entries(described.paths))
  for (const [method, operation] of Object.entries(operations))
    find("routes").append(routeOf(method.toUpperCase(), path, operation));
