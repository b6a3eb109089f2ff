// What keyboards and screen readers need, and the theme leaves out.
(() => {
  // From a disk a browser reads no other page: results of the search then stand without their lines.
  if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
  // What scrolls sideways can be reached by the Tab key: code or a table wider than a phone.
  const SCROLLING =
    "pre, .scrolls, .pst-scrollable-table-container, div.math, .output, .text_html";
  const reach = () => {
    for (const box of document.querySelectorAll(SCROLLING)) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) {
        box.tabIndex = 0;
        box.setAttribute("role", "region");
        box.setAttribute("aria-label", box.tagName === "PRE" ? "code or output" : "wide content");
      }
    }
  };
  const name = () => {
    for (const summary of document.querySelectorAll("summary")) {
      if (!summary.textContent.trim()) summary.setAttribute("aria-label", "Show or hide its pages");
    }
  };
  // Paper is white, and shows what is folded away also where the style sheet cannot say so.
  let undo = () => {};
  const lay = () => {
    const root = document.documentElement, theme = root.dataset.theme;
    const closed = document.querySelectorAll(".bd-article details:not([open])");
    closed.forEach(box => { box.open = true; });
    root.dataset.theme = "light";
    undo = () => {
      closed.forEach(box => { box.open = false; });
      root.dataset.theme = theme;
    };
  };
  addEventListener("beforeprint", lay);
  addEventListener("afterprint", () => undo());
  addEventListener("DOMContentLoaded", name);
  addEventListener("load", reach);
  addEventListener("resize", reach);
})();
