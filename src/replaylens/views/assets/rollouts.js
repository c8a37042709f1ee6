(() => {
  const PAGE = 12, SHOWN = 7, LEAST = 0.01, WIDE = 250, GAP = 90, LEAST_WIDE = 130, LEAST_GAP = 36, LOW = 52, THICK = 48;
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, look, text) => {
    const made = document.createElement(name);
    if (look) made.className = look;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const unpack = async (element) => {
    const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };
  const percent = (share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";

  // Rollouts of one fork, folded: a node per different unit, chains without a fork joined.
  const fold = (data, rollouts, depth, outcomes) => {
    const groups = new Map();
    for (const r of rollouts) {
      const unit = depth < data.units[r].length ? data.units[r][depth] : -1;
      if (!groups.has(unit)) groups.set(unit, []);
      groups.get(unit).push(r);
    }
    const nodes = [...groups].map(([unit, own]) => {
      const units = unit < 0 ? [] : [unit];
      let end = depth + units.length;
      const next = () => {
        const first = data.units[own[0]][end];
        return first !== undefined && own.every((r) => data.units[r][end] === first) ? first : undefined;
      };
      for (let more = units.length ? next() : undefined; more !== undefined; more = next()) { units.push(more); end += 1; }
      const mix = outcomes.map(() => 0);
      for (const r of own) mix[data.outcome[r]] += 1;
      return { units, end, own, mix, leaf: unit < 0 || own.every((r) => data.units[r].length === end) };
    });
    return nodes.sort((a, b) => b.own.length - a.own.length || a.own[0] - b.own[0]);
  };

  const prepare = (root) => {
    if (root.dataset.ready) return;
    root.dataset.ready = "1";
    const outcomes = JSON.parse(root.dataset.outcomes);
    const [forkPanel, list, one] = ["rl-fork", "rl-list", "rl-one"].map((name) => root.querySelector(`:scope > .${name}`));
    const texts = [...root.querySelectorAll(":scope > .rl-path .rl-unit")].map((e) => e.lastChild?.nodeValue ?? "");
    let data = null, lenses = null, open = null, chosen = null;
    const load = async () => {
      if (data) return data;
      const raw = await unpack(root.querySelector(":scope > .rl-rollout-data"));
      let at = 0;
      data = { texts: raw.units, fork: raw.fork, outcome: raw.outcome, units: raw.lengths.map((n) => raw.flat.slice(at, at += n)) };
      return data;
    };

    // One rollout, with what is drawn for it.
    const showOne = async (r) => {
      one.replaceChildren(make("h4", "", `rollout ${r}: ${outcomes[data.outcome[r]]}`));
      one.append(make("p", "", data.units[r].map((u) => data.texts[u]).join("")));
      one.dataset.rollout = r;
      root.dispatchEvent(new CustomEvent("rl-rollout", { bubbles: true, detail: { rollout: r, panel: one } }));
      const block = root.querySelector(":scope > .rl-rollout-lenses");
      if (!block) return;
      lenses ??= await unpack(block);
      if (lenses[r] === undefined || one.dataset.rollout !== String(r)) return;
      const place = one.appendChild(make("div", "rl-lens"));
      place.innerHTML = lenses[r];
      window.replaylensPrepare?.(place);
    };

    const showList = (rollouts, title) => {
      let first = 0;
      one.replaceChildren();
      const table = make("table"), bar = make("div", "rl-steps"), where = make("span", "rl-quiet");
      const button = (text, by) => {
        const made = bar.appendChild(make("button", "", text));
        made.type = "button";
        made.addEventListener("click", () => { first += by; fill(); });
        return made;
      };
      const back = button("previous", -PAGE), next = button("next", PAGE);
      bar.append(where);
      const fill = () => {
        table.replaceChildren();
        for (const r of rollouts.slice(first, first + PAGE)) {
          const line = table.insertRow();
          line.dataset.rollout = r;
          const pick = make("button", "", r);
          pick.type = "button";
          line.insertCell().append(pick);
          const chip = line.insertCell().appendChild(make("span", "rl-outcome", outcomes[data.outcome[r]]));
          chip.style.background = `var(--o${data.outcome[r]})`;
          const text = data.units[r].map((u) => data.texts[u]).join("");
          line.insertCell().textContent = text.length > 240 ? text.slice(0, 240) + "…" : text;
          line.addEventListener("click", () => showOne(r));
        }
        back.disabled = first === 0;
        next.disabled = first + PAGE >= rollouts.length;
        where.textContent = `${first + 1} to ${Math.min(first + PAGE, rollouts.length)} of ${rollouts.length}`;
      };
      list.replaceChildren(make("h4", "", title), bar, table);
      list.dataset.count = rollouts.length;
      fill();
    };

    // The tree of one fork: leaves stand below each other, and a parent beside the first of its children.
    const layout = (node, depth, state) => {
      node.depth = depth;
      node.x = 4 + depth * (state.box + state.gap);
      state.wide = Math.max(state.wide, node.x + state.box);
      const thick = Math.max(1.5, THICK * node.own.length / state.total);
      node.thick = thick;
      node.box = state.box;
      const children = node.open ? node.children : [];
      if (!children.length) {
        node.high = Math.max(LOW, thick + 4);
        node.y = state.y;
        state.y += node.high + 8;
        return;
      }
      node.y = state.y;
      children.forEach((child) => layout(child, depth + 1, state));
      node.high = Math.max(LOW, thick + 4);
      state.y = Math.max(state.y, node.y + node.high + 8);
    };
    const unfold = (node) => {
      node.children ??= limited(fold(data, node.own, node.end, outcomes), node);
      node.open = true;
    };
    const limited = (nodes, parent) => {
      const total = parent.own.length;
      const kept = nodes.filter((n, i) => i < SHOWN && n.own.length / total >= LEAST);
      const rest = nodes.slice(kept.length);
      if (rest.length === 1) return nodes;
      if (!rest.length) return kept;
      const own = rest.flatMap((n) => n.own), mix = outcomes.map((_, k) => rest.reduce((s, n) => s + n.mix[k], 0));
      return [...kept, { units: [], own, mix, rest, end: parent.end, leaf: true }];
    };
    const ribbon = (svg, parent, child, from) => {
      const x1 = parent.x + parent.box, x2 = child.x, middle = (x1 + x2) / 2;
      let a = from, b = child.y + child.high / 2 - child.thick / 2;  // strokes, not areas: a steep ribbon keeps its width
      child.mix.forEach((count, k) => {
        if (!count) return;
        const t = child.thick * count / child.own.length;
        const path = svg.appendChild(document.createElementNS(SVG, "path"));
        const [y1, y2] = [a + t / 2, b + t / 2];
        path.setAttribute("d", `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
        path.setAttribute("style", `fill:none;stroke:var(--o${k});stroke-width:${t}px`);
        path.setAttribute("opacity", "0.8");
        a += t;
        b += t;
      });
      return from + child.thick;
    };
    const levels = (node) => 1 + (node.open ? Math.max(0, ...node.children.map(levels)) : 0);
    const paint = () => {
      // All levels fit beside each other, as long as their text can be read.
      const deep = levels(open), room = (forkPanel.clientWidth || Infinity) - 36;
      const gap = Math.max(LEAST_GAP, Math.min(GAP, (room - deep * WIDE) / Math.max(1, deep - 1)));
      const box = Math.max(LEAST_WIDE, Math.min(WIDE, (room - (deep - 1) * gap) / deep));
      const state = { y: 0, wide: 0, total: open.own.length, box, gap };
      layout(open, 0, state);
      const canvas = make("div", "rl-canvas"), svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("width", state.wide);
      svg.setAttribute("height", state.y);
      canvas.style.height = Math.min(state.y + 16, 640) + "px";
      canvas.append(svg);
      const draw = (node) => {
        canvas.append(boxOf(node, node === open));
        if (!node.open) return;
        let from = node.y + node.high / 2 - node.thick / 2;
        for (const child of node.children) { from = ribbon(svg, node, child, from); draw(child); }
      };
      draw(open);
      const old = forkPanel.querySelector(".rl-canvas");
      const at = old ? [old.scrollLeft, old.scrollTop] : [0, 0];
      old?.remove();
      forkPanel.append(canvas);
      canvas.scrollTo(...at);
    };
    const said = (node) => {
      if (node.rest) return `+ ${node.rest.length} more branches`;
      return node.units.length ? node.units.map((u) => data.texts[u]).join("").trim() : node === open ? node.name : "(ends here)";
    };
    const boxOf = (node, top) => {
      const made = make("button", "rl-node");
      made.type = "button";
      Object.assign(made.style, { left: node.x + "px", top: node.y + "px", width: node.box + "px", height: node.high + "px" });
      const mix = made.appendChild(make("span", "rl-mix"));
      node.mix.forEach((count, k) => {
        if (!count) return;
        const part = mix.appendChild(make("i"));
        part.style.cssText = `flex:${count};background:var(--o${k})`;
      });
      const text = made.appendChild(make("span", "rl-say"));
      const most = node.mix.indexOf(Math.max(...node.mix));
      const share = top ? `${node.own.length} rollouts` : percent(node.own.length / open.own.length);
      text.append(make("b", "", `${share} · ${outcomes[most]} ${percent(node.mix[most] / node.own.length)}`));
      text.append(said(node) + (!node.open && !node.leaf ? " ›" : ""));
      made.dataset.tip = [said(node).slice(0, 400), ...node.mix.map((n, k) => `${outcomes[k]}\t${n}\t${percent(n / node.own.length)}`)].join("\n");
      if (!top && node.units.length && data.texts[node.units[0]] === texts[open.number] && node.depth === 1) made.dataset.own = "1";
      made.setAttribute("aria-pressed", chosen === node);
      made.dataset.count = node.own.length;
      made.addEventListener("click", () => {
        chosen = node;
        if (node.rest) { const parent = above(open, node); parent.children = [...parent.children.filter((c) => c !== node), ...node.rest]; }
        else if (node.open && !top) node.open = false;
        else if (!node.leaf) unfold(node);
        showList(node.own, `${node.own.length} rollouts: ${said(node).slice(0, 90)}`);
        paint();
      });
      return made;
    };
    const above = (node, wanted) => {
      if (!node.open) return null;
      if (node.children.includes(wanted)) return node;
      return node.children.reduce((found, child) => found ?? above(child, wanted), null);
    };

    const show = async (number) => {
      await load();
      for (const element of root.querySelectorAll("[data-fork]")) element.toggleAttribute("data-chosen", +element.dataset.fork === number);
      const own = data.fork.flatMap((f, r) => (f === number ? [r] : []));
      forkPanel.dataset.number = number;
      list.replaceChildren();
      one.replaceChildren();
      const before = (texts[number - 1] ?? "").trim();
      forkPanel.replaceChildren(make("h4", "", `Fork before unit ${number + 1}`));
      if (!own.length) { forkPanel.append(make("p", "rl-quiet", "No rollouts start here.")); return; }
      const mix = outcomes.map(() => 0);
      for (const r of own) mix[data.outcome[r]] += 1;
      open = { number, own, mix, units: [], end: 0, leaf: false, name: before ? `… ${before}` : "start" };
      chosen = null;
      unfold(open);
      paint();
    };
    root.addEventListener("click", (event) => {
      const target = event.target.closest(".rl-column,.rl-unit");
      if (target && root.contains(target)) show(+target.dataset.fork);
    });
    root.addEventListener("keydown", (event) => {
      const target = event.target.closest(".rl-unit");
      if (target && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); show(+target.dataset.fork); }
    });
    show(+(root.dataset.first ?? 0));
  };
  for (const button of document.querySelectorAll(".rl-theme:not([data-ready])")) {
    button.dataset.ready = "1";
    button.addEventListener("click", () => {
      const dark = getComputedStyle(document.body).colorScheme.includes("dark");
      document.body.dataset.theme = dark ? "light" : "dark";
    });
  }
  document.querySelectorAll(".rl-rollouts").forEach(prepare);
})();
