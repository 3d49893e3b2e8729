// Asks for what the address shows while the page itself is still being loaded: the server may have to read a long log
// first. api.js takes each answer when the view asks for it, so what is asked for here is what the views ask for.
(function () {
  "use strict";
  const [kind, id, part] = location.hash.replace(/^#\/?/, "").split("/");
  const curves = "series?names=loss%2Cgrad_norm%2Clr%2Ctok_s%2Cfloor_share%2Cskipped&points=2000";
  const paths = [];
  if (kind === "run" && id) {
    paths.push(`/api/runs/${id}`);
    if (!part || part === "curves") paths.push(`/api/runs/${id}/${curves}`);
  } else if (kind === "") paths.push("/api/runs");
  window.graftuneEarly = new Map();
  for (const path of paths) {
    const answer = fetch(path, { credentials: "same-origin" });
    answer.catch(() => {}); // whoever takes it sees the failure and says it
    window.graftuneEarly.set(path, answer);
  }
  if (kind) {
    const charts = document.createElement("link"); // chart.js loads it
    Object.assign(charts, { rel: "preload", as: "script", href: "/static/uPlot.js" });
    document.head.append(charts);
  }
})();
