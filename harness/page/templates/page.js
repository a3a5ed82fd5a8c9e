"use strict";
(() => {
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  // -- tables that can be narrowed down ----------------------------------------------------------------------------------
  for (const block of document.querySelectorAll(".filtered")) {
    const filters = block.querySelector(".filters");
    if (!filters) continue;
    const find = filters.querySelector("[data-find]");
    const selects = [...filters.querySelectorAll("select")];
    const told = filters.querySelector("[data-count]");
    const rows = [...block.querySelectorAll("tbody tr")].map((row) => ({
      row, text: row.textContent.toLowerCase(), tags: new Set((row.dataset.tags || "").split("|")),
    }));
    const narrow = () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      const tags = selects.map((select) => select.value).filter(Boolean);
      let shown = 0;
      for (const { row, text, tags: own } of rows) {
        row.hidden = !(words.every((word) => text.includes(word)) && tags.every((tag) => own.has(tag)));
        shown += !row.hidden;
      }
      told.textContent = `${shown} of ${rows.length} rows`;
    };
    find.addEventListener("input", narrow);
    for (const select of selects) select.addEventListener("change", narrow);
    narrow();
  }

  // -- the time line: a window of it is in the document, whatever its length ---------------------------------------------
  const place = document.getElementById("timeline");
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  if (!place || !data || !data.columns.length) return;
  const LANES = 20;
  const across = () => Math.max(3, Math.min(16, Math.floor((place.clientWidth - 130) / 84)));
  let left = 0, top = 0, width = across(), chosen = null;
  const firstLane = Math.max(0, data.lanes.findIndex((lane) => lane.marks.some((mark) => mark.first)));
  const byColumn = data.lanes.map((lane) => {
    const found = new Map();
    for (const mark of lane.marks) found.has(mark.at) ? found.get(mark.at).push(mark) : found.set(mark.at, [mark]);
    return found;
  });

  const controls = element("div", undefined, "controls");
  const table = element("table");
  const scroll = element("div", undefined, "scroll");
  const details = element("div");
  details.id = "details";
  details.setAttribute("role", "status");
  scroll.append(table);
  place.append(controls, scroll, details);

  const button = (text, act) => {
    const made = element("button", text);
    made.type = "button";
    made.addEventListener("click", act);
    controls.append(made);
    return made;
  };
  const last = () => Math.max(0, data.columns.length - width);
  const go = (column, lane = top) => {
    left = Math.max(0, Math.min(column, last()));
    top = Math.max(0, Math.min(lane, Math.max(0, data.lanes.length - LANES)));
    draw();
  };
  const toFirst = () => go(data.first - Math.floor(width / 3), firstLane - Math.floor(LANES / 2));
  const begin = button("First", () => go(0));
  const earlier = button("Earlier", () => go(left - width));
  const later = button("Later", () => go(left + width));
  const end = button("Last", () => go(last()));
  if (data.first >= 0) button("⚑ First wrong record", toFirst);
  const label = element("label", "Iteration ");
  const typed = element("input");
  typed.type = "number";
  typed.addEventListener("change", () => {
    const wanted = data.columns.findIndex((iteration) => iteration >= Number(typed.value));
    go(wanted < 0 ? last() : wanted);
  });
  label.append(typed);
  controls.append(label);
  const up = button("Requests above", () => go(left, top - LANES));
  const down = button("Requests below", () => go(left, top + LANES));
  up.hidden = down.hidden = data.lanes.length <= LANES;
  const where = element("span", "", "note");
  controls.append(where);

  const tokens = (mark) => {
    const line = element("p", undefined, "tokens");
    for (const [kind, sign] of [["accepted", "✓"], ["rejected", "✗"]]) {
      const own = mark[kind] || [];
      if (own.length) line.append(`${kind}: `, ...own.map((token) => element("span", `${sign} ${token}`, kind)), " ");
    }
    if (mark.bonus !== undefined && mark.bonus !== null) line.append("bonus: ", element("span", `+ ${mark.bonus}`, "bonus"));
    return line;
  };
  const choose = (lane, column) => {
    chosen = [lane, column];
    details.replaceChildren();
    details.append(element("p", `${data.lanes[lane].name}, iteration ${data.columns[column]}`));
    for (const mark of byColumn[lane].get(column) || []) {
      for (const text of mark.more || []) details.append(element("p", text));
      if (mark.accepted || mark.rejected || typeof mark.bonus === "number") details.append(tokens(mark));
      if (mark.wrong) {
        const what = mark.wrong === 1 ? "1 divergence is" : `${mark.wrong} divergences are`;
        details.append(element("p", `≠ ${what} in it${mark.first ? "; ⚑ the first of all" : ""}.`));
      }
    }
  };
  const said = (mark) => {
    const signs = (mark.first ? "⚑ " : "") + (mark.wrong ? "≠ " : "");
    return signs + mark.text;
  };
  const cellOf = (lane, column) => {
    const marks = byColumn[lane].get(column);
    const cell = element("td");
    if (!marks) return cell;
    const wrong = marks.some((mark) => mark.wrong);
    const kinds = marks.map((mark) => mark.kind).join(" ");
    const mark = element("button", marks.map(said).join(" "), `mark ${kinds}${wrong ? " wrong" : ""}`);
    mark.type = "button";
    mark.dataset.lane = lane;
    mark.dataset.column = column;
    mark.setAttribute("aria-label", `${data.lanes[lane].name}, iteration ${data.columns[column]}: ` +
      marks.map((one) => `${one.kind} ${one.text}${one.wrong ? `, ${one.wrong} diverged` : ""}${one.first ? ", the first of all" : ""}`).join("; "));
    if (chosen && chosen[0] === lane && chosen[1] === column) mark.classList.add("chosen");
    mark.addEventListener("click", () => { choose(lane, column); draw(); focus(lane, column); });
    cell.append(mark);
    if (marks.some((one) => one.first)) cell.className = "wrong";
    return cell;
  };
  const focus = (lane, column) => {
    const found = table.querySelector(`button[data-lane="${lane}"][data-column="${column}"]`);
    if (found) found.focus();
    return Boolean(found);
  };
  table.addEventListener("keydown", (event) => {
    const from = event.target.closest("button.mark");
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!from || !step) return;
    event.preventDefault();
    let lane = Number(from.dataset.lane) + step[0], column = Number(from.dataset.column) + step[1];
    while (lane >= 0 && lane < data.lanes.length && column >= 0 && column < data.columns.length) {
      if (byColumn[lane].has(column)) {
        if (column < left || column >= left + width || lane < top || lane >= top + LANES) {
          go(column < left ? column - width + 1 : column >= left + width ? column : left,
             lane < top ? lane - LANES + 1 : lane >= top + LANES ? lane : top);
        }
        focus(lane, column);
        return;
      }
      lane += step[0];
      column += step[1];
    }
  });
  function draw() {
    const columns = data.columns.slice(left, left + width);
    const head = element("tr");
    const corner = element("th", "request");
    corner.scope = "col";
    head.append(corner, ...columns.map((iteration) => { const made = element("th", String(iteration)); made.scope = "col"; return made; }));
    const thead = element("thead");
    thead.append(head);
    const body = element("tbody");
    data.lanes.slice(top, top + LANES).forEach((lane, n) => {
      const row = element("tr");
      const name = element("th", lane.name);
      name.scope = "row";
      name.append(element("small", lane.note));
      row.append(name, ...columns.map((_, m) => cellOf(top + n, left + m)));
      body.append(row);
    });
    table.replaceChildren(element("caption", "Iterations of the scheduler, by request"), thead, body);
    begin.disabled = earlier.disabled = left === 0;
    later.disabled = end.disabled = left >= last();
    up.disabled = top === 0;
    down.disabled = top + LANES >= data.lanes.length;
    const shown = `iterations ${columns[0]} to ${columns[columns.length - 1]} of ${data.columns[0]} to ${data.columns[data.columns.length - 1]}`;
    where.textContent = data.lanes.length > LANES ? `${shown}, requests ${top + 1} to ${Math.min(data.lanes.length, top + LANES)} of ${data.lanes.length}` : shown;
  }
  window.addEventListener("resize", () => { if (across() !== width) { width = across(); go(left); } });
  if (data.first >= 0) { toFirst(); choose(firstLane, data.first); draw(); } else { go(0); details.append(element("p", "Choose a cell.")); }
})();
