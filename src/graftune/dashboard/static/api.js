// Requests to the server. Every failure is an Error whose message is a sentence for the user.

export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;

async function answer(response) {
  if (response.ok) return response;
  let sentence = `The server answered ${response.status} ${response.statusText}.`;
  try {
    sentence = (await response.json()).error ?? sentence;
  } catch {
    // Not JSON: show the status line.
  }
  const error = new Error(sentence);
  error.status = response.status;
  throw error;
}

async function asked(path, options = {}) {
  let response;
  try {
    response = await (taken(path, options) ?? fetch(path, { credentials: "same-origin", ...options }));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; is graftune watch still running?");
  }
  return answer(response);
}

// The answer that early.js requested; used once.
function taken(path, options) {
  if (options.method) return null;
  const answer = window.graftuneEarly.get(path) ?? null;
  window.graftuneEarly.delete(path);
  return answer;
}

export async function get(path, signal) {
  return (await asked(path, { signal })).json();
}

// Without names: all that are drawn as curves.
export function series(id, names, { points = 2000, from, to } = {}, signal) {
  const query = new URLSearchParams(names ? { names: names.join(","), points } : { points });
  if (from !== undefined) query.set("from", Math.floor(from));
  if (to !== undefined) query.set("to", Math.ceil(to));
  return get(`${runPath(id)}/series?${query}`, signal);
}

// Server-sent events for as long as the page is visible: browsers allow six connections to one server, so a tab in the
// background closes its own. `path` is a function, since a reopened stream begins where the last one ended.
export function listen(path, onMessage, onOpen = () => {}) {
  let source = null;

  function open() {
    if (source || document.hidden) return;
    source = new EventSource(path());
    const take = (message) => onMessage(JSON.parse(message.data), message.type);
    for (const type of ["message", "state", "gone", "reset"]) source.addEventListener(type, take);
    source.addEventListener("open", () => {
      connection(true);
      onOpen();
    });
    source.addEventListener("error", () => {
      connection(false);
      // If the server refuses, the stream ends; if the connection is lost, the browser tries again.
      if (source?.readyState === EventSource.CLOSED) {
        close();
        setTimeout(() => stopped || open(), 3000);
      }
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  let stopped = false;
  const turn = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", turn);
  open();
  return () => {
    stopped = true;
    document.removeEventListener("visibilitychange", turn);
    close();
  };
}

function connection(up) {
  dispatchEvent(new CustomEvent("connection", { detail: up }));
}

// The answer to a POST as server-sent events, one document after the other.
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await asked(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield JSON.parse(lines.map((line) => line.slice(5).trimStart()).join("\n"));
    }
  }
}
