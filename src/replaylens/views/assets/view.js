(() => {
  const ROWS = 18;
  // A card with the facts of a title: one per line, tabs between columns.
  const card = (view, text) => {
    const tip = view.appendChild(document.createElement("div"));
    tip.className = "rl-tip";
    tip.setAttribute("role", "tooltip");
    tip.popover = "manual";  // above everything, and placed relative to the window, whatever the notebook's layout
    tip.showPopover?.();
    let beside = null, table = null;  // a long list, such as all layers of a model, goes on in further columns
    for (const line of text.split("\n")) {
      const cells = line.split("\t");
      if (cells.length === 1) {
        tip.appendChild(document.createElement("b")).textContent = line;
        beside = table = null;
        continue;
      }
      if (!beside) {
        beside = tip.appendChild(document.createElement("div"));
        beside.className = "rl-columns";
      }
      if (!table || table.rows.length === ROWS) table = beside.appendChild(document.createElement("table"));
      const row = table.insertRow();
      for (const cell of cells) row.insertCell().textContent = cell;
    }
    return tip;
  };
  const place = (tip, target) => {
    const own = target.getBoundingClientRect(), tree = target.closest(".rl-grid")?.getBoundingClientRect();
    const clear = tree && tree.bottom - own.bottom < 120;  // below the branches, unless that is far from the token
    const box = { left: own.left, top: own.top, bottom: clear ? tree.bottom : own.bottom };
    const below = box.bottom + 6 + tip.offsetHeight <= innerHeight || box.top < tip.offsetHeight + 6;
    const top = below ? box.bottom + 6 : box.top - tip.offsetHeight - 6;
    tip.style.top = Math.max(4, Math.min(top, innerHeight - tip.offsetHeight - 4)) + "px";
    tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
  };
  const takeTitle = (element) => {
    if (element.title) {
      element.dataset.tip = element.title;
      element.removeAttribute("title");
    }
  };
  const addCards = (view) => {
    let tip = null, target = null, keyboard = false;  // whether the keyboard chose the card; reset when the mouse moves
    const hide = () => { tip?.remove(); tip = target = null; };
    const show = (event) => {
      if (keyboard && event.type === "mouseover") return;  // focus scrolled the page under a resting mouse
      keyboard = event.type === "focusin";
      hide();
      target = event.target.closest?.("[data-tip],.rl-token[title],.rl-cell[title],.rl-word[title]");
      if (!target || !view.contains(target)) return;
      takeTitle(target);
      tip = card(view, target.dataset.tip);
      place(tip, target);
    };
    for (const kind of ["mouseover", "focusin"]) view.addEventListener(kind, show);
    for (const kind of ["mouseleave", "focusout"]) view.addEventListener(kind, hide);
    view.addEventListener("mousemove", (event) => { if (keyboard) show(event); });
    view.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
    addEventListener("scroll", () => { if (tip) place(tip, target); }, { passive: true, capture: true });
  };
  // A timeline shows one frame at a time.
  const addSteps = (timeline) => {
    const frames = [...timeline.querySelectorAll(".rl-frame")];
    if (timeline.dataset.ready || !frames.length) return;
    timeline.dataset.ready = "1";
    const bar = document.createElement("div");
    bar.className = "rl-steps";
    const button = (text, label, act) => {
      const made = bar.appendChild(document.createElement("button"));
      made.type = "button";
      made.textContent = text;
      made.setAttribute("aria-label", label);
      made.addEventListener("click", act);
      return made;
    };
    let at = 0, timer = null;
    const stop = () => { clearInterval(timer); timer = null; play.textContent = "▶"; };
    const go = (to) => {
      at = Math.max(0, Math.min(frames.length - 1, to));
      frames.forEach((frame, i) => { frame.hidden = i !== at; });
      slider.value = at;
      back.disabled = at === 0;
      next.disabled = at === frames.length - 1;
      count.textContent = `${at + 1} / ${frames.length}  ${frames[at].dataset.phase}`;
    };
    const back = button("◀", "back", () => { stop(); go(at - 1); });
    const play = button("▶", "play", () => {
      if (timer) return stop();
      if (at === frames.length - 1) go(0);
      play.textContent = "⏸";
      timer = setInterval(() => { if (at === frames.length - 1 || !timeline.isConnected) stop(); else go(at + 1); }, 1100);
    });
    const next = button("▶|", "next", () => { stop(); go(at + 1); });
    const slider = bar.appendChild(document.createElement("input"));
    Object.assign(slider, { type: "range", min: 0, max: frames.length - 1, value: 0 });
    slider.setAttribute("aria-label", "step");
    slider.addEventListener("input", () => { stop(); go(+slider.value); });
    const count = bar.appendChild(document.createElement("span"));
    count.className = "rl-quiet rl-count";
    timeline.querySelector(".rl-head").after(bar);
    go(0);
  };
  // Attention: the token under the mouse shows where the chosen head attends from there. The last token, until there is one.
  const addAttention = (view) => {
    if (view.dataset.shown) return;
    const keys = [...view.querySelectorAll(".rl-key")], n = keys.length, size = n * (n + 1) / 2;
    const weights = Uint8Array.from(atob(view.dataset.weights), (c) => c.charCodeAt(0));
    const choice = view.querySelector("select"), sink = view.querySelector(".rl-sink"), said = view.querySelector(".rl-count");
    let query = n - 1;
    const paint = () => {
      const first = +choice.value * size + query * (query + 1) / 2;
      const seen = (k) => k <= query && !(sink.checked && k === 0);
      const most = Math.max(1, ...keys.map((_, k) => (seen(k) ? weights[first + k] : 0)));
      keys.forEach((key, k) => {
        const share = seen(k) ? weights[first + k] / 255 : 0;
        const shade = sink.checked ? share * 255 / most : share;  // the rest gets the whole scale
        key.style.setProperty("--v", `${(100 * shade).toFixed(0)}%`);
        key.classList.toggle("rl-strong", shade > 0.55);
        key.classList.toggle("rl-none", !seen(k));
        key.classList.toggle("rl-marked", k === query);
        key.title = "";
        key.dataset.tip = k > query ? "later: not attended to" : `${(weights[first + k] / 255).toFixed(2)}\tfrom the framed token`;
      });
      said.textContent = `from token ${query}: ${keys[query].textContent}`;
      view.dataset.shown = `${choice.value} ${query}`;
    };
    for (const kind of ["mouseover", "focusin"]) {
      view.addEventListener(kind, (event) => {
        const at = keys.indexOf(event.target);
        if (at >= 0) { query = at; paint(); }
      });
    }
    for (const input of [choice, sink]) input.addEventListener("change", paint);
    if (n) paint();
  };
  const prepare = (root) => {
    for (const view of root.querySelectorAll(".rl-view:not([data-ready])")) {
      view.dataset.ready = "1";
      addCards(view);
    }
    root.querySelectorAll(".rl-timeline").forEach(addSteps);
    root.querySelectorAll(".rl-attention").forEach(addAttention);
  };
  window.replaylensPrepare = prepare;
  prepare(document);
})();
