// Asks the server again and again, and hands what it says to the parts of the page.

import { get, hasKey, setKey } from "./api.js";
import { setTemplate, whenAnswered } from "./chat.js";
import { seconds, showHistory, skipped, whenSpanChanges } from "./charts.js";
import { count, find } from "./dom.js";
import { whenExplained } from "./explain.js";
import { selectedEdge, selectNewest, showRequests, whenSelected } from "./requests.js";
import { setDefaults } from "./settings.js";
import { lightPath, showTree, treeQuery } from "./tree.js";

let requests = [];
let litBy = "request"; // or "explain"

async function readRequests() {
  ({ requests } = await get("requests"));
  showRequests(requests);
  const live = requests.filter((request) => !request.is_ended);
  const waiting = live.filter((request) => request.status === "waiting").length;
  find("load").textContent = `${count(live.length - waiting)} run, ${count(waiting)} wait`;
  if (litBy === "request") lightPath(selectedEdge(requests));
}

const readTree = async () => showTree(await get(`cache/tree${treeQuery()}`));

async function readHistory() {
  const span = seconds();
  const columns = await get(`cache/history?seconds=${span}`);
  if (span !== seconds()) return; // another one was chosen meanwhile
  showHistory(columns, span);
  find("skipped").textContent = skipped();
}

async function readModel() {
  find("explain-client").hidden = !hasKey();
  const [model] = (await get("v1/models")).data;
  find("model").textContent = document.title = model.id;
  find("note").textContent = model.description ?? "";
  find("note").hidden = !model.description;
  setTemplate(model.has_chat_template);
  setDefaults(model);
}

// Call a reader every few seconds while the page is seen, or less often: a busy server is to spend
// little of its time on the page.
function repeat(read, seconds) {
  const again = async () => {
    let pause = seconds;
    if (!document.hidden) {
      try {
        const began = performance.now();
        await read();
        pause = Math.max(seconds, (performance.now() - began) / 200);
        find("problem").hidden = true;
      } catch (error) {
        pause = 5;
        show(error);
      }
    }
    setTimeout(again, 1000 * pause);
  };
  again();
}

function show(error) {
  const isKey = error.status === 401 || error.status === 403;
  find("key-form").hidden = !isKey;
  find("problem").textContent = error.status ? error.message : "The server does not answer.";
  find("problem").hidden = false;
}

async function readAll() {
  await Promise.all([readRequests(), readTree(), readHistory()]);
}

find("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(find("key").value);
  find("key-form").hidden = find("problem").hidden = true;
  await Promise.all([readModel(), readAll()]).catch(show);
});

whenSelected((edge) => {
  litBy = "request";
  lightPath(edge);
});

whenExplained(async (edge) => {
  litBy = "explain";
  await readTree().catch(show);
  lightPath(edge);
});

whenAnswered(async () => {
  await readAll().catch(show);
  selectNewest(requests);
});

whenSpanChanges(() => readHistory().catch(show));

readModel().catch(show);
repeat(readRequests, 0.7);
repeat(readTree, 2);
repeat(readHistory, 5);
