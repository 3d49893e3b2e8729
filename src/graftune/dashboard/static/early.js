// Requests the data of the view in the address while the page itself is still loading: the server may have to read a
// long log first. api.js uses each answer when the view requests it, so these requests must equal those of the views.
(function () {
  "use strict";
  const [kind, id, part] = location.hash.replace(/^#\/?/, "").split("/");
  const curves = "series?points=2000";
  const paths = [];
  if (kind === "run" && id) {
    paths.push(`/api/runs/${id}`);
    if (!part || part === "curves") paths.push(`/api/runs/${id}/${curves}`);
  } else if (kind === "") paths.push("/api/runs");
  window.graftuneEarly = new Map();
  for (const path of paths) {
    const answer = fetch(path, { credentials: "same-origin" });
    answer.catch(() => {}); // the view that uses the answer reports the failure
    window.graftuneEarly.set(path, answer);
  }
  if (kind) {
    const charts = document.createElement("link"); // chart.js loads it
    Object.assign(charts, { rel: "preload", as: "script", href: "/static/uPlot.js" });
    document.head.append(charts);
  }
})();
