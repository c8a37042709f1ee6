// The living tree: one component for notebooks, the served page and the saved page, told apart only by their transport.
//
//   transport.ask(message)   a promise of the reply; rejects with one sentence
//   transport.listen(f)      f(event) for what happens meanwhile; f({event: "lost", why}) once nobody answers any more
//   transport.live           whether actions can be carried out
//
// Rows are branches, columns are positions. Both are virtual: only tiles of TILE tokens in sight exist as elements, and at most
// PER_FRAME of them are made between two frames. Every text of a model reaches the page through textContent.
const replaylensExplore = (() => {
  "use strict";
  const TILE = 16, BLOCK = 64, PER_FRAME = 10, ROWS_AT_ONCE = 512, READ_AT_ONCE = 2, GUTTER = 132, RULER = 22, TOKEN = 24, AROUND = 3;
  const WIDTHS = [14, 38, 66, 104], LAYER = 15, BARS = 20, LOST_AFTER = 6000, BEAT = 4000;
  const KINDS = {
    p: ["prompt", "prompt", "·"], g: ["accepted", "generated", "✓"], f: ["forced", "forced", "›"], n: ["pending", "pending", "▒"],
    d: ["draft", "drafted", "?"], x: ["rejected", "rejected", "✗"], r: ["gone", "rolled back", "↶"], o: ["ordinary", "not verified", "○"],
  };
  const KEYS = [
    ["← → ↑ ↓", "move along the branch, and between branches"], ["Home End", "first and last token of the branch"],
    ["r", "roll back: this token becomes the last one"], ["f", "fork after this token"], ["t", "type a token in place of this one"],
    ["g", "generate at the end of the branch"], ["space", "pause, go on"], ["Esc", "stop; close"], ["n", "resample after this token"],
    ["e", "edit from this token on"], ["c", "compare: mark a branch, then another"], ["p", "pin"], ["u", "undo"], ["y", "the Python that does the same"],
    ["[ ]", "what is shown under tokens"], ["+ −", "zoom"], ["/", "find"], ["w", "whole screen"], ["?", "these keys"],
  ];
  let count = 0;

  // ---- small things --------------------------------------------------------------------------------------------------
  const make = (name, look, ...children) => {
    const made = document.createElement(name);
    if (look) made.className = look;
    made.append(...children);
    return made;
  };
  const button = (text, act, title, look) => {
    const made = make("button", look, text);
    made.type = "button";
    if (title) made.title = title;
    made.addEventListener("click", act);
    return made;
  };
  const field = (name, label, value, most, step) => {
    const input = make("input", "rlx-number");
    Object.assign(input, { type: "number", value, min: 0, max: most, step: step ?? 1, name });
    return [make("label", "", `${label} `, input), input];
  };
  const bytes = (text) => {
    const raw = atob(text), found = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
    return found;
  };
  const numbers = (text) => { const raw = bytes(text); return new Uint32Array(raw.buffer, 0, raw.length >> 2); };
  const scaled = (packed) => { const raw = bytes(packed.data); return Float32Array.from(raw, (x) => (x * packed.most) / 255); };
  const signed = (packed) => Float32Array.from(new Int8Array(bytes(packed.data).buffer), (x) => (x * packed.most) / 127);
  const MARKS = { "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽" };
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u00a0]/gu;
  const visible = (text) => text === "" ? "∅" : /^ +$/.test(text) ? "␣".repeat(text.length)
    : text.replace(HIDDEN, (c) => MARKS[c] ?? "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
  const percent = (p) => (100 * p).toFixed(p < 0.0995 ? 1 : 0) + " %";
  const share = (p) => `${Math.round(1000 * p) / 10}%`;  // for a style
  const nats = (x) => x.toFixed(2) + " nats";

  const mount = (host, transport) => {
    const own = `rlx${++count}`;
    const words = new Map(), shown = new Map(), caches = new Map(), tiles = new Map(), rowsShown = new Map(), lines = new Map(), joints = new Map();
    let tree = null, order = [], columns = 0, zoom = 2, strip = "surprise", at = { branch: 0, position: 0 }, look = null, path = new Map();
    let drawing = 0, reading = 0, lookTimer = 0, marked = null, attention = null, hits = [], hit = -1, work = null, toCome = null;

    // ---- the frame ---------------------------------------------------------------------------------------------------
    const title = make("b", "rlx-title"), status = make("span", "rlx-status"), find = make("input", "rlx-find"), strips = make("select");
    status.setAttribute("role", "status");
    status.setAttribute("aria-live", "polite");
    Object.assign(find, { type: "search", placeholder: "find", title: "find a text (/)" });
    strips.title = "what is shown under each token ([ and ])";
    strips.setAttribute("aria-label", "shown under each token");
    const progress = make("span", "rlx-work"), bar = make("progress"), workText = make("span");
    const pauseButton = button("pause", () => act(work?.paused ? "resume" : "pause"), "pause, go on (space)");
    progress.append(bar, workText, pauseButton, button("stop", () => act("stop"), "stop (Esc)"));
    progress.hidden = true;
    const banner = make("div", "rlx-banner");
    banner.hidden = true;
    banner.setAttribute("role", "alert");
    const tools = make("div", "rlx-tools", title, strips, button("−", () => zoomBy(-1), "smaller (−)"), button("+", () => zoomBy(1), "larger (+)"),
      find, button("undo", () => act("undo"), "undo (u)", "rlx-live"), button("Python", showPython, "the Python that does the same (y)", "rlx-live"),
      button("JSON", download, "what this page has seen, as a JSON file"), button("⤢", whole, "whole screen (w)"),
      button("◐", theme, "light or dark"), button("?", help, "keys (?)"), progress, status);
    tools.setAttribute("role", "toolbar");
    const grid = make("div", "rlx-grid"), space = make("div", "rlx-space"), ruler = make("div", "rlx-ruler"), side = make("div", "rlx-side");
    grid.tabIndex = 0;
    grid.setAttribute("role", "grid");
    grid.setAttribute("aria-label", "branches by rows, tokens by columns");
    side.setAttribute("aria-label", "the token under the cursor");
    space.append(ruler);
    grid.append(space);
    const legend = make("div", "rlx-legend");
    for (const [look_, name, mark] of Object.values(KINDS)) legend.append(make("span", `rl-token rl-${look_}`, `${mark} ${name}`));
    legend.append(make("span", "rl-token rl-accepted rlx-edited", "edited"), make("span", "rl-quiet", " click, or ? for keys"));
    const body = make("div", "rlx-body", grid, side), frame = make("div", "rlx", tools, banner, body, legend);
    host.replaceChildren(frame);
    const say = (text) => { status.textContent = text; };

    // ---- asking ------------------------------------------------------------------------------------------------------
    const ask = (what, options = {}) => transport.ask({ do: what, ...options });
    const lost = (why) => {
      banner.hidden = false;
      banner.replaceChildren(make("b", "", why), " All that was seen stays here: scroll, look, and take it as JSON.", button("JSON", download));
      frame.classList.add("rlx-lost");
    };
    const found = () => { banner.hidden = true; frame.classList.remove("rlx-lost"); };
    const act = async (what, options = {}) => {
      if (!transport.live) return say("This page has no kernel. In Python, rl.replay_page(file) rebuilds the tree, and explore() goes on with it.");
      say(`${what} …`);
      try {
        const reply = await ask(what, options);
        say(`${what}: done`);
        return reply;
      } catch (error) {
        say(String(error.message ?? error));
        return undefined;
      }
    };

    // ---- the tree ----------------------------------------------------------------------------------------------------
    const setTree = (given) => {
      const first = tree === null;
      tree = given;
      const children = new Map();
      const before = new Map([...lines].map(([id, line]) => [id, line.key]));
      lines.clear();
      for (const line of tree.branches) {
        lines.set(line.id, line);
        if (before.has(line.id) && before.get(line.id) !== line.key) caches.delete(line.id);
        if (line.parent !== null) children.set(line.parent, [...(children.get(line.parent) ?? []), line]);
      }
      for (const id of caches.keys()) if (!lines.has(id)) caches.delete(id);
      order = [];
      const stack = tree.branches.filter((line) => line.parent === null).map((line) => [line, 0]);
      while (stack.length) {
        const [line, depth] = stack.pop();
        line.row = order.length;
        line.depth = depth;
        order.push(line);
        for (const child of (children.get(line.id) ?? []).sort((a, b) => a.start - b.start || b.id - a.id)) stack.push([child, depth + 1]);
      }
      columns = Math.max(...order.map((line) => line.end), 1);
      title.textContent = visible(tree.title);
      title.title = `${order.length} branches, ${columns} positions`;
      if (first) {
        for (const [value, text] of [["none", "nothing"], ["surprise", "surprise"], ["entropy", "entropy"], ["layers", "layers"],
          ...Object.keys(tree.probes).map((name) => [`probe ${name}`, `probe ${name}`])]) strips.append(new Option(text, value));
        strips.value = strip;
        at = { branch: tree.selected[0] ?? tree.root, position: tree.position };
      }
      setWork(tree.work);
      clear();
      if (!lines.has(at.branch)) at = { branch: tree.root, position: lines.get(tree.root).end - 1 };
      move(at.branch, at.position, first, true);
      if (lines.has(toCome)) { const to = toCome; toCome = null; move(to, lines.get(to).end - 1, true); }
    };
    const setWork = (given) => {
      work = given;
      progress.hidden = !work;
      if (!work) return;
      Object.assign(bar, { max: work.total, value: work.done });
      workText.textContent = `${work.what} ${work.done} of ${work.total}`;
      pauseButton.textContent = work.paused ? "go on" : "pause";
    };
    const cacheOf = (line) => {
      if (!caches.has(line.id)) caches.set(line.id, { ids: [], states: [], repaired: {}, asked: new Set(), read: new Map(), reading: new Set() });
      return caches.get(line.id);
    };
    const lineAt = (id, position) => {  // the row that shows a position of a branch's path
      let line = lines.get(id);
      while (line && position < line.start && line.parent !== null) line = lines.get(line.parent);
      return line;
    };
    const wordAt = (line, position) => {
      const cache = cacheOf(line), fixed = cache.repaired[position], id = cache.ids[position];
      return id === undefined ? undefined : fixed !== undefined ? (fixed === "" ? "…" : visible(fixed)) : shownOf(id);
    };
    const readAt = (line, position) => {
      const { read } = cacheOf(line), block = read.get(Math.max(line.start, Math.floor(position / BLOCK) * BLOCK));
      return block && position < block.first + block.count ? [block, position - block.first] : null;
    };
    const shownOf = (id) => {
      let text = shown.get(id);
      if (text === undefined) shown.set(id, text = visible(words.get(id) ?? ""));
      return text;
    };
    const takeWords = (given) => { for (const [id, text] of Object.entries(given ?? {})) if (words.get(+id) !== text) { words.set(+id, text); shown.delete(+id); } };
    const takeRows = (reply) => {
      const line = lines.get(reply.branch);
      if (!line) return;
      const cache = cacheOf(line);
      takeWords(reply.words);
      numbers(reply.ids).forEach((id, i) => { cache.ids[reply.first + i] = id; cache.states[reply.first + i] = reply.states[i]; });
      Object.assign(cache.repaired, reply.repaired);
    };
    const takeBlock = (line, raw) => {
      const shares = scaled(raw.shares), ids = numbers(raw.ids);
      takeWords(raw.words);
      const scores = Object.fromEntries(Object.entries(raw.scores).map(([name, packed]) => [name, signed(packed)]));
      cacheOf(line).read.set(raw.first, { ...raw, surprise: scaled(raw.surprise), entropy: scaled(raw.entropy), ids, shares, scores });
    };
    const wantRows = (line, first) => {
      const cache = cacheOf(line), start = Math.max(line.start, Math.floor(first / ROWS_AT_ONCE) * ROWS_AT_ONCE);
      const end = Math.min(line.end, (Math.floor(first / ROWS_AT_ONCE) + 1) * ROWS_AT_ONCE), key = `${start} ${end}`;
      if (cache.asked.has(key)) return;
      cache.asked.add(key);
      ask("rows", { branch: line.id, first: start, end }).then((reply) => { takeRows(reply); refill(line.id, start, end); }, () => cache.asked.delete(key));
    };
    const wantRead = () => {  // readings of what is in sight, nearest first, a few at a time
      if (strip === "none" || reading >= READ_AT_ONCE) return;
      for (const tile of tiles.values()) {
        const { line, first } = tile, cache = cacheOf(line);
        if (line.id < 0 || !["open", "finished"].includes(line.status) || cache.asked.has(`read ${first}`) || readAt(line, first) && readAt(line, Math.min(first + TILE, line.end) - 1)) continue;
        cache.asked.add(`read ${first}`);
        reading += 1;
        ask("read", { branch: line.id, first, end: Math.min(first + TILE, line.end) })
          .then((reply) => { for (const block of reply.blocks) takeBlock(line, block); if (reply.blocks.length) refill(line.id); }, () => 0)
          .finally(() => { reading -= 1; wantRead(); });
        if (reading >= READ_AT_ONCE) return;
      }
    };
    let readTimer = 0;
    const soonRead = () => { clearTimeout(readTimer); readTimer = setTimeout(wantRead, 90); };

    // ---- drawing -----------------------------------------------------------------------------------------------------
    const width = () => WIDTHS[zoom];
    const high = () => TOKEN + 6 + (strip === "none" ? 0 : strip === "layers" ? tree.layers * (zoom ? LAYER : 5) + 2 : BARS + 2);
    const clear = () => {
      for (const { element } of rowsShown.values()) element.remove();
      for (const element of joints.values()) element.remove();
      rowsShown.clear(); tiles.clear(); joints.clear(); ruler.replaceChildren(); ruler.from = -1;
      space.style.width = `${GUTTER + (columns + 1) * width()}px`;
      space.style.height = `${RULER + order.length * high() + 8}px`;
      grid.style.setProperty("--w", `${width()}px`);
      grid.style.setProperty("--h", `${high()}px`);
      grid.dataset.zoom = zoom;
      grid.setAttribute("aria-rowcount", order.length);
      grid.setAttribute("aria-colcount", columns);
      draw();
    };
    const draw = () => { if (!drawing) drawing = requestAnimationFrame(paint); };
    const paint = () => {
      drawing = 0;
      if (!tree) return;
      const w = width(), h = high(), left = grid.scrollLeft, top = grid.scrollTop, span = TILE * w;
      const seen = grid.clientHeight || 400, wide = grid.clientWidth || 800;
      const r0 = Math.max(0, Math.floor((top - RULER) / h) - AROUND), r1 = Math.min(order.length, Math.ceil((top + seen) / h) + AROUND);
      const c0 = Math.max(0, Math.floor((left - GUTTER) / span) - 1), c1 = Math.ceil((left + wide) / span) + 1;
      for (const [row, { element, line }] of rowsShown) if (row < r0 || row >= r1) {
        element.remove();
        rowsShown.delete(row);
        for (const key of tiles.keys()) if (tiles.get(key).line === line) tiles.delete(key);
      }
      for (const [key, tile] of tiles) if (tile.first / TILE < c0 - 1 || tile.first / TILE > c1 + 1) { tile.element.remove(); tiles.delete(key); }
      let made = 0, more = false;
      for (let row = r0; row < r1; row++) {
        const line = order[row];
        const drawn = rowsShown.get(row) ?? newRow(row, line);
        for (let c = Math.max(c0, Math.floor(line.start / TILE)); c <= Math.min(c1, Math.floor((line.end - 1) / TILE)); c++) {
          const key = `${line.id} ${c}`;
          if (tiles.has(key)) continue;
          if (made >= PER_FRAME) { more = true; break; }
          const tile = { line, first: c * TILE, element: make("div", "rlx-tile") };
          tile.element.style.left = `${GUTTER + tile.first * w}px`;
          tile.element.setAttribute("role", "presentation");
          tiles.set(key, tile);
          fill(tile);
          drawn.element.append(tile.element);
          made += 1;
        }
      }
      drawJoints(r0, r1, left, wide);
      drawRuler(left, wide);
      if (more) draw(); else soonRead();
    };
    const newRow = (row, line) => {
      const element = make("div", "rlx-row"), name = make("div", "rlx-name"), label = make("b", "", line.id < 0 ? "rolled back" : `#${line.id}`);
      element.style.top = `${RULER + row * high()}px`;
      element.setAttribute("role", "row");
      element.setAttribute("aria-rowindex", row + 1);
      name.style.paddingLeft = `${4 + Math.min(line.depth, 6) * 7}px`;
      name.append(label, make("span", "rl-quiet", ` ${line.start}–${line.end}${line.finish ? ` ${line.finish}` : ""}`));
      if (line.edits.length) name.append(make("span", "rlx-edits", line.edits.map(visible).join(", ")));
      name.title = [`branch ${line.id}: ${line.status}`, `tokens ${line.start} to ${line.end}`, ...line.edits.map(visible)].join("\n");
      name.addEventListener("click", () => move(line.id, line.start, true));
      if (marked === line.id) name.classList.add("rlx-marked");
      if (path.has(line.id)) name.classList.add("rlx-on");
      if (line.end === line.start) { const tip = make("div", "rlx-tip-of", "○"); tip.style.left = `${GUTTER + line.start * width() + 2}px`; tip.title = "no token yet"; tip.addEventListener("click", () => move(line.id, line.start, true)); element.append(tip); }
      element.append(name);
      space.append(element);
      const shown = { element, line };
      rowsShown.set(row, shown);
      return shown;
    };
    const fill = (tile) => {
      const { line, first, element } = tile, cache = cacheOf(line), cells = [];
      const begin = Math.max(first, line.start), end = Math.min(first + TILE, line.end);
      let missing = false;
      for (let p = begin; p < end; p++) {
        const kind = KINDS[cache.states[p]], text = wordAt(line, p), cell = make("div", "rlx-cell"), token = make("span", `rl-token rl-${kind?.[0] ?? "none"}`);
        missing ||= text === undefined;
        cell.style.left = `${(p - first) * width()}px`;
        cell.id = `${own}-${line.id}-${p}`;
        cell.dataset.p = p;
        cell.dataset.b = line.id;
        cell.setAttribute("role", "gridcell");
        cell.setAttribute("aria-colindex", p + 1);
        if (kind) token.dataset.mark = kind[2];
        token.textContent = zoom ? text ?? "" : "";
        if (line.spans.some(([start, stop, picks]) => (picks.length ? picks.includes(p) : p >= start && (stop === null || p < stop)))) token.classList.add("rlx-edited");
        if (tree.pins.some(([branch, position]) => branch === line.id && position === p)) token.classList.add("rlx-pinned");
        if (path.has(line.id) && p < path.get(line.id)) cell.classList.add("rlx-on");
        if (p === at.position && line === lineAt(at.branch, at.position)) cell.classList.add("rlx-at");
        cell.append(token);
        const read = strip === "none" ? null : readAt(line, p), said = [`position ${p}`, text === undefined ? "not loaded" : `token ${text}`, kind?.[1] ?? ""];
        if (read) said.push(...under(cell, token, read));
        cell.setAttribute("aria-label", said.filter(Boolean).join(", "));
        if (attention) weigh(cell);
        cells.push(cell);
      }
      element.replaceChildren(...cells);
      if (missing) wantRows(line, begin);
    };
    const under = (cell, token, [block, i]) => {  // what stands under a token, and in words
      if (strip === "layers") {
        const stack = make("span", "rlx-layers");
        for (let layer = tree.layers - 1; layer >= 0; layer--) {
          const k = (i * block.layers + layer) * block.k, one = make("span", "", zoom ? shownOf(block.ids[k]) : "");
          one.style.setProperty("--v", share(block.shares[k]));
          if (block.shares[k] > 0.6) one.classList.add("rlx-strong");
          stack.append(one);
        }
        cell.append(stack);
        return [`then ${visible(words.get(block.ids[(i * block.layers + tree.layers - 1) * block.k]) ?? "")}`];
      }
      const name = strip.startsWith("probe ") ? strip.slice(6) : null, value = name ? block.scores[name]?.[i] : block[strip]?.[i];
      if (value === undefined) return [];
      const bar_ = make("span", "rlx-bar"), inner = make("i"), over = name !== null && value > tree.probes[name];
      const part = name ? Math.min(1, Math.abs(value) / (block.scores[name].reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9))) : Math.min(1, value / 6);
      inner.style.height = `${Math.max(4, 100 * part)}%`;
      if (over) bar_.classList.add("rlx-over");
      bar_.append(inner);
      if (zoom > 1) bar_.append(make("small", "", (over ? "▲" : "") + value.toFixed(value < 10 ? 2 : 0)));
      cell.append(bar_);
      return [`${name ?? strip} ${value.toFixed(2)}`];
    };
    const refill = (id, from = 0, to = Infinity) => { for (const tile of tiles.values()) if (tile.line.id === id && tile.first < to && tile.first + TILE > from) fill(tile); if (id === at.branch || path.has(id)) soonLook(); soonRead(); };
    const refillAll = () => { for (const tile of tiles.values()) fill(tile); };
    const drawRuler = (left, wide) => {
      const step = [50, 20, 10, 5][zoom], from = Math.floor(Math.max(0, left - GUTTER) / width() / step) * step, to = Math.min(columns, (left + wide) / width() + step);
      if (ruler.from === from && ruler.to === to) return;
      Object.assign(ruler, { from, to });
      const made = [];
      for (let p = from; p < to; p += step) { const one = make("span", "", String(p)); one.style.left = `${GUTTER + p * width()}px`; made.push(one); }
      ruler.replaceChildren(...made);
    };
    const drawJoints = (r0, r1, left, wide) => {
      const w = width(), h = high(), keep = new Set();
      for (const line of order) {
        if (line.parent === null || line.row < r0) continue;
        const above = lines.get(line.parent).row, x = GUTTER + (line.start - 1) * w + w / 2;
        if (above >= r1 || x < left - w || x > left + wide + w) continue;
        keep.add(line.id);
        if (joints.has(line.id)) continue;
        const joint = make("div", `rlx-joint${path.has(line.id) ? " rlx-on" : ""}${line.id < 0 || line.status === "rejected" ? " rlx-dim" : ""}`);
        Object.assign(joint.style, { left: `${x}px`, width: `${w / 2}px`, top: `${RULER + above * h + TOKEN}px`, height: `${(line.row - above) * h - TOKEN / 2}px` });
        joints.set(line.id, joint);
        space.append(joint);
      }
      for (const [id, joint] of joints) if (!keep.has(id)) { joint.remove(); joints.delete(id); }
    };

    // ---- the cursor --------------------------------------------------------------------------------------------------
    const move = (branch, position, scroll = false, again = false) => {
      const of = lines.get(branch);
      if (!of) return;
      position = Math.max(0, Math.min(position, of.end - 1));
      if (!again && branch === at.branch && position === at.position) { if (scroll) reveal(); return; }
      at = { branch, position };
      path = new Map();
      for (let line = of, end = of.end; line; end = line.start, line = line.parent === null ? null : lines.get(line.parent)) path.set(line.id, end);
      for (const joint of joints.values()) joint.remove();
      joints.clear();
      for (const shown of rowsShown.values()) shown.element.firstChild.classList.toggle("rlx-on", path.has(shown.line.id));
      for (const cell of space.querySelectorAll(".rlx-at")) cell.classList.remove("rlx-at");
      for (const cell of space.querySelectorAll(".rlx-cell")) cell.classList.toggle("rlx-on", path.has(+cell.dataset.b) && +cell.dataset.p < path.get(+cell.dataset.b));
      const shown = lineAt(branch, position), cell = document.getElementById(`${own}-${shown.id}-${position}`) ?? host.querySelector(`#${CSS.escape(`${own}-${shown.id}-${position}`)}`);
      cell?.classList.add("rlx-at");
      grid.setAttribute("aria-activedescendant", `${own}-${shown.id}-${position}`);
      if (scroll) reveal();
      if (attention) { attention = null; refillAll(); }
      draw();
      soonLook();
      if (transport.live && !again) ask("select", { branches: [branch], position }).catch(() => 0);
    };
    const reveal = () => {
      const line = lineAt(at.branch, at.position), x = GUTTER + at.position * width(), y = RULER + line.row * high();
      if (x < grid.scrollLeft + GUTTER + width() || x > grid.scrollLeft + grid.clientWidth - 2 * width()) grid.scrollLeft = Math.max(0, x - grid.clientWidth / 2);
      if (y < grid.scrollTop + RULER || y + high() > grid.scrollTop + grid.clientHeight) grid.scrollTop = Math.max(0, y - grid.clientHeight / 2);
    };
    const beside = (by) => {
      const of = lines.get(at.branch), now = of.end === of.start ? of : lineAt(at.branch, at.position);
      const row = Math.max(0, Math.min(order.length - 1, now.row + by)), line = order[row];
      move(line.id, Math.max(line.start, Math.min(at.position, line.end - 1)), true);
    };
    const along = (by) => {
      const line = lines.get(at.branch);
      move(at.branch, Math.max(0, Math.min(at.position + by, line.end - 1)), true);
    };
    const zoomBy = (by) => { zoom = Math.max(0, Math.min(WIDTHS.length - 1, zoom + by)); clear(); reveal(); };

    // ---- the panel ---------------------------------------------------------------------------------------------------
    const [nLabel, nField] = field("n", "tokens", 16, 4096), [tLabel, tField] = field("temperature", "temperature", 0, 10, 0.1);
    const [sLabel, sField] = field("seed", "seed", 0, 2 ** 32), [dLabel, dField] = field("drawn", "draw", 8, 512);
    const [layerLabel, layerField] = field("layer", "layer", 0, 999), [factorLabel, factorField] = field("factor", "times", 0.5, 1000, 0.1);
    const typed = make("input", "rlx-typed"), steerTo = make("input", "rlx-typed"), editOp = make("select"), headPick = make("select"), layerPick = make("select");
    const sitePick = make("select"), goOn = make("input");
    Object.assign(typed, { type: "text", placeholder: "type another token or text, Enter", title: "in place of this token (t)" });
    Object.assign(steerTo, { type: "text", placeholder: "to the token" });
    Object.assign(goOn, { type: "checkbox", checked: true });
    for (const [input, name] of [[editOp, "edit"], [headPick, "head"], [layerPick, "layer of attention"], [sitePick, "site"], [typed, "another token"], [steerTo, "token to steer to"]]) input.setAttribute("aria-label", name);
    const results = make("div", "rlx-results"), heading = make("div", "rlx-heading"), facts = make("dl", "rl-facts"), instead = make("div", "rlx-list"), thinks = make("div", "rlx-thinks");
    const attends = make("div", "rlx-list"), numbersOf = make("div"), pinList = make("div");
    const fold = (name, ...children) => { const made = make("details", "", make("summary", "", name), ...children); return made; };
    const sampling = () => ({ n: Math.max(1, +nField.value), temperature: +tField.value, seed: +sField.value });
    const further = () => (goOn.checked ? sampling() : {});
    const here = (what) => button(what[0], what[2], what[1], "rlx-live");
    const doFork = () => go(act("fork", { branch: at.branch, at: at.position + 1 }));
    const doBack = () => act("rollback", { branch: at.branch, to: at.position + 1 });
    const doGenerate = () => act("generate", { branch: at.branch, ...sampling() });
    const doResample = async () => {
      const reply = await act("resample", { branch: at.branch, at: at.position + 1, n: +dField.value, max_new: Math.max(1, +nField.value), temperature: +tField.value || 1, seed: +sField.value });
      if (!reply) return;
      takeWords(reply.words);
      const where = reply.parts === null ? `${reply.branches.length} branches, all the same.` : `${reply.branches.length} branches part at position ${reply.parts}:`;
      results.replaceChildren(make("b", "", "Resampled"), make("p", "", where), chances(reply.counts.map(([id, n]) => [id, n / reply.branches.length]), null));
    };
    const doForce = (option) => go(act("force", { branch: at.branch, at: at.position, ...option, ...further() }));
    const doNext = (token) => go(act("force", { branch: at.branch, at: at.position + 1, token, ...further() }));
    const doEdit = () => {
      const [kind, name] = [editOp.value.slice(0, 1), editOp.value.slice(1)], layer = +layerField.value;
      const option = kind === "n" ? { name } : name === "steer" ? { op: name, layer, token: steerTo.value, factor: +factorField.value } : { op: name, layer };
      return go(act("edit", { branch: at.branch, at: at.position, ...option, ...further() }));
    };
    const doCompare = async () => {
      if (marked === null || marked === at.branch) { marked = marked === null ? at.branch : null; say(marked === null ? "no branch is marked" : `branch ${marked} is marked: choose another and compare (c)`); clear(); return; }
      const first = marked, reply = await act("compare", { first, second: at.branch });
      marked = null;
      clear();
      if (reply) showDifference(first, at.branch, reply);
    };
    const showDifference = (first, second, reply) => {
      takeWords(reply.words);
      const said = (id) => (id === null ? "(its end)" : `“${shownOf(id)}”`);
      const token = reply.token ? `First different token: position ${reply.token.position}, ${said(reply.token.ids[0])} and ${said(reply.token.ids[1])}.` : "All tokens are the same.";
      const row = reply.row ? `First different row: position ${reply.row.position}, ${reply.row.site}.` : "All rows compared have the same bits.";
      results.replaceChildren(make("b", "", `#${first} and #${second}`), make("p", "", token), make("p", "", row));
      if (reply.row) {
        const bars = make("div", "rlx-bars");
        reply.row.sizes.forEach((size, i) => { const one = make("span", "", make("i"), make("small", "", i === reply.row.sizes.length - 1 ? "out" : `S${i}`)); one.title = `${i === reply.row.sizes.length - 1 ? "output" : `S${i}`}: ${size.toFixed(4)}`; one.firstChild.style.height = `${Math.min(100, 100 * size)}%`; bars.append(one); });
        results.append(make("p", "rl-quiet", "how far apart, layer by layer, as a share of the first one's length"), bars);
      }
      const jump = reply.token?.position ?? reply.row?.position;
      if (jump !== undefined) move(second, jump, true);
    };
    const doPin = () => act("pin", { branch: lineAt(at.branch, at.position).id, position: at.position });
    const go = async (promise) => {  // to the branch that an action has made, once the tree has it
      const reply = await promise;
      if (!Array.isArray(reply)) return reply;
      if (lines.has(reply[0])) move(reply[0], lines.get(reply[0]).end - 1, true); else toCome = reply[0];
      return reply;
    };
    const chances = (pairs, click, title_) => {
      const list = make("div", "rlx-list");
      for (const [id, p] of pairs) {
        const one = make(click ? "button" : "div", "rlx-chance", make("span", "rlx-word", id === null ? "(end)" : shownOf(id)), make("span", "rlx-p", percent(p)));
        one.style.setProperty("--v", share(p));
        if (click) { one.type = "button"; one.title = title_; one.disabled = !transport.live; one.addEventListener("click", () => click(id)); }
        list.append(one);
      }
      return list;
    };
    typed.addEventListener("keydown", (event) => { if (event.key === "Enter" && typed.value) { doForce({ text: typed.value }); typed.value = ""; grid.focus(); } });
    steerTo.addEventListener("keydown", (event) => { if (event.key === "Enter") doEdit(); });
    for (const pick of [headPick, layerPick]) pick.addEventListener("change", () => soonLook(pick === layerPick));
    sitePick.addEventListener("change", () => showValues());
    const editFold = fold("Edit from here (e)", make("div", "rlx-form", editOp, layerLabel, steerTo, factorLabel, here(["fork with the edit", "e", doEdit])));
    const attentionFold = fold("Attention from here", make("div", "rlx-form", make("label", "", "layer ", layerPick), make("label", "", "head ", headPick)), attends);
    const valuesFold = fold("Values", sitePick, numbersOf);
    for (const each of [attentionFold, valuesFold]) each.addEventListener("toggle", () => { if (each.open) each === valuesFold ? showValues() : soonLook(true); else if (attention) { attention = null; refillAll(); } });
    side.append(heading, facts,
      make("div", "rlx-actions", here(["roll back", "this token becomes the last one (r)", doBack]), here(["fork", "after this token (f)", doFork]), here(["generate", "at the end of the branch (g)", doGenerate]),
        here(["resample", "after this token (n)", doResample]), here(["compare", "with another branch (c)", doCompare]), here(["pin", "p", doPin])),
      make("div", "rlx-form", nLabel, tLabel, sLabel, dLabel), results,
      make("h4", "", "Instead of this token"), instead, typed, make("label", "rl-quiet", goOn, " and generate from there"),
      make("h4", "", "What each layer thinks comes next"), thinks, editFold, attentionFold, valuesFold, pinList);
    for (const input of side.querySelectorAll(".rlx-actions button,.rlx-form button,.rlx-form input,.rlx-form select,.rlx-typed,input[type=checkbox]"))
      if (!transport.live && ![headPick, layerPick].includes(input)) input.disabled = true;
    if (!transport.live) for (const each of tools.querySelectorAll(".rlx-live")) each.disabled = true;

    const soonLook = (fresh = false) => { clearTimeout(lookTimer); lookTimer = setTimeout(() => showToken(fresh), 40); };
    const showToken = async () => {
      if (!tree) return;
      const line = lineAt(at.branch, at.position), cache = cacheOf(line), kind = KINDS[cache.states[at.position]], text = wordAt(line, at.position);
      if (text === undefined) { wantRows(line, at.position); return; }
      const badge = make("span", `rl-token rl-${kind[0]}`, text);
      badge.dataset.mark = kind[2];
      heading.replaceChildren(badge, make("span", "rl-quiet", ` ${kind[1]}, position ${at.position}, branch ${at.branch < 0 ? "rolled back" : at.branch}`));
      if (!editOp.options.length) fillPicks();
      showPins();
      const asked = { ...at };
      let reply = null, why = "none were taken of this token";
      try {
        reply = line.id < 0 ? null : await ask("look", { branch: at.branch < 0 ? line.id : at.branch, position: at.position, layer: attentionFold.open && layerPick.value !== "" ? +layerPick.value : null });
      } catch (error) {
        why = String(error.message ?? error);
      }
      if (asked.branch !== at.branch || asked.position !== at.position) return;
      look = reply;
      showLook(line, reply, why);
    };
    const showLook = (line, reply, why) => {
      takeWords(reply?.words);
      facts.replaceChildren();
      const fact = (name, value) => facts.append(make("dt", "", name), make("dd", "", value));
      const read = readAt(line, at.position);
      if (reply?.surprise !== null && reply?.surprise !== undefined) fact("surprise", `${nats(reply.surprise)}, probability ${percent(Math.exp(-reply.surprise))}${reply.rank === undefined || reply.rank === null ? "" : `, rank ${reply.rank + 1}`}`);
      if (reply?.entropy !== undefined) fact("entropy after it", nats(reply.entropy));
      if (read) for (const [name, values] of Object.entries(read[0].scores)) fact(`probe ${name}`, `${values[read[1]].toFixed(3)}${values[read[1]] > tree.probes[name] ? " ▲ above " : ", threshold "}${tree.probes[name]}`);
      for (const [name, sizes] of Object.entries(reply?.sizes ?? {})) fact(`|${name}| by layer`, sizes.map((x) => x.toPrecision(2)).join("  "));
      if (!reply) fact("readings", why);
      instead.replaceChildren(...(reply?.instead?.length ? [chances(reply.instead, (token) => doForce({ token }), "put it in place of this token, on a fork")] : [make("span", "rl-quiet", at.position ? "unknown" : "it is the first")]));
      thinks.replaceChildren();
      const layers = reply?.layers ?? [];
      for (let i = layers.length - 1; i >= 0; i--) {
        const row = make("div", "rlx-layer", make("small", "", i === layers.length - 1 ? "output" : `S${i}`));
        for (const [id, p] of layers[i]) {
          const one = make("button", "rlx-chip", shownOf(id));
          Object.assign(one, { type: "button", title: `${percent(p)}: make it the next token`, disabled: !transport.live });
          one.style.setProperty("--v", share(p));
          if (p > 0.6) one.classList.add("rlx-strong");
          one.addEventListener("click", () => doNext(id));
          row.append(one);
        }
        thinks.append(row);
      }
      if (attentionFold.open) showAttention(reply);
    };
    const showAttention = (reply) => {
      attends.replaceChildren();
      attention = null;
      if (!reply?.attention) { attends.append(make("span", "rl-quiet", "This layer has no attention, or it was not looked at.")); refillAll(); return; }
      const { heads } = reply.attention, weights = scaled(reply.attention), length = weights.length / heads, ids = numbers(reply.path);
      if (headPick.options.length !== heads + 1) { const kept = headPick.value; headPick.replaceChildren(new Option("mean", "mean"), ...Array.from({ length: heads }, (_, h) => new Option(h, h))); headPick.value = kept || "mean"; }
      const own_ = new Float32Array(length);
      for (let k = 0; k < length; k++) {
        if (headPick.value === "mean") { for (let h = 0; h < heads; h++) own_[k] += weights[h * length + k] / heads; } else own_[k] = weights[+headPick.value * length + k];
      }
      attention = own_;
      const ranked = [...own_.keys()].sort((a, b) => own_[b] - own_[a]).slice(0, 8);
      for (const k of ranked) {
        const one = make("button", "rlx-chance", make("span", "rlx-word", `${k} ${visible(words.get(ids[k]) ?? "")}`), make("span", "rlx-p", percent(own_[k])));
        one.type = "button";
        one.style.setProperty("--v", share(own_[k]));
        one.addEventListener("click", () => move(at.branch, k, true));
        attends.append(one);
      }
      refillAll();
    };
    const weigh = (cell) => {  // how much the cursor's token attends to this one
      const p = +cell.dataset.p, id = +cell.dataset.b;
      if (p < attention.length && path.has(id) && p < path.get(id)) { const mark = make("span", "rlx-weight"); mark.style.opacity = Math.min(1, 0.08 + attention[p]); mark.title = percent(attention[p]); cell.append(mark); }
    };
    const fillPicks = () => {
      editOp.append(new Option("no attention output", "oattention"), new Option("no MLP output", "omlp"), new Option("steer", "osteer"), ...tree.edits.map((name) => new Option(visible(name), `n${name}`)));
      const shape = () => { const op = editOp.value; steerTo.hidden = factorLabel.hidden = op !== "osteer"; layerLabel.hidden = op[0] === "n"; };
      editOp.addEventListener("change", shape);
      layerField.max = tree.blocks - 1;
      shape();
      layerPick.replaceChildren(...tree.attention.map((l) => new Option(l, l)));
      headPick.replaceChildren(new Option("mean", "mean"));
      sitePick.replaceChildren(new Option("choose a site", ""), ...tree.sites.map((name) => new Option(name, name)));
    };
    const showValues = async () => {
      if (!valuesFold.open || !sitePick.value) return;
      const reply = await ask("values", { branch: at.branch, position: at.position, site: sitePick.value }).catch((error) => say(String(error.message ?? error)));
      if (!reply) return;
      const values = signed(reply), shown = make("div", "rlx-values"), most = reply.most || 1;
      for (let i = 0; i < Math.min(values.length, 1024); i++) { const one = make("i", values[i] < 0 ? "rlx-minus" : ""); one.style.opacity = Math.min(1, Math.abs(values[i]) / most); one.title = `${i}: ${values[i].toPrecision(3)}`; shown.append(one); }
      shown.setAttribute("role", "img");
      shown.setAttribute("aria-label", `${values.length} numbers between ±${most.toPrecision(3)}`);
      numbersOf.replaceChildren(make("p", "rl-quiet", `${reply.shape.join(" x ")}; strongest: ${reply.strongest.map(([i, x]) => `${i}: ${x.toPrecision(3)}`).join(", ")}`), shown);
    };
    const showPins = () => {
      pinList.replaceChildren(...(tree.pins.length ? [make("h4", "", "Pins")] : []));
      for (const [branch, position, text] of tree.pins) pinList.append(button(`★ #${branch} ${position} ${visible(text) === "∅" ? "" : visible(text)}`, () => move(branch, position, true), "go there", "rlx-pin"));
    };

    // ---- other actions -----------------------------------------------------------------------------------------------
    const dialog = (name, ...children) => {
      const box = make("dialog", "rl-view rlx-dialog", make("h3", "", name), ...children, button("close", () => box.remove()));
      box.addEventListener("close", () => box.remove());
      frame.append(box);
      box.showModal?.();
      return box;
    };
    async function showPython() {
      const code = await act("python");
      if (code === undefined) return;
      const text = make("textarea", "rlx-code");
      Object.assign(text, { value: code, readOnly: true, rows: Math.min(24, code.split("\n").length + 1) });
      dialog("The Python that does the same", text);
      text.select();
      navigator.clipboard?.writeText(code).then(() => say("Python copied"), () => say("select and copy"));
    }
    function help() {
      const table = make("table");
      for (const [keys, what] of KEYS) { const row = table.insertRow(); row.insertCell().append(make("kbd", "", keys)); row.insertCell().textContent = what; }
      dialog("Keys", table);
    }
    function theme() {
      const dark = getComputedStyle(frame).colorScheme.includes("dark"), to = frame.closest(".rlx-themed") ?? host;
      to.dataset.theme = dark ? "light" : "dark";
      if (to !== document.body && document.body.classList.contains("rl-whole")) document.body.dataset.theme = to.dataset.theme;
    }
    function whole() { if (document.fullscreenElement) document.exitFullscreen(); else host.requestFullscreen?.(); }
    function download() {
      const seen = [...caches].map(([id, cache]) => ({ branch: id, ids: Object.fromEntries(Object.entries(cache.ids)), states: Object.fromEntries(Object.entries(cache.states)) }));
      const text = JSON.stringify({ tree, tokens: seen, words: Object.fromEntries(words), look }, null, 1), link = make("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
      link.download = "tree.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }
    const nextStrip = (by) => { const all = [...strips.options]; strips.selectedIndex = (strips.selectedIndex + by + all.length) % all.length; strip = strips.value; clear(); };
    strips.addEventListener("change", () => { strip = strips.value; clear(); reveal(); });
    const search = async () => {
      const wanted = find.value;
      if (!wanted) return;
      if (find.dataset.last === wanted && hits.length) hit = (hit + 1) % hits.length;
      else { find.dataset.last = wanted; hits = (await ask("find", { text: wanted }).catch(() => [])) ?? []; hit = 0; }
      say(hits.length ? `${hit + 1} of ${hits.length}` : "not found");
      if (hits.length) move(hits[hit][0], hits[hit][1], true);
    };
    find.addEventListener("keydown", (event) => { if (event.key === "Enter") search(); if (event.key === "Escape") grid.focus(); event.stopPropagation(); });
    grid.addEventListener("scroll", draw, { passive: true });
    grid.addEventListener("click", (event) => {
      const cell = event.target.closest(".rlx-cell");
      if (cell && getSelection().isCollapsed) { const p = +cell.dataset.p, b = +cell.dataset.b; move(path.has(b) && p < path.get(b) && event.detail < 2 ? at.branch : b, p); }
    });
    const onKey = {
      ArrowLeft: () => along(-1), ArrowRight: () => along(1), ArrowUp: () => beside(-1), ArrowDown: () => beside(1),
      Home: () => move(at.branch, lines.get(at.branch).start, true), End: () => move(at.branch, lines.get(at.branch).end - 1, true),
      r: doBack, f: doFork, g: doGenerate, n: doResample, c: doCompare, p: doPin, u: () => act("undo"), y: showPython,
      t: () => typed.focus(), e: () => { editFold.open = true; editOp.focus(); }, "[": () => nextStrip(-1), "]": () => nextStrip(1),
      "+": () => zoomBy(1), "-": () => zoomBy(-1), "/": () => find.focus(), w: whole, "?": help,
      " ": () => work && act(work.paused ? "resume" : "pause"), Escape: () => work && act("stop"),
    };
    frame.addEventListener("keydown", (event) => {
      event.stopPropagation();  // a notebook has keys of its own
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input,select,textarea,dialog")) {
        if (event.key === "Escape") grid.focus();
        return;
      }
      if (event.key === " " && event.target.closest("button,summary") || !onKey[event.key]) return;
      event.preventDefault();
      onKey[event.key]();
    });

    // ---- events ------------------------------------------------------------------------------------------------------
    transport.listen((event) => {
      if (event.event === "lost") return lost(event.why);
      if (event.event === "found") return found();
      if (event.event === "tree") return setTree(event.tree);
      if (event.event === "pins") { tree.pins = event.pins; refillAll(); showPins(); return; }
      setWork(event.work ?? null);
      if (event.event !== "grown") return;
      const line = lines.get(event.branch), cache = line && cacheOf(line);
      if (!line || event.end <= line.end) return;
      const from = Math.max(line.start, line.end - 1), follows = at.branch === line.id && at.position === line.end - 1;
      line.end = event.end;
      cache.read.forEach((block, first) => { if (first + block.count >= from) cache.read.delete(first); });
      cache.asked.clear();
      if (line.end > columns) { columns = line.end; space.style.width = `${GUTTER + (columns + 1) * width()}px`; }
      ask("rows", { branch: line.id, first: from, end: line.end }).then((reply) => { takeRows(reply); draw(); for (const tile of tiles.values()) if (tile.line === line && tile.first + TILE > from) fill(tile); if (follows && at.branch === line.id) move(line.id, line.end - 1, true); }, () => 0);
    });
    const begin = () => ask("tree").then(setTree, (error) => say(String(error.message ?? error)));
    const observer = new ResizeObserver(draw);
    observer.observe(grid);
    begin();
    return { begin, end: () => { observer.disconnect(); cancelAnimationFrame(drawing); } };
  };

  // ---- transports ------------------------------------------------------------------------------------------------------

  // Messages with numbers over anything that sends and hears. Long actions reply by an event.
  const numbered = (send, why) => {
    const waiting = new Map(), listeners = [], base = Math.random().toString(36).slice(2);
    let number = 0, silent = false, beat = 0;
    const tell = (event) => { for (const each of listeners) each(event); };
    const settle = (message) => {
      const asked = waiting.get(message.id);
      if (!asked) return;
      if (message.started) { asked.long = true; return; }
      waiting.delete(message.id);
      message.error === undefined ? asked.resolve(message.reply) : asked.reject(new Error(message.error));
    };
    const hear = (message) => {
      if (silent) { silent = false; tell({ event: "found" }); }
      if (message.event === "done") return settle(message);
      message.event ? tell(message) : settle(message);
    };
    const ask = (message) => new Promise((resolve, reject) => {
      const id = `${base} ${++number}`;
      waiting.set(id, { resolve, reject, since: Date.now(), long: false });
      Promise.resolve(send({ ...message, id })).catch(() => fail());
    });
    const fail = () => { if (!silent) { silent = true; tell({ event: "lost", why }); } };
    const check = () => {
      for (const asked of waiting.values()) if (!asked.long && Date.now() - asked.since > LOST_AFTER) return fail();
      if (!silent) ask({ do: "ping" }).catch(() => 0);
    };
    beat = setInterval(check, BEAT);
    return { live: true, ask, hear, fail, listen: (f) => listeners.push(f), end: () => clearInterval(beat) };
  };

  // A notebook: anywidget's messages.
  const render = ({ model, el }) => {
    const transport = numbered((message) => model.send(message), "Python does not answer: the kernel is busy, or has stopped.");
    const hear = (message) => transport.hear(message);
    el.classList.add("rl-view", "rlx-notebook");
    model.on("msg:custom", hear);
    const shown = mount(el, transport);
    return () => { model.off("msg:custom", hear); transport.end(); shown.end(); };
  };

  // A served page: requests to its own address, and one that waits for events.
  const served = () => {
    const at = location.pathname.replace(/[^/]*$/, ""), why = "The server does not answer: it has stopped.";
    const post = (path, content) => fetch(at + path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content), credentials: "same-origin" })
      .then((reply) => { if (!reply.ok) throw new Error(`refused: ${reply.status}`); return reply.json(); });
    const transport = numbered((message) => post("ask", message).then(transport_hear), why);
    function transport_hear(message) { transport.hear(message); }
    const wait = async (seen) => {
      for (let after = seen; ;) {
        try {
          const found = await post("events", { after });
          after = found.after;
          for (const event of found.events) transport.hear(event);
        } catch {
          transport.fail();
          await new Promise((go) => setTimeout(go, 1500));
        }
      }
    };
    mount(document.getElementById("rl-explore"), transport);
    wait(-1);
  };

  // A saved page: what was computed, and nothing else.
  const saved = async () => {
    const host = document.getElementById("rl-explore"), raw = bytes(document.getElementById("rl-data").textContent);
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip")), data = JSON.parse(await new Response(stream).text());
    const lines = new Map(data.tree.branches.map((line) => [line.id, line]));
    const word = (id) => data.words[id] ?? "";
    const rows = new Map(), read = (branch) => data.read[branch] ?? [];
    const rowsOf = (branch) => { if (!rows.has(branch)) rows.set(branch, numbers(data.rows[branch].ids)); return rows.get(branch); };
    const pack = (ids) => btoa(Array.from(new Uint8Array(Uint32Array.from(ids).buffer), (x) => String.fromCharCode(x)).join(""));
    const shown = new Set();  // words that the component has
    const fresh = (ids) => { const found = {}; for (const id of ids) if (!shown.has(id)) { shown.add(id); found[id] = word(id); } return found; };
    const owner = (branch, position) => { let line = lines.get(branch); while (position < line.start && line.parent !== null) line = lines.get(line.parent); return line; };
    const answers = {
      tree: () => data.tree,
      rows: ({ branch, first, end }) => {
        const own = data.rows[branch], from = first - own.first, ids = rowsOf(branch).subarray(from, end - own.first);
        return { branch, first, ids: pack(ids), states: own.states.slice(from, end - own.first), repaired: own.repaired, words: fresh(ids) };
      },
      read: ({ branch, first, end }) => ({ branch, blocks: read(branch).filter((block) => block.first < end && first < block.first + block.count).map((block) => ({ ...block, words: fresh(numbers(block.ids)) })) }),
      look: ({ branch, position }) => {
        const own = owner(branch, position), kept = data.looks[`${branch} ${position}`] ?? data.looks[`${own.id} ${position}`];
        if (kept) return { ...kept, words: data.words };
        const at = (p) => { const of = owner(branch, p), block = p < 0 ? undefined : read(of.id).find((each) => each.first <= p && p < each.first + each.count); return block && [block, p - block.first]; };
        const chances = ([block, i], layer) => { const ids = numbers(block.ids), p = scaled(block.shares), k = (i * block.layers + layer) * block.k; return Array.from({ length: block.k }, (_, j) => [ids[k + j], p[k + j]]); };
        const now = at(position), before = at(position - 1);
        if (!now) throw new Error("This token was not looked at before the page was saved.");
        return { branch, position, surprise: position ? scaled(now[0].surprise)[now[1]] : null, entropy: scaled(now[0].entropy)[now[1]], words: data.words,
          instead: before ? chances(before, before[0].layers - 1) : [], layers: Array.from({ length: now[0].layers }, (_, layer) => chances(now, layer)) };
      },
      find: ({ text }) => {
        const wanted = text.toLowerCase(), found = [];
        for (const line of data.tree.branches) {
          const pieces = Array.from(rowsOf(line.id), (id) => word(id).toLowerCase()), ends = [];
          let length = 0;
          for (const piece of pieces) ends.push(length += piece.length);
          const joined = pieces.join("");
          for (let at = joined.indexOf(wanted); at >= 0 && found.length < 200; at = joined.indexOf(wanted, at + 1)) found.push([line.id, line.start + ends.findIndex((end) => end > at)]);
        }
        return found;
      },
    };
    const ask = async ({ do: what, ...options }) => { if (!answers[what]) throw new Error("This page has no kernel."); return answers[what](options); };
    mount(host, { live: false, ask, listen: () => 0 });
  };

  return { render, served, saved };
})();
