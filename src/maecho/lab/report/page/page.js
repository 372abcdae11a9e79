"use strict";
// Themes, tables that sort, pictures that answer. Without this script everything can still be read.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const tip = document.getElementById("tip");

  // The theme: the system's at first, then what the reader chose, for as long as the page is open.
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Tables: first click up for words and down for numbers, second click the other way, third click as it was.
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  };
  const sort = (head) => {
    const table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex;
    const value = (row) => row.cells[at].dataset.v;
    const rows = [...body.rows];
    const numeric = rows.some((row) => value(row) !== undefined && !Number.isNaN(Number(value(row))));
    const order = numeric && !head.classList.contains("key") ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
    const wanted = order[(order.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
    all("th[aria-sort]", table.tHead).forEach((one) => one.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", wanted);
    rows.sort((a, b) => {
      const first = Number(a.dataset.row) - Number(b.dataset.row);
      if (wanted === "none") return first;
      const x = value(a), y = value(b);
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined) || first;
      return (wanted === "ascending" ? compare(x, y) : compare(y, x)) || first;
    });
    body.append(...rows);
  };

  // Columns that say what a row is stay in sight, one beside the other, if they leave room for others.
  const several = all("table").filter((table) => table.querySelectorAll("thead .key").length > 1);
  const pin = () => {
    const widths = several.map((table) => all("thead .key", table).map((head) => head.offsetWidth));
    const room = several.map((table) => 0.6 * table.parentElement.clientWidth);
    several.forEach((table, k) => {
      let left = 0;
      const fits = widths[k].reduce((sum, width) => sum + width, 0) < room[k];
      widths[k].forEach((width, i) => {
        table.style.setProperty(`--key-${i + 1}`, fits || i === 0 ? `${left}px` : "auto");
        left += width;
      });
    });
  };
  addEventListener("resize", pin);
  pin();

  // Pictures: the nearest mark is shown, and its series stands out.
  const hide = (svg) => {
    tip.classList.remove("shown");
    all(".at", svg).forEach((mark) => mark.classList.remove("at"));
    highlight(svg, null);
  };
  const highlight = (svg, series) => {
    svg.classList.toggle("dimmed", series !== null);
    all(".series", svg).forEach((one) => one.classList.toggle("on", one.dataset.series === series));
  };
  const show = (svg, mark) => {
    all(".at", svg).forEach((other) => other.classList.remove("at"));
    mark.classList.add("at");
    if (all(".series", svg).length > 1) highlight(svg, mark.closest(".series").dataset.series);
    const box = mark.getBoundingClientRect();
    tip.textContent = mark.dataset.tip;
    tip.classList.add("shown");
    const x = Math.min(Math.max(box.x + box.width / 2 - tip.offsetWidth / 2, 4), innerWidth - tip.offsetWidth - 4);
    const above = box.y - tip.offsetHeight - 8;
    tip.style.left = `${x}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
  };
  const marksOf = (svg) => all("[data-tip]", svg).filter((mark) => !mark.closest(".off"));
  const nearest = (svg, x, y) => {
    let best = null, least = 32 * 32;
    for (const mark of marksOf(svg)) {
      const box = mark.getBoundingClientRect();
      const dx = Math.max(box.left - x, 0, x - box.right), dy = Math.max(box.top - y, 0, y - box.bottom);
      const middle = (box.x + box.width / 2 - x) ** 2 + (box.y + box.height / 2 - y) ** 2;
      const distance = dx * dx + dy * dy + middle * 1e-3;
      if (distance < least) [best, least] = [mark, distance];
    }
    return best;
  };
  const step = (svg, by) => {
    const marks = marksOf(svg);
    if (!marks.length) return;
    const at = marks.findIndex((mark) => mark.classList.contains("at"));
    show(svg, marks[at < 0 ? (by > 0 ? 0 : marks.length - 1) : (at + by + marks.length) % marks.length]);
  };
  const wire = (part) => {
    all("th[aria-sort] > button", part).forEach((button) => button.addEventListener("click", () => sort(button.parentElement)));
    for (const svg of all("svg.chart", part)) {
      svg.addEventListener("pointermove", (event) => {
        const mark = nearest(svg, event.clientX, event.clientY);
        if (mark) show(svg, mark); else hide(svg);
      });
      svg.addEventListener("pointerleave", () => hide(svg));
      svg.addEventListener("blur", () => hide(svg));
      svg.addEventListener("keydown", (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (by) step(svg, by);
        else if (event.key === "Escape") hide(svg);
        if (by) event.preventDefault();
      });
    }
    for (const button of all(".legend button", part)) {
      const svg = button.closest("figure").querySelector("svg");
      const series = () => svg.querySelector(`.series[data-series="${button.dataset.series}"]`);
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        series().classList.toggle("off", !shown);
        highlight(svg, null);
      });
      for (const event of ["pointerenter", "focus"]) {
        button.addEventListener(event, () => {
          if (button.getAttribute("aria-pressed") === "true") highlight(svg, button.dataset.series);
        });
      }
      for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => highlight(svg, null));
    }
  };
  wire(document);

  // What is folded is a text until it is asked for.
  const unfold = (details) => {
    const waiting = details.querySelector(":scope > script");
    if (!waiting) return;
    const part = document.createElement("div");
    part.innerHTML = waiting.textContent;
    waiting.replaceWith(part);
    wire(part);
  };
  all("details.run").forEach((one) => one.addEventListener("toggle", () => { if (one.open) unfold(one); }));

  const follow = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target || target.tagName !== "DETAILS") return;
    target.open = true;
    unfold(target);
    target.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  follow();

  // The contents say which section is in sight.
  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const watch = new IntersectionObserver((seen) => {
    for (const one of seen) {
      const link = links.get(one.target.getAttribute("aria-labelledby"));
      if (one.isIntersecting && link) {
        links.forEach((other) => other.removeAttribute("aria-current"));
        link.setAttribute("aria-current", "true");
      }
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  all("main > section").forEach((section) => watch.observe(section));
})();
