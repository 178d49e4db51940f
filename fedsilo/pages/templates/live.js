// Keeps an open page up to date: the server sends each section of the page that has changed.
"use strict";

(() => {
  const main = document.querySelector("main");
  const said = document.getElementById("said");
  const connection = document.getElementById("connection");
  // Sections that have come and are not on the page yet: id -> HTML
  const waiting = new Map();
  let source = null;

  const sections = () => [...main.querySelectorAll("section")];

  // A reader who chooses from a list or marks a text in a section keeps it as it is for now
  function isInUse(section) {
    const active = document.activeElement;
    if (section.contains(active) && active.tagName === "SELECT") return true;
    const marked = document.getSelection();
    return !marked.isCollapsed && section.contains(marked.anchorNode);
  }

  function replace(section, html) {
    const frame = document.createElement("template");
    frame.innerHTML = html;
    const fresh = frame.content.firstElementChild;
    const choices = [...section.querySelectorAll("select")].map((list) => list.value);
    const moved = [...section.querySelectorAll(".wide")].map((table) => table.scrollLeft);
    const focusable = "a, button, .wide";
    const focused = [...section.querySelectorAll(focusable)].indexOf(document.activeElement);
    const before = section.querySelector("[data-say]");
    section.replaceWith(fresh);
    fresh.querySelectorAll("select").forEach((list, place) => {
      const known = [...list.options].some((option) => option.value === choices[place]);
      if (known) list.value = choices[place];
    });
    fresh.querySelectorAll(".wide").forEach((table, place) => {
      table.scrollLeft = moved[place] || 0;
    });
    fresh.querySelectorAll(focusable)[focused]?.focus({ preventScroll: true });
    const now = fresh.querySelector("[data-say]");
    // Screen readers hear a new state, but not every second that passes
    if (now && before && now.dataset.say !== before.dataset.say) said.textContent = now.innerText;
  }

  function show() {
    for (const section of sections()) {
      const html = waiting.get(section.id);
      if (html === undefined || isInUse(section)) continue;
      waiting.delete(section.id);
      replace(section, html);
    }
  }

  function receive(event) {
    const state = JSON.parse(event.data);
    const order = sections().map((section) => section.id);
    // Another kind of page, such as a run that has begun or was removed
    if (state.order.join() !== order.join()) {
      location.reload();
      return;
    }
    for (const [id, html] of Object.entries(state.sections)) waiting.set(id, html);
    show();
  }

  function tell(text, isLost) {
    connection.hidden = false;
    connection.textContent = text;
    connection.classList.toggle("lost", isLost);
  }

  function open() {
    const page = location.pathname + location.search;
    source = new EventSource("/events?page=" + encodeURIComponent(page));
    source.onopen = () => tell("Live: changes appear by themselves.", false);
    source.onmessage = receive;
    source.onerror = () => {
      const time = new Date().toLocaleTimeString();
      tell("Not connected since " + time + ": start 'fedsilo watch' again to go on.", true);
    };
  }

  // A hidden page needs no news, and a browser keeps only six connections to one server
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source.close();
    } else {
      open();
    }
  });
  // Sections that were in use
  setInterval(show, 1000);
  open();
})();
