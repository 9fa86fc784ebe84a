"use strict";
// The colour scheme: the system's, until the switch is pressed; then the one chosen, on all pages.
(() => {
  const key = "keras-vit-scheme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try { kept = localStorage.getItem(key); } catch { /* a browser may forbid it */ }
  if (kept === "light" || kept === "dark") root.dataset.scheme = kept;
  const isDark = () => (root.dataset.scheme ?? (system.matches ? "dark" : "light")) === "dark";

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("scheme");
    const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    name();
    button.title = "Change the colours of this page";
    button.hidden = false;
    system.addEventListener("change", name);
    button.addEventListener("click", () => {
      root.dataset.scheme = isDark() ? "light" : "dark";
      try { localStorage.setItem(key, root.dataset.scheme); } catch { /* not kept, then */ }
      name();
    });
  });
})();
