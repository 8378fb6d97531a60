// The routes of /openapi.json: fields of bodies, what is answered, and the objects in both.

import { find, make } from "./dom.js";

const described = await (await fetch("openapi.json")).json();
const schemas = described.components.schemas;
const NOT_SUPPORTED = "It is not supported.";

const nameOf = (schema) => schema?.$ref?.split("/").at(-1);
const bodyOf = (operation) => nameOf(operation.requestBody?.content["application/json"].schema);

// A type in a few words: "array of integer or null".
function kindOf(schema) {
  if (nameOf(schema)) return nameOf(schema);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(kindOf))].join(" or ");
  const values = schema.enum ?? ("const" in schema ? [schema.const] : null);
  if (values) return values.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array" && schema.items) return `array of ${kindOf(schema.items)}`;
  return [schema.type ?? "any value"].flat().join(" or ");
}

function rowOf(name, schema, isRequired, about) {
  const given = schema.default ?? schema.anyOf?.find((each) => "default" in each)?.default;
  const standard = given == null ? "" : JSON.stringify(given);
  const cells = [name, kindOf(schema), isRequired ? "required" : standard, about ?? ""];
  return make("tr", {}, ...cells.map((textContent) => make("td", { textContent })));
}

function tableOf(rows) {
  const heads = ["field", "type", "default", "meaning"];
  const head = make("tr", {}, ...heads.map((textContent) => make("th", { textContent })));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

// A table of the fields, and the names of those that are refused.
function fieldsOf(schema) {
  const all = Object.entries(schema.properties ?? {});
  const isRefused = ([, field]) => field.description === NOT_SUPPORTED;
  const rows = all
    .filter((field) => !isRefused(field))
    .map(([name, field]) => rowOf(name, field, schema.required?.includes(name), field.description));
  const refused = all.filter(isRefused).map(([name]) => name);
  const parts = rows.length ? [tableOf(rows)] : [];
  if (refused.length)
    parts.push(make("p", { textContent: `Refused, unless they ask for nothing: ${refused.join(", ")}` }));
  return parts;
}

function routeOf(method, path, operation) {
  const section = make("section", {}, make("h2", { textContent: `${method} ${path}` }));
  const parameters = operation.parameters ?? [];
  if (parameters.length)
    section.append(tableOf(parameters.map((each) => rowOf(each.name, each.schema, each.required, each.description))));
  const body = schemas[bodyOf(operation)];
  if (body) section.append(...fieldsOf(body));
  const answers = Object.entries(operation.responses).map(([status, answer]) => {
    const kinds = Object.entries(answer.content).map(([type, { schema }]) =>
      [type, nameOf(schema)].filter(Boolean).join(": "),
    );
    return make("li", { textContent: `${status}: ${answer.description}, as ${kinds.join(" or ")}` });
  });
  section.append(make("ul", {}, ...answers));
  return section;
}

const bodies = new Set();
for (const [path, operations] of Object.entries(described.paths))
  for (const [method, operation] of Object.entries(operations)) {
    bodies.add(bodyOf(operation));
    find("routes").append(routeOf(method.toUpperCase(), path, operation));
  }
for (const [name, schema] of Object.entries(schemas))
  if (!bodies.has(name))
    find("objects").append(make("section", {}, make("h2", { textContent: name }), ...fieldsOf(schema)));
