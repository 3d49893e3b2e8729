// Light, dark or as the system says. A plain script in the head: a module would run after the first paint, which flashes.
(function () {
  "use strict";
  const CHOICES = ["system", "light", "dark"];
  const kept = () => {
    try {
      return localStorage.getItem("graftune-theme");
    } catch {
      return null; // storage is refused to this page; the choice then lasts as long as the page
    }
  };
  let choice = CHOICES.includes(kept()) ? kept() : "system";

  function apply() {
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    dispatchEvent(new Event("theme"));
  }

  window.graftuneTheme = {
    get choice() {
      return choice;
    },
    next() {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      try {
        localStorage.setItem("graftune-theme", choice);
      } catch {
        // As above: nothing is stored.
      }
      apply();
    },
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
})();
