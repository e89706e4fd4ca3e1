// The tiling map: a tensor's chunks as boxes coloured and textured by who wrote them, gaps and overlaps
// hatched on top. A cursor walks from box to box by arrow keys; Enter goes in, Escape out.

const MOST_BOXES = 900;
const LEAST_PIXELS = 5;
const TEXTURES = [null, "dots", "lines", "columns"];

class TilingMap {
  constructor(contents, place) {
    this.contents = contents;
    this.place = place;
    new ResizeObserver(() => { if (this.view && this.width !== this.svg.clientWidth) this.paint(); }).observe(place);
  }

  async show(key) {
    this.key = key;
    const { contents } = this;
    const shape = contents.shapeOf(key);
    this.title = make("h3", {}, shortened(contents.names[key], 400) || "(empty key)");
    const facts = [shape === null ? "object" : `${contents.typeOf(key)} [${shape.join(", ")}]`, bytes(contents.bytes[key])];
    if (shape !== null) facts.push(plural(contents.chunks[key], "chunk"));
    if (contents.norm?.[key] != null) facts.push(`norm ${contents.norm[key].toPrecision(4)}`);
    if (contents.bad?.[key]) facts.push(`${plural(contents.bad[key], "element")} not finite`);
    const what = make("p", { class: "what" }, facts.join(" · "));
    const file = contents.pattern[key];
    const chunks = await contents.chunksOf(key);
    const ranges = await (shape === null ? contents.rangesOf(key, 1, () => file) : chunks && contents.rangesOf(key, chunks.rows, chunks.file));
    if (this.key !== key) return;
    this.view = null;
    this.ranges = ranges;
    if (shape === null) {
      this.place.replaceChildren(this.title, what, make("p", { class: "note" },
        file < 0 ? "A saved object; the index does not say where." : `A saved object${contents.ranks[file] < 0 ? "" : `, written by ${contents.writer(file)}`}, ${this.stands(0, file)}.`));
      return;
    }
    if (!chunks || shape.some((extent) => extent === 0) || !chunks.rows) {
      const why = shape.includes(0) ? "This tensor has no elements." : chunks ? "The index lists no chunk of it." : "Its extents are larger than can be drawn.";
      this.place.replaceChildren(this.title, what, make("p", { class: "note" }, why));
      return;
    }
    this.view = new View(shape, chunks);
    this.faults = (contents.faults[key] ?? []).map(([kind, ...numbers]) => ({
      kind, offsets: numbers.slice(0, shape.length), sizes: numbers.slice(shape.length),
    }));
    this.build(what);
    this.paint();
  }

  build(what) {
    this.svg = draw("svg", {
      class: "canvas", tabindex: 0, role: "application", "aria-roledescription": "tiling map",
      "aria-label": `Chunks of ${shortened(this.contents.names[this.key], 80)}`, "aria-describedby": "map-hint map-said",
      onkeydown: (event) => this.pressed(event),
      onclick: (event) => this.clicked(event),
      onmousemove: (event) => { const item = this.under(event); if (item >= 0 && item !== this.at) this.point(item); },
    });
    const tool = (label, action) => make("button", { class: "tool", type: "button", onclick: () => { action(); this.paint(); } }, label);
    this.out = tool("Whole", () => this.view.whole());
    this.tools = make("div", { class: "tools" },
      tool("Zoom in", () => this.view.scale(0.5, this.middle())), tool("Zoom out", () => this.view.scale(2)), this.out, this.axes());
    this.slices = make("div", { class: "tools" });
    this.said = make("output", { class: "said", id: "map-said", "aria-live": "polite" });
    this.legend = make("p", { class: "legend" });
    this.regions = make("div");
    this.rows = make("tbody");
    this.caption = make("summary", {});
    const table = make("details", {}, this.caption, make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Chunks in view" },
      make("table", {}, make("caption", { class: "sr" }, "Chunks in view"), make("thead", {}, make("tr", {}, ...["Region", "Written by", "File", "Bytes"].map((each) => make("th", { scope: "col" }, each)))), this.rows)));
    table.addEventListener("toggle", () => this.tabulate(table.open));
    this.table = table;
    this.place.replaceChildren(this.title, what, this.tools, this.slices, this.svg,
      make("p", { class: "hint", id: "map-hint" }, "Arrow keys or the mouse go from box to box; Enter or a click goes in, Escape out, + and − zoom."),
      this.said, this.legend, this.regions, table);
  }

  // Which dimensions are drawn, where there is a choice.
  axes() {
    const { shape } = this.view;
    if (shape.length < 3) return null;
    const chooser = (label, current, change) => {
      const select = make("select", { onchange: () => { change(Number(select.value)); this.paint(); } },
        ...shape.map((extent, dim) => make("option", { value: dim, selected: dim === current }, `dim ${dim} (${number(extent)})`)));
      return [make("label", {}, label, select), select];
    };
    const [downLabel, down] = chooser("Down", this.view.down, (dim) => this.turn(dim, this.view.across, this.view.down));
    const [acrossLabel, across] = chooser("Across", this.view.across, (dim) => this.turn(this.view.down, dim, this.view.across));
    this.selects = { down, across };
    const span = make("span", { class: "tools" });
    span.append(downLabel, acrossLabel);
    return span;
  }

  turn(down, across, other) {
    if (down === across) { if (down === this.view.down) down = other; else across = other; }
    this.view.choose(down, across);
    this.selects.down.value = down;
    this.selects.across.value = across;
  }

  slicers() {
    const { view } = this;
    const controls = view.slices.map((dim) => {
      const input = make("input", { type: "number", min: 0, max: view.shape[dim] - 1, value: view.fixed[dim] });
      input.addEventListener("input", () => {
        view.fixed[dim] = Math.max(0, Math.min(view.shape[dim] - 1, Math.floor(Number(input.value)) || 0));
        this.paint(false);
      });
      return make("label", {}, `dim ${dim} at index`, input, `of ${number(view.shape[dim])}`);
    });
    this.slices.replaceChildren(...controls);
  }

  paint(controls = true) {
    const { view, svg } = this;
    if (controls) this.slicers();
    this.width = svg.clientWidth || 480;
    const { x, y, w, h } = view.window;
    const flat = view.down < 0;
    const ratio = Math.log2(1 + h) / Math.log2(1 + w);
    const boxes = view.visible();
    for (const box of boxes) box.lost = this.contents.lost(box.file, this.ranges?.[box.row]) ? box.count : 0;
    const distinct = (axis) => new Set(boxes.map((box) => box[axis])).size;
    // High enough to label every row where there are not too many.
    const labelled = 24 + 16 * distinct("y");
    this.height = flat ? 84 : Math.round(Math.min(400, Math.max(150, labelled, this.width * 0.62 * ratio)));
    if (!view.shape.length) this.height = 120;
    const frame = { left: 1, top: 18, width: this.width - 2, height: this.height - 20 };
    this.frame = frame;
    const thin = boxes.length > 40 && boxes.filter((box) => (box.w / w) * frame.width < LEAST_PIXELS || (box.h / h) * frame.height < LEAST_PIXELS).length > boxes.length / 2;
    const many = boxes.length > MOST_BOXES || thin;
    this.items = many ? summed(boxes, view.window, Math.min(28, distinct("x")), Math.min(24, distinct("y"))) : [...boxes];
    this.items.sort((a, b) => a.y - b.y || a.x - b.x);
    const regions = this.faults.map((fault) => {
      const box = view.placed((dim) => fault.offsets[dim], (dim) => fault.sizes[dim]);
      return box && { ...box, fault, row: -1, file: -1, count: 0 };
    }).filter(Boolean);
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    svg.setAttribute("height", this.height);
    this.cursor = draw("rect", { class: "cursor" });
    this.halo = draw("rect", { class: "cursor-halo" });
    svg.replaceChildren(
      draw("rect", { class: "void", x: frame.left, y: frame.top, width: frame.width, height: frame.height }),
      ...this.edges(), ...this.items.flatMap((item) => this.box(item)), ...regions.flatMap((item) => this.region(item)), this.halo, this.cursor);
    this.items.push(...regions);
    this.at = -1;
    this.out.disabled = view.isWhole;
    const total = boxes.reduce((sum, box) => sum + box.count, 0);
    this.said.value = `${many ? "Summary of " : ""}${plural(total, "chunk")}${view.isWhole ? "" : " in view"}${many ? ": each box stands for several; go in to see them singly" : ""}. ${this.faulty()}`;
    const lost = boxes.reduce((sum, box) => sum + box.lost, 0);
    if (lost) this.said.value += ` The bytes of ${plural(lost, "chunk")} are not there.`;
    if (view.chunks.coarse) this.said.value += " Chunks of this tensor are only counted here: they are too many for this page.";
    else if (!this.ranges) this.said.value += " Where in its file each stands did not fit on this page.";
    this.boxes = boxes;
    this.keyed(this.items.filter((item) => !item.fault && item.file !== -2), regions);
    this.listFaults();
    this.caption.textContent = `Chunks in view as a table${total > 200 ? " (the first 200)" : ""}`;
    this.tabulate(this.table.open);
  }

  faulty() {
    const count = (kind) => this.faults.filter((fault) => fault.kind === kind).length;
    const said = [["gap", "gap"], ["overlap", "overlap"]].filter(([kind]) => count(kind)).map(([kind, noun]) => plural(count(kind), noun));
    return said.length ? `${said.join(", ")}.` : "No gap, no overlap.";
  }

  pixels(item) {
    const { x, y, w, h } = this.view.window;
    const { left, top, width, height } = this.frame;
    const x0 = left + Math.max(0, (item.x - x) / w) * width;
    const y0 = top + Math.max(0, (item.y - y) / h) * height;
    const x1 = left + Math.min(1, (item.x + item.w - x) / w) * width;
    const y1 = top + Math.min(1, (item.y + item.h - y) / h) * height;
    return { x: x0, y: y0, width: Math.max(1, x1 - x0), height: Math.max(1, y1 - y0) };
  }

  edges() {
    const { x, w } = this.view.window;
    const { left, width } = this.frame;
    const label = (text, at, side) => draw("text", { class: `edge ${side}`, x: at, y: 8 }, text);
    const across = this.view.across < 0 ? "scalar" : `dim ${this.view.across} →`;
    const down = this.view.down < 0 ? "" : `dim ${this.view.down} ↓ ${number(this.view.window.y)}–${number(this.view.window.y + this.view.window.h)}   `;
    const first = this.view.across < 0 ? across : `${down}${across} ${number(x)}–${number(x + w)}`;
    return [label(first, left, "start")];
  }

  box(item) {
    const at = this.pixels(item);
    const hue = item.file === -2 ? -2 : this.contents.hue(item.file);
    const look = hue === -2 ? "mixed" : hue === -1 ? "unknown" : `r${hue % 8}`;
    const texture = hue >= 0 ? TEXTURES[Math.floor(hue / 8) % 4] : null;
    const rank = item.file >= 0 ? this.contents.ranks[item.file] : -1;
    const texts = item.count > 1 ? [this.span(item), `${number(item.count)} chunks`, number(item.count)].filter(Boolean) : rank >= 0 ? [`rank ${rank}`, String(rank)] : [];
    const text = at.height >= 13 && texts.find((each) => at.width > 7 * each.length + 4);
    return [
      draw("rect", { class: `box ${look}`, ...at }),
      texture ? draw("rect", { class: "over", fill: `url(#${texture})`, ...at }) : null,
      item.lost ? draw("rect", { class: "over lost", fill: "url(#gap)", ...at }) : null,
      text ? draw("text", { x: at.x + at.width / 2, y: at.y + at.height / 2 }, text) : null,
    ].filter(Boolean);
  }

  // "rank 3", or "ranks 0–42" for a box that stands for chunks of all of them; null where some are others'.
  span(item) {
    const ranks = [...(item.files ?? [item.file])].map((file) => (file < 0 ? -1 : this.contents.ranks[file]));
    const [low, high] = [Math.min(...ranks), Math.max(...ranks)];
    if (low < 0) return null;
    const whole = new Set(ranks).size === high - low + 1;
    return low === high ? `rank ${low}` : whole ? `ranks ${low}–${high}` : `${plural(new Set(ranks).size, "rank")} of ${low}–${high}`;
  }

  region(item) {
    const at = this.pixels(item);
    const kind = item.fault.kind === "overlap" ? "overlap" : "gap";
    return [draw("rect", { class: `fault ${kind}`, fill: `url(#${kind})`, x: at.x, y: at.y, width: Math.max(3, at.width), height: Math.max(3, at.height) })];
  }

  keyed(boxes, regions) {
    const files = [...new Set(boxes.map((box) => box.file))].sort((a, b) => this.contents.hue(a) - this.contents.hue(b));
    const swatch = (...shapes) => draw("svg", { class: "swatch", viewBox: "0 0 20 14", "aria-hidden": "true" }, ...shapes.filter(Boolean));
    const whole = { width: 20, height: 14 };
    const entries = files.slice(0, 12).map((file) => {
      const hue = this.contents.hue(file);
      const texture = hue >= 0 ? TEXTURES[Math.floor(hue / 8) % 4] : null;
      return make("span", {}, swatch(draw("rect", { class: hue < 0 ? "unknown" : `r${hue % 8}`, ...whole }),
        texture && draw("rect", { fill: `url(#${texture})`, ...whole })), shortened(this.contents.writer(file), 40));
    });
    if (files.length > 12) entries.push(make("span", {}, `and ${number(files.length - 12)} more`));
    if (this.items.some((item) => item.file === -2)) entries.push(make("span", {}, swatch(draw("rect", { class: "mixed", ...whole })), "several writers"));
    for (const kind of ["gap", "overlap"]) {
      if (regions.some((item) => (item.fault.kind === "overlap") === (kind === "overlap"))) {
        entries.push(make("span", {}, swatch(draw("rect", { fill: `url(#${kind})`, ...whole })), kind));
      }
    }
    if (this.items.some((item) => item.lost)) entries.push(make("span", {}, swatch(draw("rect", { fill: "url(#gap)", ...whole })), "bytes not there"));
    this.legend.replaceChildren(...entries);
  }

  listFaults() {
    const shown = this.faults.slice(0, 12);
    if (!shown.length) { this.regions.replaceChildren(); return; }
    const show = (fault) => {
      fault.offsets.forEach((offset, dim) => { this.view.fixed[dim] = Math.max(0, Math.min(this.view.shape[dim] - 1, offset)); });
      const size = (dim) => (dim < 0 ? 1 : fault.sizes[dim]);
      const offset = (dim) => (dim < 0 ? 0 : fault.offsets[dim]);
      const { down, across } = this.view;
      this.view.zoom({ x: offset(across) - size(across), y: offset(down) - size(down), w: 3 * size(across), h: 3 * size(down) });
      this.paint();
      this.point(this.items.findIndex((item) => item.fault === fault));
    };
    const items = shown.map((fault) => make("li", {}, `${fault.kind} ${region(fault.offsets, fault.sizes)} `,
      fault.kind === "outside" ? null : make("button", { class: "more", type: "button", onclick: () => show(fault) }, "Show")));
    const more = this.faults.length - shown.length;
    this.regions.replaceChildren(make("ul", {}, ...items), more > 0 ? make("p", { class: "hint" }, `and ${number(more)} more`) : "");
  }

  tabulate(open) {
    if (!open) { this.rows.replaceChildren(); return; }
    const { chunks, shape } = this.view;
    const dims = shape.map((_, dim) => dim);
    this.rows.replaceChildren(...this.boxes.slice(0, 200).map(({ row, file }) => make("tr", {},
      make("th", { scope: "row" }, region(dims.map((dim) => chunks.offset(row, dim)), dims.map((dim) => chunks.size(row, dim)))),
      make("td", {}, this.contents.writer(file)), make("td", {}, file < 0 ? "" : shortened(this.contents.files[file], 60)),
      make("td", { class: "short" }, this.ranges?.[row]?.join(":")))));
  }

  // Where a chunk is to be found: "in bytes 0:4096 of __0_0.distcp".
  stands(row, file) {
    const range = this.ranges?.[row];
    const size = this.contents.sizes[file];
    const how = size < 0 ? ", which does not exist" : this.contents.lost(file, range) ? `, which ends at byte ${size}` : "";
    return `in ${range ? `bytes ${range.join(":")} of ` : ""}${isolated(shortened(this.contents.files[file], 120))}${how}`;
  }

  describe(item) {
    if (item.fault) return `${item.fault.kind} ${region(item.fault.offsets, item.fault.sizes)}${item.fault.kind === "gap" ? ": no chunk holds it" : ": more than one chunk holds it"}`;
    const { view, contents } = this;
    if (item.row < 0 || item.count > 1) {
      const files = item.files ?? new Set([item.file]);
      const who = files.size > 1 ? this.span(item) ?? plural(files.size, "file") : isolated(contents.writer([...files][0]));
      const span = (dim, from, size) => (dim < 0 ? [] : [`dim ${dim} ${from}:${from + size}`]);
      const where = [...span(view.down, item.y, item.h), ...span(view.across, item.x, item.w)].join(", ");
      return `${plural(item.count, "chunk")} in ${where}, by ${who}${item.lost ? `; the bytes of ${number(item.lost)} are not there` : ""}`;
    }
    const dims = view.shape.map((_, dim) => dim);
    const sizes = dims.map((dim) => view.chunks.size(item.row, dim));
    const elements = view.shape.reduce((product, extent) => product * extent, 1);
    const share = sizes.reduce((product, size) => product * size, 1) / elements;
    const where = region(dims.map((dim) => view.chunks.offset(item.row, dim)), sizes);
    const file = item.file < 0 ? "" : `, ${this.stands(item.row, item.file)}`;
    const who = item.file < 0 ? `, in ${contents.writer(item.file)}` : contents.ranks[item.file] < 0 ? "" : `, written by ${contents.writer(item.file)}`;
    return `Chunk ${number(item.row)} ${where}: ${bytes(Math.round(contents.bytes[this.key] * share))}${who}${file}`;
  }

  point(index) {
    this.at = index;
    if (index < 0) return;
    const at = this.pixels(this.items[index]);
    for (const rect of [this.halo, this.cursor]) for (const [name, value] of Object.entries(at)) rect.setAttribute(name, value);
    this.said.value = this.describe(this.items[index]);
  }

  middle() {
    const item = this.items[this.at];
    return item && { x: item.x + item.w / 2, y: item.y + item.h / 2 };
  }

  under(event) {
    const frame = this.svg.getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    const inside = (item) => { const at = this.pixels(item); return x >= at.x && x <= at.x + Math.max(3, at.width) && y >= at.y && y <= at.y + Math.max(3, at.height); };
    return this.items.findLastIndex(inside);
  }

  clicked(event) {
    const index = this.under(event);
    if (index < 0) return;
    this.point(index);
    this.enter(index);
  }

  enter(index) {
    const item = this.items[index];
    // A cell of a tiling that is only counted has no more in it to see.
    if (!item || item.count < 2 || (this.view.chunks.coarse && item.row >= 0)) return;
    const before = JSON.stringify(this.view.window);
    this.view.zoom(item);
    if (JSON.stringify(this.view.window) === before) this.view.scale(0.5, { x: item.x + item.w / 2, y: item.y + item.h / 2 });
    this.paint();
    this.point(0);
  }

  pressed(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (step) this.point(this.at < 0 ? 0 : this.next(...step));
    else if (event.key === "Home") this.point(0);
    else if (event.key === "End") this.point(this.items.length - 1);
    else if (event.key === "Enter" || event.key === " ") this.enter(this.at);
    else if (event.key === "Escape" || event.key === "0") { this.view.whole(); this.paint(); this.point(0); }
    else if (event.key === "+" || event.key === "=") { this.view.scale(0.5, this.middle()); this.paint(); this.point(0); }
    else if (event.key === "-") { this.view.scale(2); this.paint(); this.point(0); }
    else return;
    event.preventDefault();
  }

  // The nearest box whose middle lies in a direction; the same one if there is none.
  next(dx, dy) {
    const middle = (item) => { const at = this.pixels(item); return [at.x + at.width / 2, at.y + at.height / 2]; };
    const [x, y] = middle(this.items[this.at]);
    let best = this.at, least = Infinity;
    this.items.forEach((item, index) => {
      const [a, b] = middle(item);
      const along = (a - x) * dx + (b - y) * dy;
      const aside = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
      const distance = along + 3 * aside;
      if (along > 0.5 && distance < least) { least = distance; best = index; }
    });
    return best;
  }
}

function region(offsets, sizes) {
  return offsets.length ? `[${offsets.map((offset, dim) => `${offset}:${offset + sizes[dim]}`).join(", ")}]` : "[whole]";
}
