// The page without a server: a worker runs the same Python in this tab, one question at a time.
"use strict";
let tabIsReady = false;
let tabIsFree = Promise.resolve();
let tab = null;
const waiting = new Map();
let asked = 0;

function openTab() {
  tab = new Worker("worker.mjs", { type: "module" });
  tab.addEventListener("message", ({ data }) => {
    if (data.progress !== undefined) {
      byId("headline").textContent = data.progress;
      tabIsReady = Boolean(data.ready);
      return;
    }
    waiting.get(data.id)?.(data);
    waiting.delete(data.id);
  });
  tab.addEventListener("error", (event) => {
    for (const settle of waiting.values()) settle({ failed: event.message || "the worker could not be started" });
    waiting.clear();
    tab = null;
  });
}

// The answer's text. A question that was given up while it waited its turn is not computed.
function askTab(path, query, signal) {
  const turn = tabIsFree.then(async () => {
    if (signal?.aborted) throw new DOMException("given up", "AbortError");
    if (!tab) openTab();
    asked += 1;
    const id = asked;
    const data = await new Promise((settle) => { waiting.set(id, settle); tab.postMessage({ id, path, query }); });
    if (signal?.aborted) throw new DOMException("given up", "AbortError");
    if (data.failed) throw new Error(`Python could not be started in this tab: ${data.failed}`);
    return data.text;
  });
  tabIsFree = turn.catch(() => {});
  return turn;
}
