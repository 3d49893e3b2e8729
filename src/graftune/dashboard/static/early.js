// Asks for what the address shows while the modules are still being loaded: the server may have to read a long log first.
// api.js takes the answer when the view asks for it.
(function () {
  "use strict";
  const [kind, id] = location.hash.replace(/^#\/?/, "").split("/");
  const path = kind === "run" && id ? `/api/runs/${id}` : kind === "" ? "/api/runs" : null;
  if (!path) return;
  const answer = fetch(path, { credentials: "same-origin" });
  answer.catch(() => {}); // whoever takes it sees the failure and says it
  window.graftuneEarly = { path, answer };
})();
