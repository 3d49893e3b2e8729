// Requests the data of the view in the address while the page itself is still loading: the server may have to read a
// long log first. api.js uses each answer when the view requests it, so these requests must equal those of the views.
(function () {
  "use strict";
  const [kind, id, part] = location.hash.replace(/^#\/?/, "").split("/");
  const panels = [ // those of panels.js, in its order
    "loss", "grad_norm", "lr", "tok_s", "floor_share", "router_entropy", "busiest_expert", "idle_experts",
    "reward", "answer_tokens", "truncated", "skipped_groups", "reward_failed", "ratio", "clipped",
    "difference", "sample_tok_s", "sample_s", "reward_s", "train_s", "skipped",
  ];
  const curves = `series?names=${panels.join("%2C")}&points=2000`;
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
