// The worker of the page of plans: Pyodide runs plait's own Python here, without compiled packages.
import { loadPyodide } from "./pyodide/pyodide.mjs";

function say(progress, ready = false) { postMessage({ progress, ready }); }

// A file with its progress; servers that compress say no length, and then the bytes are shown alone.
async function loaded(path, name) {
  const reply = await fetch(new URL(path, import.meta.url));
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  const whole = Number(reply.headers.get("Content-Length"));
  const parts = [];
  let size = 0;
  for (const reader = reply.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    size += value.length;
    say(`Loading ${name}: ${(size / 1e6).toFixed(1)}${whole ? ` of ${(whole / 1e6).toFixed(1)}` : ""} MB ...`);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function start() {
  await loaded("./pyodide/pyodide.asm.wasm", "Python"); // kept by the browser, so it is loaded once
  say("Starting Python in this tab ...");
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  python.unpackArchive(await loaded("./plait.zip", "plait"), "zip", { extractDir: "/plait" });
  say("Starting plait ...");
  const answered = python.runPython(`
import sys
sys.path.insert(0, "/plait")
from plait.cli.explore import in_a_tab
in_a_tab()
`);
  say("Looking for plans ...", true);
  return answered;
}

const starting = start();
addEventListener("message", async ({ data: { id, path, query } }) => {
  try {
    const answered = await starting;
    postMessage({ id, text: answered(path, query) });
  } catch (error) {
    postMessage({ id, failed: String(error.message || error) });
  }
});
