(() => {
  const PAGE = 15;
  const at = (id) => document.getElementById(id);
  at("rl-theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.body).colorScheme.includes("dark");
    document.body.dataset.theme = dark ? "light" : "dark";
  });
  if (!at("rl-rows")) return;
  const rows = JSON.parse(at("rl-rows").textContent);  // [example, prompt, generated, answer, right, rejected branches]
  const texts = rows.map((row) => (row[1] + row[2]).toLowerCase());
  const kinds = {
    all: () => true,
    right: (row) => row[4],
    wrong: (row) => row[4] === false,
    rejected: (row) => row[5] > 0,
  };
  let found = rows.map((_, i) => i), first = 0, chosen = null;

  // The trees, unpacked one block at a time.
  const blocks = [];
  for (const element of document.querySelectorAll(".rl-block")) {
    const start = blocks.length ? blocks.at(-1).end : 0;
    blocks.push({ element, start, end: start + +element.dataset.count, html: null });
  }
  const unpack = async (block) => {
    const bytes = Uint8Array.from(atob(block.element.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };
  const fragment = async (i) => {
    const block = blocks.find((b) => b.start <= i && i < b.end);
    if (!block) return null;
    block.html ??= await unpack(block);
    return block.html[i - block.start];
  };

  const cell = (line, text, look) => {
    const made = line.insertCell();
    made.textContent = text;
    made.title = text;
    if (look) made.className = look;
    return made;
  };
  const fill = () => {
    const body = at("rl-table");
    body.replaceChildren();
    for (const i of found.slice(first, first + PAGE)) {
      const [example, prompt, generated, answer, right, rejected] = rows[i];
      const line = body.insertRow();
      line.dataset.row = i;
      line.setAttribute("aria-selected", i === chosen);
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = example;
      cell(line, "", "rl-number").append(button);
      cell(line, prompt);
      cell(line, generated);
      cell(line, answer);
      cell(line, right === null ? "" : right ? "✓" : "✗");
      cell(line, rejected, "rl-number");
      line.addEventListener("click", () => show(i));
    }
    at("rl-previous").disabled = first === 0;
    at("rl-next").disabled = first + PAGE >= found.length;
    const last = Math.min(first + PAGE, found.length);
    at("rl-shown").textContent = found.length ? `${first + 1} to ${last} of ${found.length}` : "nothing found";
  };
  const show = async (i) => {
    chosen = i;
    for (const line of at("rl-table").rows) line.setAttribute("aria-selected", +line.dataset.row === i);
    const place = at("rl-explorer"), html = await fragment(i);
    if (chosen !== i) return;
    if (html === null) place.textContent = "The page has no tree of this example.";
    else place.innerHTML = html;
    place.dataset.example = rows[i][0];
    history.replaceState(null, "", `#example-${rows[i][0]}`);
  };
  const search = () => {
    const wanted = at("rl-search").value.toLowerCase(), kind = kinds[at("rl-kind").value];
    found = rows.map((_, i) => i).filter((i) => kind(rows[i]) && texts[i].includes(wanted));
    first = 0;
    fill();
  };
  at("rl-search").addEventListener("input", search);
  at("rl-kind").addEventListener("input", search);
  at("rl-previous").addEventListener("click", () => { first -= PAGE; fill(); });
  at("rl-next").addEventListener("click", () => { first += PAGE; fill(); });
  const wanted = /^#example-(\d+)$/.exec(location.hash);
  const start = wanted ? rows.findIndex((row) => row[0] === +wanted[1]) : 0;
  if (start > 0) first = Math.floor(start / PAGE) * PAGE;
  fill();
  if (start >= 0 && rows.length) show(start);
})();
